"""``status``: one screen about a run: is it alive, how far is it, what waits where, and who is missing."""

import argparse
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import anyio
import structlog
from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_async.config.settings import BusSettings, RunSettings, Settings
from areal_async.errors import UserError
from areal_async.launch.run import visit_at
from areal_async.launch.run_directory import find_run
from areal_async.monitor.durations import duration_text, seconds_since
from areal_async.monitor.evaluated import figure
from areal_async.monitor.liveness import awaiting_beat
from areal_async.monitor.snapshot import CONNECT_S, ENDED, OK, OVER, Status, ask_status, read_status
from areal_async.monitor.view import event_text
from areal_async.protocol.subjects import RUN_NAME


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the status; 0 whatever it says, as long as there is one."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    check_remote(arguments)
    if arguments.html is not None:
        if arguments.url is not None:
            raise UserError("--html: got --bus.url, need a run whose files are here; leave one of them out")
        from areal_async.monitor.report.write import write_report  # the tokenizer's library, which takes seconds

        write_report(find_run(arguments.run), Path(arguments.html), is_watched=arguments.watch)
        return 0
    if arguments.watch:
        raise UserError("--watch: got no --html, need the file to write again and again; give --html FILE")

    async def ask() -> Status:
        if arguments.url is not None:
            async with visit_at(remote_settings(arguments), CONNECT_S) as (settings, bus):
                return await read_status(settings, bus, ask_live=awaiting_beat(bus))
        return await ask_status(find_run(arguments.run))

    status = anyio.run(ask, backend_options={"use_uvloop": True})
    if arguments.json:
        Console(soft_wrap=True, highlight=False).print_json(json.dumps(asdict(status)))
    else:
        Console(highlight=False).print(*render(status), sep="\n")
    return 0


def check_remote(arguments: argparse.Namespace) -> None:
    """Refuse what says how to reach a broker that is not named.

    Raises:
        UserError: there is some.
    """
    for name in ("credentials", "ca") if arguments.url is None else ():
        if getattr(arguments, name) is not None:
            raise UserError(f"--bus.{name}: got no --bus.url, need the broker that it is for; a run here has its own")


def remote_settings(arguments: argparse.Namespace) -> Settings:
    """Return what is to be known of a run elsewhere: its name, and how its broker is reached.

    Raises:
        UserError: the name is no run's.
    """
    if not RUN_NAME.fullmatch(arguments.run):
        raise UserError(f"--run: got {arguments.run!r}, need the name of the run that is at --bus.url")
    credentials, ca = (None if path is None else Path(path) for path in (arguments.credentials, arguments.ca))
    bus = BusSettings(url=arguments.url, credentials=credentials, ca=ca)
    return Settings(run=RunSettings(name=arguments.run), bus=bus)


def render(status: Status) -> Iterable[Table | Text]:
    """Draw one screen."""
    head = Text(f"run {status.run}: {status.state}", style="bold")
    if status.reason:
        head.append(f" ({status.reason})", style="not bold")
    yield head
    facts = Table.grid(padding=(0, 2))
    facts.add_row("step", f"{status.step}/{status.steps}, weights {status.weights_version or 'none yet'}")
    if status.reward_mean is not None:
        held_out = f", last evaluation {figure(status.evaluation)}" if status.evaluation else ""
        facts.add_row("reward", f"{status.reward_mean:.3f}{held_out}")
    facts.add_row("groups", _groups(status))
    stored = [f"{one['num_messages']} {what} ({one['num_bytes'] / 1e6:.1f} MB)" for what, one in status.queue.items()]
    facts.add_row("stored", ", ".join(stored))
    if status.changes:
        facts.add_row("changed", ", ".join(f"{setting} = {value:.12g}" for setting, value in status.changes.items()))
    if status.shares:
        facts.add_row("mix", ", ".join(f"{task} {share:.1%}" for task, share in status.shares.items()))
    yield facts
    processes = Table("process", "", "up", "does", "waits for", "starts", "last death", box=None, padding=(0, 2, 0, 0))
    for member in status.members:
        style = "" if member.presence == OK else "dim" if member.presence == ENDED else "bold red"
        processes.add_row(
            f"{member.role} {member.instance}",
            Text(member.presence, style=style),
            duration_text(member.up_s) if member.up_s else "",
            *(Text(text) for text in (member.state, member.waits_for, str(member.num_starts or ""), member.why)),
        )
    yield processes
    if status.servers and status.state not in OVER:
        servers = Table(
            "server", "version", "requests", "tokens/s", "fenced", "last failure", box=None, padding=(0, 2, 0, 0)
        )
        for server in status.servers:
            fenced = Text(server["reason"] or "yes", style="bold red") if server["is_fenced"] else Text("")
            requests, failure = str(server.get("num_requests", "")), Text(server.get("failure", ""))
            tokens_per_s = f"{server['tokens_per_s']:.0f}" if "tokens_per_s" in server else ""
            servers.add_row(server["id"], server["version"] or "none", requests, tokens_per_s, fenced, failure)
        yield servers
    if status.events:
        events = Table.grid(padding=(0, 2))
        for event in status.events:
            ago = f"{duration_text(seconds_since(str(event['at'])))} ago" if "at" in event else ""
            events.add_row(Text(ago, style="dim"), Text(event_text(event), overflow="ellipsis", no_wrap=True))
        yield events
    for note in status.notes:
        yield Text(note, style="red")


def _groups(status: Status) -> str:
    if status.admitted is None:
        return "unknown: the controller keeps the books, and does not answer"
    counted = f"{status.admitted} admitted, {status.settled} settled, {status.in_flight} in flight"
    return f"{counted} when it ended" if status.credits is None else f"{counted}, {status.credits} credits"
