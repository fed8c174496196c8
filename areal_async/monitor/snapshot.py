"""A run at one moment: is it alive, how far is it, what waits where, and who is missing.

Everything is asked at this moment: the services what they do, the broker how full its streams are, the run's keys what
the launcher and the servers say. A process that does not answer stands there as missing, with what the launcher knows.
"""

import functools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import anyio

from areal_async.bus import Bus, Message, Report, gather_reports
from areal_async.config.live import held_changes
from areal_async.config.settings import Settings
from areal_async.errors import BusError, UnreachableError, WireError, leaves_of
from areal_async.inference.pool import STARTING
from areal_async.launch.lost import state_of as state_of_stream
from areal_async.launch.orders import pending_rollback
from areal_async.launch.run import EMBEDDED, read_settings_of, visit
from areal_async.launch.run_directory import RunDirectory
from areal_async.monitor.durations import duration_text, seconds_since
from areal_async.monitor.liveness import AskLive, locked
from areal_async.monitor.register import read_register
from areal_async.monitor.token_text import visible
from areal_async.monitor.view import number
from areal_async.process.json_lines import decode_object, read_last_json_line
from areal_async.protocol.arms import Arms, ArmState, summary
from areal_async.protocol.run_state import LEFT, Changes, Control, CrewState, Rollback, RunState, ServerState
from areal_async.protocol.subjects import ARM_STATES, ARMS, CHANGES, CONTROL, ROLLBACK, RUN_STATE
from areal_async.protocol.types import Record, Version, WeightsVersion
from areal_async.telemetry.reports import servers_in
from areal_async.versions import tags
from areal_async.versions.evaluated import last_evaluation

