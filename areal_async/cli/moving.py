"""``bus move``: a stopped run goes on at another broker; its store here is marked as moved."""

import argparse
from collections.abc import Sequence

import anyio
from pydantic import ValidationError

from areal_async.bus import MovedStream, mark_moved, move_streams
from areal_async.config.settings import BusSettings, Settings
from areal_async.errors import UserError
from areal_async.launch.run import EMBEDDED, operator_bus, visit
from areal_async.launch.run_directory import RunDirectory, find_run
from areal_async.process.stdio import say
from areal_async.telemetry import log


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Move one run, and say what is there now."""
    log.quieten()
    directory = find_run(arguments.run)
    before = directory.read_settings()
    other = {
        "url": arguments.to,
        "credentials": arguments.credentials and arguments.credentials.absolute(),
        "ca": arguments.ca and arguments.ca.absolute(),
        "replicas": arguments.replicas,
    }
    try:
        to = BusSettings.model_validate(before.bus.model_dump() | other)
    except ValidationError as exc:
        raise UserError(f"bus: {exc.errors()[0]['msg']}") from exc
    moved = anyio.run(_move, directory, to, backend_options={"use_uvloop": True})
    num_messages = sum(one.num_messages for one in moved)
    say(
        f"run {before.run.name}: {len(moved)} streams with {num_messages} messages are at {to.url} as they were; "
        f"the same run command goes on there, and the store in {directory.path / 'bus'} stays, marked as moved"
    )
    return 0


async def _move(directory: RunDirectory, to: BusSettings) -> list[MovedStream]:
    """Have a run's streams at another broker, and its settings name that one.

    Killed at any moment, the run goes on where its settings say: here, or there with all that it had.

    Raises:
        UserError: the run lives, has no broker of its own, or the other one cannot have it.
        BusError: not all arrived as it was.
    """
    recorded = directory.read_settings()
    run = recorded.run.name
    if recorded.bus.url != EMBEDDED:
        raise UserError(f"run {run}: is at {recorded.bus.url}, need a broker of its own; move it with that one's tools")
    if to.url == EMBEDDED:
        raise UserError(f"--to: got {EMBEDDED}, need the address of another broker, as nats://HOST:4222")
    moved = Settings.model_validate(recorded.model_dump() | {"bus": to.model_dump()})
    async with visit(directory) as (_, source):
        if directory.is_live:  # one that does not cannot be started now
            raise UserError(f"run {run}: it runs now; stop it first")
        async with operator_bus(moved, directory, to.url) as target:
            told = await move_streams(source, target, moved)
            directory.write_settings(moved)
            directory.write_bus_url(to.url)
            mark_moved(directory.path, to.url)
    return told
