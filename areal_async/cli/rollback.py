"""``rollback``: have a run go on from an earlier checkpoint, as a new lineage; what was trained since is given up."""

import argparse
from collections.abc import Sequence

import anyio
import anyio.to_thread

from areal_async.bus import Bus, entries_after
from areal_async.cli.orders import give, who
from areal_async.config.settings import Settings
from areal_async.controller.rollback import ORDER, checkpoint_of, go_back
from areal_async.controller.steering import text_in
from areal_async.errors import UserError
from areal_async.launch.run import visit
from areal_async.launch.run_directory import find_run
from areal_async.process.stdio import say
from areal_async.protocol.journal import Journal, without_slots
from areal_async.protocol.run_state import Control, Rollback
from areal_async.protocol.subjects import CONTROL, ROLLBACK
from areal_async.protocol.types import Cut, Outcome, Version
from areal_async.telemetry import log
from areal_async.trainer.engine.digests import damage


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Give the order, and say what comes of it."""
    log.quieten()
    directory = find_run(arguments.run)
    given = {"--by": arguments.by or who(), "--why": arguments.why or ""}
    by, reason = (text_in(given, option) for option in given)

    async def act() -> None:
        async with visit(directory) as (settings, bus):
            version = await _whole(settings, await _journal(bus), arguments.to)
            name = settings.run.name
            before, _ = await bus.get(ROLLBACK, Rollback)
            if before is not None and before.is_due:
                say(f"run {name}: this order replaces that of {before.by or 'an operator'}, to {before.version}")
            if directory.is_live:
                await give(directory, bus, ORDER, {"version": str(version), "by": by, "reason": reason})
                say(f"run {name}: the trainer is started anew, and goes on from {version} as a new lineage")
                control, _ = await bus.get(CONTROL, Control)
                if control is not None and control.is_paused:
                    say(f"run {name}: is paused, and admits nothing before it is resumed")
            else:
                await go_back(bus, settings, version, by=by, reason=reason)
                say(f"run {name}: its next start, run {name}, goes on from {version} as a new lineage")

    anyio.run(act, backend_options={"use_uvloop": True})
    return 0


async def _journal(bus: Bus) -> Journal:
    """Return what the run's log says, without what is trained in its cuts."""
    journal = Journal()
    async for message in entries_after(bus, 0):
        entry = await bus.decode(message, Cut if message.subject == bus.names.cuts else Outcome)
        if isinstance(entry, Cut):
            journal.add_cut(without_slots(entry), sequence=message.sequence)
        elif isinstance(entry, Outcome):
            journal.add_outcome(entry)
    return journal


async def _whole(settings: Settings, journal: Journal, wanted: str) -> Version:
    """Return the checkpoint that is meant.

    Raises:
        UserError: the run cannot go on from it.
    """
    version = await checkpoint_of(settings, journal, wanted)
    folder = settings.run_directory / "checkpoints" / str(version)
    if reason := await anyio.to_thread.run_sync(damage, folder):
        raise UserError(f"--to: got {version}, whose files are not whole: {reason}; name another checkpoint")
    return version