R = TypeVar("R", bound=Record)
Reports = Mapping[tuple[str, str], Report]
"""What each process says of itself, by role and instance."""
ANSWER_S = 1.0
"""How long a process may take to answer; then it counts as missing."""
CONNECT_S = 2.0
"""How long the broker may take; then it counts as missing, and nothing else can be asked."""
OPERATION_S = 5.0
"""How long a broker that has just gone is asked again."""
OK, MISSING, ENDED, UNKNOWN = "ok", "no answer", "ended", "unknown"
OVER = ("finished", "failed", "not running")
"""States in which nobody is missed."""
LOAD = (
    "num_requests", "limit", "outstanding_tokens", "num_generated_tokens", "tokens_per_s", "first_token_mean_s",
    "num_swaps", "swap_total_s",
)  # fmt: skip
"""What a node tells of each of its servers that stands in the status."""
BOOKS = ("admitted", "settled", "in_flight", "credits")
"""Groups, as the controller's report counts them."""
NO_CREW = CrewState(name="", state="")
"""Of processes that the launcher says nothing of."""
NUM_EVENTS = 8
"""Events that are shown, the newest ones."""
NUM_READ = 200
"""Messages among which these are looked for: what the broker tells stands there as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One process that the run is to have."""

    role: str
    instance: str
    presence: str
    """``ok``, ``no answer``, ``ended``; ``unknown`` while the broker is away."""
    state: str = ""
    waits_for: str = ""
    num_starts: int = 0
    why: str = ""
    """Why its crew died the last time."""
    up_s: float = 0.0
    """Seconds for which it has answered; 0 while it does not."""
    pid: int = 0
    host: str = ""
    loop_lag_s: float = 0.0
    """The most by which its event loop was late, lately."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """A run at one moment."""

    run: str
    state: str
    """``starting``, ``running``, ``paused``, ``stopping``, ``no broker``, ``not running``, ``finished``, ``failed``."""
    reason: str
    step: int
    steps: int
    weights_version: str
    reward_mean: float | None
    """Mean reward of the newest step."""
    accuracy: float | None
    evaluation: dict[str, Any] = field(default_factory=dict)
    """All that the newest evaluation came to; empty before the first."""
    tags: dict[str, str] = field(default_factory=dict)
    """Tag -> version that has it."""
    admitted: int | None = None
    """Groups as the controller counts them, or, once the run is over, as it left them; None where nobody says."""
    settled: int | None = None
    in_flight: int | None = None
    credits: int | None = None
    """Groups that may still be admitted; None in a run that is over, too."""
    queue: dict[str, dict[str, int]] = field(default_factory=dict)
    """Stream -> ``num_messages`` and ``num_bytes``."""
    members: list[Member]
    servers: list[dict[str, Any]] = field(default_factory=list)
    changes: dict[str, float] = field(default_factory=dict)
    """Settings that were changed while the run went on, and hold."""
    shares: dict[str, float] = field(default_factory=dict)
    """Each task's share of the prompts that are admitted now."""
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each arm has come to; ``not_served`` says which nodes cannot have it, and why."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """What has happened last, oldest first; ``teller`` is the role and the instance that told it."""
    notes: list[str] = field(default_factory=list)

    @property
    def stored_text(self) -> str:
        """How much each stream holds."""
        held = self.queue.items()
        return ", ".join(f"{one['num_messages']} {what} ({one['num_bytes'] / 1e6:.1f} MB)" for what, one in held)


async def ask_status(directory: RunDirectory) -> Status:
    """Return the status of a run, live or not; where its broker is away, what can be known without it.

    A run may end while it is asked, and its broker with it: then it is asked once more, as one that is stopped.
    """
    while True:
        was_live = directory.is_live
        try:
            async with visit(directory, connect_deadline_s=CONNECT_S, operation_deadline_s=OPERATION_S) as visited:
                return await read_status(*visited, ask_live=locked(directory))
        except* (UnreachableError, BusError) as group:
            reason = str(leaves_of(group)[0])
        if not was_live or directory.is_live:
            return without_broker(read_settings_of(directory), reason)


async def read_status(settings: Settings, bus: Bus, *, ask_live: AskLive) -> Status:
    """Ask everybody, and read the books of a run that is over."""
    gather = functools.partial(gather_reports, bus, within_s=ANSWER_S)
    status = await read_snapshot(settings, bus, gather=gather, ask_live=ask_live, num_events=NUM_EVENTS)
    if status.state not in OVER:
        return status
    try:
        accounts = (await read_register(bus)).accounts
    except WireError:  # what is damaged is for `doctor` to say
        return status
    accounts.held = Version.parse(status.weights_version) if status.weights_version else None
    settled = accounts.num_settled
    admitted = max(accounts.admitted.total, settled)  # a controller that died had not yet counted its last tickets
    return replace(status, admitted=admitted, settled=settled, in_flight=admitted - settled)


async def read_snapshot(
    settings: Settings, bus: Bus, *, gather: Callable[[], Awaitable[Reports]], ask_live: AskLive, num_events: int
) -> Status:
    """Ask everybody.

    Args:
        gather: asks each service what it says of itself.
        ask_live: is asked where none answers and nobody has said that the run goes on no more.
        num_events: how many of the newest are read; 0 to ask for none.
    """
    names = bus.names
    reports: dict[tuple[str, str], Report] = {}
    records: dict[str, Record] = {}
    servers: dict[str, tuple[ServerState, int]] = {}
    queue: dict[str, dict[str, int]] = {}
    events: list[dict[str, Any]] = []

    async def ask_services() -> None:
        reports.update(await gather())

    async def ask_keys() -> None:
        servers.update(await bus.entries("server.", ServerState))
        wanted: dict[str, type[Record]] = {"crew.": CrewState, names.weights_key(): WeightsVersion}
        wanted |= {ARMS: Arms, ARM_STATES: ArmState}
        wanted |= {RUN_STATE: RunState, CONTROL: Control, CHANGES: Changes, ROLLBACK: Rollback}
        records.update(await bus.records(wanted))

    async def ask_streams() -> None:
        streams = {
            "tickets": names.tickets_stream,
            "trajectories": names.trajectories_stream,
            "images": names.images_stream,
            "dead": names.dead_stream,
        }
        for what, stream in streams.items():
            state = await state_of_stream(bus, stream)
            if state is not None:  # that of images is not there in a run of an earlier version
                queue[what] = {"num_messages": state.num_messages, "num_bytes": state.num_bytes}

    async def ask_events() -> None:
        if num_events:
            events.extend(await read_events(bus, limit=num_events))

    async with anyio.create_task_group() as asking:
        for one in (ask_services, ask_keys, ask_streams, ask_events):
            asking.start_soon(one)
    run_state = record_at(records, RUN_STATE, RunState) or RunState()
    control = record_at(records, CONTROL, Control) or Control()
    weights = record_at(records, names.weights_key(), WeightsVersion)
    known = {key: one for key, one in records.items() if isinstance(one, CrewState)}
    members = list(members_of(settings, reports, known))
    line = newest_step(settings, reports)
    books = reports.get(("controller", "0"), {})
    counted: dict[str, Any] = {key: int(books[key]) for key in BOOKS if key in books}
    is_live = bool(reports) or (run_state.state == "running" and await ask_live())
    state = state_of(run_state, control, members, is_live=is_live)
    if settings.bus.url == EMBEDDED or "crew.broker" in known:
        members = [broker_of(known.get("crew.broker", NO_CREW), is_live=state not in OVER), *members]
    pending = pending_rollback(record_at(records, ROLLBACK, Rollback), names.run, is_live=state not in OVER)
    listed = [server_of(one, reports) for _, (one, _) in sorted(servers.items()) if one.reason != LEFT]
    return Status(
        run=settings.run.name,
        state=state,
        reason=reason_of(state, run_state, control),
        step=int(line.get("step", 0)),
        steps=int(books.get("steps", settings.run.steps)),
        weights_version=weights.version if weights is not None else "",
        reward_mean=line.get("reward_mean"),
        **last_evaluation(settings.run_directory),
        tags=tags.shown(settings.run_directory),
        **counted,
        queue=queue,
        members=members,
        servers=listed,
        changes=dict(held_changes(settings, record_at(records, CHANGES, Changes) or Changes())),
        shares=dict(books.get("shares", {})),
        arms=arms_of(records, reports),
        events=events,
        notes=[*notes_of(state, members, listed), *alarm_notes(reports), *([pending] if pending else [])],
    )


def record_at(records: Mapping[str, Record], key: str, kind: type[R]) -> R | None:
    """Return the record at a key, where there is one of that kind."""
    found = records.get(key)
    return found if isinstance(found, kind) else None


def arms_of(records: Mapping[str, Record], reports: Reports) -> dict[str, dict[str, Any]]:
    """Return what each arm has come to, by its name. Pure."""
    found: dict[str, dict[str, Any]] = {}
    for name, arm in (record_at(records, ARMS, Arms) or Arms()).by_name.items():
        state = record_at(records, f"{ARM_STATES}{name}", ArmState)
        known = state if state is not None and state.arm_id == arm.arm_id else ArmState(arm_id=arm.arm_id)
        told = {instance: report.get("arms") for (role, instance), report in sorted(reports.items()) if role == "node"}
        not_served = {node: str(arms[name]) for node, arms in told.items() if isinstance(arms, dict) and name in arms}
        found[name] = {**summary(arm, known), "by": arm.by, "at": arm.at, "not_served": not_served}
    return found


def newest_step(settings: Settings, reports: Reports) -> dict[str, Any]:
    """Return the line of the newest step: from the run's file, or, where that is elsewhere, as the trainer tells it."""
    line = read_last_json_line(settings.run_directory / "metrics.jsonl")
    told = reports.get(("trainer", "0"), {}).get("last_step")
    return line or (told if isinstance(told, dict) else {})


