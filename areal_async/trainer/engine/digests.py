"""Whether the files of a checkpoint are what was written: the digest of each stands in the checkpoint itself.

``SHA256SUMS`` is in the form that ``sha256sum --check`` reads, with paths from the checkpoint's folder. Every rank
takes the digests of what it wrote, so that none has to read another's shards. A checkpoint without that file was made
before there was one, and nothing can be said of it.

Imports no torch: the doctor looks at checkpoints with it.
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from areal_async.process.atomic_folders import LEDGER, held, versions_in
from areal_async.protocol.types import Version

SUMS = "SHA256SUMS"
DAMAGED = ".damaged"
"""Ends the name of a checkpoint that is set aside: no rule counts it, and none deletes it."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_THREADS = 8
"""Files read at once; hashing lets other threads run."""


class Damage(NamedTuple):
    """What is wrong with a checkpoint."""

    version: str
    reason: str
    """Names the file."""


def digests(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 of some files, in hexadecimal, by their paths from ``folder``."""
    with ThreadPoolExecutor(MAX_THREADS) as threads:
        paths = sorted(files)
        return dict(zip((str(path.relative_to(folder)) for path in paths), threads.map(_digest, paths), strict=True))


def write_sums(folder: Path, known: Mapping[str, str]) -> None:
    """Write ``SHA256SUMS``; of files whose digest is not ``known`` it is taken now."""
    files = {path for path in folder.rglob("*") if path.is_file() and str(path.relative_to(folder)) not in known}
    sums = {**known, **digests(folder, files)}
    (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))


def digest_of_sums(checkpoint: Path) -> str:
    """Return the SHA-256 of a checkpoint's ``SHA256SUMS``, to be kept apart from it; empty where it has none."""
    try:
        return _digest(checkpoint / SUMS)
    except FileNotFoundError:
        return ""


def damage(checkpoint: Path, *, sums_sha256: str = "") -> str:
    """Return what is wrong with a checkpoint's files, in words that name the first such file; empty for nothing.

    Reads every byte of it; some GB a second.

    Args:
        sums_sha256: what ``digest_of_sums`` was when it was made, as far as that is known.
    """
    if not (checkpoint / LEDGER).is_file():
        return f"{LEDGER} is missing" if checkpoint.is_dir() else "its folder is gone"
    sums = checkpoint / SUMS
    if not sums.is_file():
        return f"{SUMS} is missing" if sums_sha256 else ""
    listed = sums.read_bytes()
    if sums_sha256 and hashlib.sha256(listed).hexdigest() != sums_sha256:
        return f"{SUMS} is not what was written: its SHA-256 differs"
    wanted: dict[str, str] = {}
    for line in listed.decode(errors="replace").removesuffix("\n").split("\n"):
        digest, _, name = line.partition("  ")
        if not _SHA256.fullmatch(digest) or not name:
            return f"{SUMS} cannot be read"
        wanted[name] = digest
    for name in sorted(wanted):
        if not (checkpoint / name).is_file():
            return f"{name} is missing"
    unlisted = [name for name in _essential(checkpoint) if name not in wanted]
    if unlisted:
        return f"{unlisted[0]} is not in {SUMS}"
    try:
        found = digests(checkpoint, (checkpoint / name for name in wanted))
    except OSError as exc:
        return f"{exc.filename} cannot be read: {exc.strerror}"
    differing = [name for name in sorted(wanted) if found[name] != wanted[name]]
    return f"{differing[0]} is not what was written: its SHA-256 differs" if differing else ""


def _essential(checkpoint: Path) -> list[str]:
    """Return what is loaded of a checkpoint: a list that was cut short says nothing of the rest."""
    state = checkpoint / "state"
    files = (*state.glob(".metadata"), *state.glob("*.distcp"))
    return [LEDGER, *sorted(str(path.relative_to(checkpoint)) for path in files)]


def find_damage(checkpoints: Path) -> list[Damage]:
    """Look at every checkpoint in a folder; one that a live run deletes meanwhile is passed over."""
    found = []
    for version in versions_in(checkpoints):
        with held(checkpoints / str(version), LEDGER) as is_there:
            reason = damage(checkpoints / str(version))
        if reason and (is_there or (checkpoints / str(version)).is_dir()):
            found.append(Damage(str(version), reason))
    return found


def newest_intact(checkpoints: Path, *, before: Version, fits: Callable[[Path], bool]) -> Path | None:
    """Return the newest checkpoint that is not ``before``, of no later step, whole, and fits; None without one."""
    older = [version for version in versions_in(checkpoints) if version.step <= before.step and version != before]
    for version in sorted(older, key=lambda one: (one.step, one.lineage), reverse=True):
        path = checkpoints / str(version)
        if not damage(path) and fits(path):
            return path
    return None


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that nothing begins from it and somebody may look; return where it is now.

    One that is gone stays so.
    """
    endings = itertools.chain([DAMAGED], (f"{DAMAGED}-{number}" for number in itertools.count(2)))
    places = (checkpoint.with_name(f"{checkpoint.name}{ending}") for ending in endings)
    aside = next(place for place in places if not place.exists())
    if checkpoint.is_dir():
        checkpoint.rename(aside)
    return aside


def set_aside_in(checkpoints: Path) -> list[str]:
    """Return the names of the checkpoints that were set aside."""
    return sorted(path.name for path in checkpoints.glob(f"*{DAMAGED}*"))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
