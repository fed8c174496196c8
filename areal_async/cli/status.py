"""``status``: one screen about a run: is it alive, how far is it, what waits where, and who is missing.

Everything is asked at this moment: the services what they do, the broker how full its streams are, the run's keys what
the launcher and the servers say. A process that does not answer stands there as missing, with what the launcher knows.
"""

import argparse
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import anyio
import structlog
from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_async.bus import Bus, Report, gather_reports
from areal_async.cli.tail import read_json_lines
from areal_async.launch.run import visit
from areal_async.launch.run_directory import find_run
from areal_async.run_state import Control, CrewState
from areal_async.settings import Settings
from areal_async.subjects import CONTROL, RUN_STATE
from areal_async.types import RunState, ServerState, WeightsVersion

ANSWER_S = 1.0
"""How long a process may take to answer; then it counts as missing."""
OK, MISSING, ENDED = "ok", "no answer", "ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One process that the run is to have."""

    role: str
    instance: str
    presence: str
    """``ok``, ``no answer`` or ``ended``."""
    state: str = ""
    waits_for: str = ""
    num_starts: int = 0
    why: str = ""
    """Of its crew's last death."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """A run at one moment."""

    run: str
    state: str
    """``running``, ``paused``, ``stopping``, ``not running``, ``finished`` or ``failed``."""
    reason: str
    step: int
    steps: int
    weights_version: str
    reward_mean: float | None
    """Of the newest step."""
    accuracy: float | None
    """Of the newest evaluation."""
    admitted: int
    settled: int
    in_flight: int
    credits: int
    queue: dict[str, dict[str, int]]
    """Stream -> ``num_messages`` and ``num_bytes``."""
    members: list[Member]
    servers: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)

    @property
    def is_healthy(self) -> bool:
        """Whether everything that is to be there answers, and no server is fenced."""
        return not self.notes


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the status; 0 whatever it says, as long as there is one."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    directory = find_run(arguments.run)

    async def ask() -> Status:
        async with visit(directory) as (settings, bus):
            return await read_status(settings, bus)

    status = anyio.run(ask, backend_options={"use_uvloop": True})
    if arguments.json:
        Console(soft_wrap=True, highlight=False).print_json(json.dumps(asdict(status)))
    else:
        Console(highlight=False).print(*render(status), sep="\n")
    return 0


async def read_status(settings: Settings, bus: Bus) -> Status:
    """Ask everybody."""
    names = bus.names
    reports: dict[tuple[str, str], Report] = {}
    crews: dict[str, tuple[CrewState, int]] = {}
    servers: dict[str, tuple[ServerState, int]] = {}
    queue: dict[str, dict[str, int]] = {}

    async def ask_services() -> None:
        reports.update(await gather_reports(bus, within_s=ANSWER_S))

    async def ask_keys() -> None:
        crews.update(await bus.entries("crew.", CrewState))
        servers.update(await bus.entries("server.", ServerState))

    async def ask_streams() -> None:
        for what, stream in (
            ("tickets", names.tickets_stream),
            ("trajectories", names.trajectories_stream),
            ("dead", names.dead_stream),
        ):
            state = await bus.stream_state(stream)
            queue[what] = {"num_messages": state.num_messages, "num_bytes": state.num_bytes}

    async with anyio.create_task_group() as asking:
        for one in (ask_services, ask_keys, ask_streams):
            asking.start_soon(one)
    run_state, _ = await bus.get(RUN_STATE, RunState)
    control, _ = await bus.get(CONTROL, Control)
    weights, _ = await bus.get(names.weights_key(), WeightsVersion)
    members = members_of(settings, reports, {name: state for name, (state, _) in crews.items()})
    lines = read_json_lines(settings.run_directory / "metrics.jsonl")
    evaluations = read_json_lines(settings.run_directory / "eval.jsonl")
    books = reports.get(("controller", "0"), {})
    state = state_of(run_state or RunState(), control or Control(), members)
    listed = [
        {
            "id": server.server_id,
            "version": server.version,
            "is_fenced": server.fenced,
            "reason": server.reason,
            **_load(reports.get(("node", server.node_id), {}), server.server_id),
        }
        for server, _ in servers.values()
    ]
    return Status(
        run=settings.run.name,
        state=state,
        reason=_reason(state, run_state or RunState(), control or Control()),
        step=int(lines[-1]["step"]) if lines else 0,
        steps=settings.run.steps,
        weights_version=weights.version if weights is not None else "",
        reward_mean=lines[-1].get("reward_mean") if lines else None,
        accuracy=evaluations[-1].get("accuracy") if evaluations else None,
        admitted=int(books.get("admitted", 0)),
        settled=int(books.get("settled", 0)),
        in_flight=int(books.get("in_flight", 0)),
        credits=int(books.get("credits", 0)),
        queue=queue,
        members=members,
        servers=listed,
        notes=list(_notes(state, members, listed)),
    )


def members_of(
    settings: Settings, reports: Mapping[tuple[str, str], Report], crews: Mapping[str, CrewState]
) -> list[Member]:
    """Return every process that the settings, the launcher or the process itself say there is. Pure."""
    wanted = {("controller", "0"), *(("trainer", str(rank)) for rank in range(settings.trainer.num_ranks))}
    wanted |= {("node", name.removeprefix("crew.node-")) for name in crews if name.startswith("crew.node-")}
    members = []
    for role, instance in sorted(wanted | reports.keys()):
        crew = crews.get(f"crew.node-{instance}" if role == "node" else f"crew.{role}")
        report = reports.get((role, instance))
        has_ended = crew is not None and crew.state in ("finished", "stopped")
        members.append(
            Member(
                role=role,
                instance=instance,
                presence=OK if report is not None else ENDED if has_ended else MISSING,
                state=str((report or {}).get("state") or (crew.state if crew is not None and report is None else "")),
                waits_for=str((report or {}).get("waits_for") or ""),
                num_starts=crew.num_starts if crew is not None else 0,
                why=crew.reason if crew is not None else "",
            )
        )
    return members


def state_of(run_state: RunState, control: Control, members: Sequence[Member]) -> str:
    """Say in a word how the run is. Pure."""
    if run_state.state != "running":
        return run_state.state
    if not any(member.presence == OK for member in members):
        return "not running"
    return "stopping" if control.is_stopping else "paused" if control.is_paused else "running"


def render(status: Status) -> Iterable[Table | Text]:
    """Draw one screen."""
    head = Text(f"run {status.run}: {status.state}", style="bold")
    if status.reason:
        head.append(f" ({status.reason})", style="not bold")
    yield head
    facts = Table.grid(padding=(0, 2))
    facts.add_row("step", f"{status.step}/{status.steps}, weights {status.weights_version or 'none yet'}")
    if status.reward_mean is not None:
        accuracy = f", last evaluation {status.accuracy:.3f}" if status.accuracy is not None else ""
        facts.add_row("reward", f"{status.reward_mean:.3f}{accuracy}")
    facts.add_row(
        "groups",
        f"{status.admitted} admitted, {status.settled} settled, {status.in_flight} in flight, {status.credits} credits",
    )
    stored = [f"{one['num_messages']} {what} ({one['num_bytes'] / 1e6:.1f} MB)" for what, one in status.queue.items()]
    facts.add_row("stored", ", ".join(stored))
    yield facts
    processes = Table("process", "", "does", "waits for", "starts", "last death", box=None, padding=(0, 2, 0, 0))
    for member in status.members:
        style = "" if member.presence == OK else "dim" if member.presence == ENDED else "bold red"
        processes.add_row(
            f"{member.role} {member.instance}",
            Text(member.presence, style=style),
            *(Text(text) for text in (member.state, member.waits_for, str(member.num_starts or ""), member.why)),
        )
    yield processes
    if status.servers:
        servers = Table("server", "version", "requests", "fenced", box=None, padding=(0, 2, 0, 0))
        for server in status.servers:
            fenced = Text(server["reason"] or "yes", style="bold red") if server["is_fenced"] else Text("")
            servers.add_row(server["id"], server["version"] or "none", str(server.get("num_requests", "")), fenced)
        yield servers
    for note in status.notes:
        yield Text(note, style="red")


def _notes(state: str, members: Sequence[Member], servers: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    if state in ("finished", "failed", "not running"):
        return
    for member in members:
        if member.presence == MISSING:
            why = f": {member.why}" if member.why else ""
            yield f"{member.role} {member.instance} does not answer{why}"
    for server in servers:
        if server["is_fenced"]:
            yield f"server {server['id']} is fenced: {server['reason'] or 'no reason given'}"


def _load(node: Report, server_id: str) -> dict[str, Any]:
    servers = node.get("servers")
    found = servers.get(server_id) if isinstance(servers, dict) else None
    return {key: found[key] for key in ("num_requests", "limit") if key in found} if isinstance(found, dict) else {}


def _reason(state: str, run_state: RunState, control: Control) -> str:
    if state not in ("paused", "stopping"):
        return run_state.reason
    since = f", {_age(control.at)} ago" if control.at else ""
    return f"by {control.by or 'an operator'}{since}{f': {control.reason}' if control.reason else ''}"


def _age(at: str) -> str:
    seconds = (datetime.now(UTC) - datetime.fromisoformat(at)).total_seconds()
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
