"""What there is of a run's trajectories: the archive's tokens, what the broker has, and the tokenizer to read them."""

import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

from areal_async.bus import Bus
from areal_async.errors import PipelineError, UserError, leaves_of
from areal_async.launch.run import visit
from areal_async.launch.run_directory import RunDirectory
from areal_async.monitor.token_text import Detokenizer
from areal_async.monitor.token_views import IdDetokenizer
from areal_async.monitor.trajectory_list import TRAINED, Entry, entry_of, untrained
from areal_async.protocol.types import OutcomeKind
from areal_async.trainer.output.archive_reader import ABANDONED, ArchivedTrajectory, archive_files, read_recorded

T = TypeVar("T")

ASK_S = 20.0
"""How long the broker may take to tell all that it has; then the archive must do."""


def _note(text: str) -> None:
    sys.stderr.write(text)


def ask_untrained(directory: RunDirectory, *, note: Callable[[str], None] = _note) -> list[Entry]:
    """Return what only the broker knows; nothing, with a note (by itself on stderr), where it cannot be asked."""
    return ask(directory, untrained, note=note, otherwise="only what was trained is listed") or []


def ask(
    directory: RunDirectory, read: Callable[[Bus], Awaitable[T]], *, otherwise: str, note: Callable[[str], None] = _note
) -> T | None:
    """Return what is read from the run's broker; ``None``, with a note, where that cannot be asked."""

    async def read_all() -> T:
        with anyio.fail_after(ASK_S):
            async with visit(directory, needs_whole=False) as (_, bus):
                return await read(bus)

    try:
        return anyio.run(read_all, backend_options={"use_uvloop": True})
    except* (PipelineError, TimeoutError, OSError) as group:
        reason = str(leaves_of(group)[0]) or "it does not answer"
    note(f"{otherwise}: the run's broker cannot be asked: {reason}\n")
    return None


def find_recorded(directory: RunDirectory, entries: Sequence[Entry]) -> dict[str, ArchivedTrajectory]:
    """Read the trained ones of some entries with their tokens, by id; each step is read once."""
    wanted = {entry.id for entry in entries if entry.state == TRAINED}
    steps = {entry.step for entry in entries if entry.state == TRAINED}
    found = {}
    for version, paths in archive_files(directory.path).items():
        for one in read_recorded(paths) if version.step in steps else ():
            name = f"{one.group_id}.{one.trajectory.slot.sibling}"
            if name in wanted:
                found[name] = one
    return found


def find_given_up(directory: RunDirectory, name: str) -> tuple[Entry, ArchivedTrajectory] | None:
    """Find one of a batch that the run has gone back behind; the newest, where it was trained twice."""
    for path in sorted((directory.path / "trajectories" / ABANDONED).glob("step-*.parquet"), reverse=True):
        for one in read_recorded([path]):
            entry = entry_of(one)
            if entry.id == name:
                return entry._replace(state=OutcomeKind.ROLLED_BACK, error="its cut was given up"), one
    return None


def load_decoder(directory: RunDirectory) -> Detokenizer:
    """Return the run's tokenizer; numbers, with a note on stderr, where there is none to be read."""
    # Imported here: it takes seconds.
    from areal_async.rollout.policy.text import load_codec

    try:
        final = directory.path / "model"  # there is one at the end of the run, wherever it began
        return load_codec(str(final) if final.is_dir() else directory.read_settings().model.path)
    except UserError as exc:
        sys.stderr.write(f"tokens are shown by their ids: {exc}\n")
        return IdDetokenizer()
