"""What a person types for a version of a run: ``1-20``, the step ``20``, ``best``, ``last``, or a tag."""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.process.atomic_folders import LEDGER, held, versions_in
from areal_async.process.json_lines import json_lines
from areal_async.protocol.fields import is_version
from areal_async.protocol.types import Version
from areal_async.versions import tags
from areal_async.versions.best import find_best
from areal_async.versions.tags import BEST, LAST

MAX_LISTED = 20
is_step = re.compile(r"[0-9]{1,9}").fullmatch


@contextmanager
def kept(run_directory: Path, settings: Settings, wanted: str, *, option: str = "--version") -> Iterator[Version]:
    """Give the version that is meant, whose checkpoint a live run keeps while the block lasts.

    Raises:
        UserError: as ``resolve``.
    """
    while True:
        version = resolve(run_directory, settings, wanted, option=option)
        folder = run_directory / "checkpoints" / str(version)
        with held(folder, LEDGER) as is_there:
            if is_there or (folder.is_dir() and not (folder / LEDGER).exists()):  # no checkpoint: whoever reads it says
                yield version
                return


def resolve(
    run_directory: Path,
    settings: Settings,
    wanted: str,
    *,
    option: str = "--version",
    among: Collection[Version] | None = None,
) -> Version:
    """Return the version that is meant.

    Args:
        option: what the person has typed it for.
        among: the versions that will do, which are all but those whose steps were given up; those that have a
            checkpoint, where it is left out.

    Raises:
        UserError: it is not there, or nothing tells which is the best; the sentence lists what there is.
    """
    there = versions_in(run_directory / "checkpoints") if among is None else sorted(among)
    given = tags.read(run_directory)
    found = _find(run_directory, settings, wanted, there, given)
    if found in there:
        return found
    if found is not None and among is not None and (run_directory / "checkpoints" / str(found)).is_dir():
        raise UserError(f"{option}: got {found}, whose steps the run has given up, need one of {_listed(there, given)}")
    what = "checkpoint" if among is None else "version"
    tag = given.get(wanted)
    got = f"{wanted:.70}" + (f", which is {tag.version}" if tag is not None else "")
    raise UserError(f"{option}: {run_directory} has no {what} {got}, need one of {_listed(there, given)}")


def _find(
    run_directory: Path, settings: Settings, wanted: str, there: list[Version], given: dict[str, tags.Tag]
) -> Version | None:
    if wanted == LAST:
        return there[-1] if there else None
    if wanted == BEST:
        return _best(run_directory, settings)
    if is_version(wanted):
        return Version.parse(wanted)
    if is_step(wanted):
        return _of_step(run_directory, int(wanted), there)
    return Version.parse(given[wanted].version) if wanted in given else None


def _best(run_directory: Path, settings: Settings) -> Version | None:
    if settings.trainer.keep_best is None:
        judged = settings.trainer.model_copy(update={"keep_best": "reward"})
        settings = settings.model_copy(update={"trainer": judged})
    return find_best(run_directory, settings)


def _of_step(run_directory: Path, step: int, there: list[Version]) -> Version | None:
    """Return the version of a step that the run went on from; the newest where nothing tells."""
    surviving = [line for line in json_lines(run_directory / "metrics.jsonl") if line.get("step") == step]
    if surviving and is_version(text := str(surviving[-1].get("weights_version"))):
        return Version.parse(text)
    return max((version for version in there if version.step == step), default=None)


def _listed(there: list[Version], given: dict[str, tags.Tag]) -> str:
    listed = [str(version) for version in there[-MAX_LISTED:]]
    if len(there) > MAX_LISTED:
        listed.insert(0, f"{len(there) - MAX_LISTED} older ones")
    names = [name for name, tag in given.items() if Version.parse(tag.version) in there]
    return ", ".join([*listed, *([BEST, LAST] if there else []), *names]) or "none"