def without_broker(settings: Settings, reason: str) -> Status:
    """Return what the run's files alone say of it."""
    line = read_last_json_line(settings.run_directory / "metrics.jsonl") or {}
    others = [replace(one, presence=UNKNOWN, why="") for one in members_of(settings, {}, {})]
    return Status(
        run=settings.run.name,
        state="no broker",
        reason=reason,
        step=int(line.get("step", 0)),
        steps=settings.run.steps,
        weights_version=str(line.get("weights_version", "")),
        reward_mean=line.get("reward_mean"),
        **last_evaluation(settings.run_directory),
        tags=tags.shown(settings.run_directory),
        members=[Member(role="broker", instance="0", presence=MISSING, why=reason), *others],
        notes=[f"the broker does not answer: {reason}"],
    )


async def read_events(bus: Bus, *, limit: int) -> list[dict[str, Any]]:
    """Return what has happened last, oldest first; nothing of a run that was started before there were events."""
    stream = bus.names.events_stream
    try:
        newest = (await bus.stream_state(stream)).last_sequence
    except BusError:
        return []
    messages = await bus.read_log(stream, bus.names.all_events, start_sequence=newest - NUM_READ)
    return [event for event in map(event_in, messages) if event is not None][-limit:]


def event_in(message: Message) -> dict[str, Any] | None:
    """Return a stored event with who told it; None for anything else."""
    event = decode_object(message.data)
    return None if event is None else {**event, "teller": " ".join(message.subject.split(".")[3:5])}


def broker_of(crew: CrewState, *, is_live: bool) -> Member:
    """Return the broker of the run's own, which has answered."""
    return Member(
        role="broker",
        instance="0",
        presence=OK if is_live else ENDED,
        state="serves" if is_live else "",
        up_s=seconds_since(crew.at) if is_live else 0.0,
        num_starts=crew.num_starts,
        why=crew.reason,
    )


