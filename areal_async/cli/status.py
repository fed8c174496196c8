"""``status``: one screen about a run: is it alive, how far is it, what waits where, and who is missing."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import anyio
from rich.console import Console

from areal_async.config.settings import BusSettings, RunSettings, Settings
from areal_async.errors import UserError
from areal_async.launch.run import visit_at
from areal_async.launch.run_directory import find_run
from areal_async.monitor.liveness import awaiting_beat
from areal_async.monitor.snapshot import CONNECT_S, Status, ask_status, read_status
from areal_async.monitor.status_screen import render
from areal_async.protocol.subjects import RUN_NAME
from areal_async.telemetry import log


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the status; 0 whatever it says, as long as there is one."""
    log.quieten()
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
        Console(soft_wrap=True, highlight=False).print_json(json.dumps(asdict(status)), ensure_ascii=True)
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
    bus = BusSettings(url=arguments.url, credentials=arguments.credentials, ca=arguments.ca)
    return Settings(run=RunSettings(name=arguments.run), bus=bus)