def server_of(server: ServerState, reports: Reports) -> dict[str, Any]:
    """Return what is known of an inference server; one whose node is away is so itself, whatever it said last."""
    node = reports.get(("node", server.node_id))
    is_lost, said = node is None, servers_in(node or {}).get(server.server_id, {})
    return {
        "id": server.server_id,
        "version": "" if is_lost else server.version,
        "is_fenced": server.fenced or is_lost,
        "reason": f"node {server.node_id} does not answer" if is_lost else server.reason,
        "failure": server.failure,
        "waits_for": "" if is_lost else _wait_of(server),
        **{key: said[key] for key in LOAD if key in said},
    }


def _wait_of(server: ServerState) -> str:
    """Say what a server waits for that lacks the newest weights; empty where it has them, or gets them by itself."""
    missed = f"missed broadcast {server.missed}" if server.missed else ""
    causes = [cause for cause in (server.unreadable, missed) if cause]
    if server.wants_weights or (causes and not server.fenced):
        return f"weights ({'; '.join(causes) or 'the next broadcast, or a copy on disk'})"
    return ""


def members_of(settings: Settings, reports: Reports, crews: Mapping[str, CrewState]) -> Iterator[Member]:
    """Yield every process that the settings, the launcher or the process itself say there is. Pure."""
    trainer = crews.get("crew.trainer", NO_CREW)
    num_ranks = len(trainer.hosts) or settings.trainer.num_ranks  # fewer while a host is gone
    wanted = {("controller", "0"), *(("trainer", str(rank)) for rank in range(num_ranks))}
    wanted |= {("node", name.removeprefix("crew.node-")) for name in crews if name.startswith("crew.node-")}
    for role, instance in sorted(wanted | reports.keys()):
        crew = crews.get(f"crew.node-{instance}" if role == "node" else f"crew.{role}", NO_CREW)
        report = reports.get((role, instance))
        has_ended = crew.state in ("finished", "stopped")
        said = {"state": crew.state} if report is None else report
        yield Member(
            role=role,
            instance=instance,
            presence=OK if report is not None else ENDED if has_ended else MISSING,
            state=str(said.get("state") or ""),
            waits_for=str(said.get("waits_for") or ""),
            up_s=number(said, "up_s"),
            pid=int(number(said, "pid")),
            host=str(said.get("host", "")),
            loop_lag_s=number(said, "loop_lag_max_s"),
            num_starts=crew.num_starts,
            why=crew.reason,
        )


def state_of(run_state: RunState, control: Control, members: Sequence[Member], *, is_live: bool) -> str:
    """Say in a word how the run is. Pure."""
    if run_state.state not in ("running", "stopped"):
        return run_state.state
    if run_state.state == "stopped" or not is_live:
        return "not running"
    if control.is_stopping or control.is_paused:
        return "stopping" if control.is_stopping else "paused"
    return "running" if any(member.presence == OK or member.why for member in members) else "starting"


def notes_of(state: str, members: Sequence[Member], servers: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Yield who is missing, and what servers lack. Pure."""
    if state in OVER:
        return
    for member in members:
        if member.presence == MISSING:
            why = f": {member.why}" if member.why else ""
            yield f"{member.role} {member.instance} does not answer{why}"
    for server in servers:
        if server["is_fenced"]:
            failure = f" after {server['failure']}" if server.get("failure") and server["reason"] == STARTING else ""
            yield f"server {server['id']} is fenced: {server['reason'] or 'no reason given'}{failure}"
        if server["waits_for"]:
            yield f"server {server['id']} waits for {server['waits_for']}"


def alarm_notes(reports: Reports) -> list[str]:
    """Return what trainer and controller say to be wrong with learning. Pure."""
    raised = [reports.get((role, "0"), {}).get("alarms") for role in ("trainer", "controller")]
    return [f"alarm: {sentence}" for one in raised if isinstance(one, list) for sentence in one]


def reason_of(state: str, run_state: RunState, control: Control) -> str:
    """Say who or what has brought the run there, safe to show on a terminal. Pure."""
    if state not in ("paused", "stopping"):
        return visible(run_state.reason, newline=" ")
    since = f", {duration_text(seconds_since(control.at))} ago" if control.at else ""
    because = f": {control.reason}" if control.reason else ""
    return visible(f"by {control.by or 'an operator'}{since}{because}", newline=" ")
