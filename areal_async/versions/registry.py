"""What is kept of a run's versions, with what is known of each, and which of that may go. Files only."""

import hashlib
import json
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal_async.process.atomic_folders import LEDGER, delete, is_held, versions_in
from areal_async.process.json_lines import decode_object, json_lines
from areal_async.protocol.fields import is_version
from areal_async.protocol.types import Version
from areal_async.versions import tags
from areal_async.versions.best import accuracies_of
from areal_async.versions.tags import BEST

CHECKPOINTS, WEIGHTS = "checkpoints", "weights"
FOLDERS = {CHECKPOINTS: "checkpoint", WEIGHTS: "weights"}
"""Folders with one folder for each version -> what these are."""
MODELS = ("model", "model_best", "adapter")
"""What a finished run has exported."""
CODE, ROWS = "code.json", "rows.json"
UNTAGGED, ABANDONED = "untagged", "abandoned"
RULES = {
    UNTAGGED: "what has no tag",
    ABANDONED: "what has no tag, of steps that the run did not go on from",
}
MAX_RECORD_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A version of which something is on disk."""

    run: str
    version: str
    lineage: int
    parent: str
    """Version that its lineage began from; empty for the model itself, or where nothing tells."""
    tags: list[str]
    accuracy: float | None
    """Mean over the tasks of what its evaluation came to; None where it was not evaluated."""
    kinds: list[str]
    """What there is of it: ``checkpoint``, ``weights``, ``model``, ``model_best``, ``adapter``."""
    num_bytes: int
    settings: str = ""
    """SHA-256 of the run's settings, as they are now."""
    data: dict[str, str] = field(default_factory=dict)
    """Setting that names a data set -> SHA-256 of its rows."""
    code: dict[str, str] = field(default_factory=dict)
    """File of the run's workflows -> its SHA-256, at the newest start."""


@dataclass(frozen=True, slots=True)
class Deletable:
    """A folder that a rule lets go."""

    path: Path
    num_bytes: int


def runs_in(folder: Path) -> list[Path]:
    """Return the directories of the runs in a folder, by name."""
    return sorted(path.parent for path in folder.glob("*/config.yaml"))


def kept(run_directory: Path) -> list[Kept]:
    """Return what is kept of a run, oldest version first.

    Raises:
        UserError: its tags were damaged.
    """
    folders: dict[Version, list[tuple[str, Path]]] = {}
    for path, kind, version in _folders(run_directory):
        folders.setdefault(version, []).append((kind, path))
    names: dict[str, list[str]] = {}
    for tag in tags.read(run_directory).values():
        names.setdefault(tag.version, []).append(tag.tag)
    accuracies, parents = accuracies_of(run_directory), _parents(run_directory)
    hashes: dict[str, Any] = {
        "settings": hashlib.sha256((run_directory / "config.yaml").read_bytes()).hexdigest(),
        "data": {name: one["sha256"] for name, one in read_rows(run_directory).items()},
        "code": _record(run_directory / CODE),
    }
    return [
        Kept(
            run=run_directory.name,
            version=str(version),
            lineage=version.lineage,
            parent=parents.get(version.lineage, ""),
            tags=names.get(str(version), []),
            accuracy=accuracies.get(version),
            kinds=list(dict.fromkeys(kind for kind, _ in own)),
            num_bytes=sum(size_of(path) for _, path in own),
            **hashes,
        )
        for version, own in sorted(folders.items())
    ]


def deletable(run_directory: Path, rule: str, *, keep_newest: int, needed: Collection[Version]) -> list[Deletable]:
    """Return the checkpoints and weights that a rule lets go; nothing that has a tag, is the best, or is being read.

    Args:
        rule: one of ``RULES``.
        keep_newest: so many of each kind stay, at least one.
        needed: what the run begins from when it is started again.

    Raises:
        UserError: its tags were damaged.
    """
    spared = tags.tagged(run_directory) | set(needed) | _best(run_directory)
    made = {line.get("step"): line.get("weights_version") for line in json_lines(run_directory / "metrics.jsonl")}

    def may_go(version: Version) -> bool:
        if version in spared or is_held(run_directory / CHECKPOINTS / str(version), LEDGER):
            return False
        return rule != ABANDONED or bool(made and version.step and made.get(version.step) != str(version))

    folders = [
        run_directory / name / str(version)
        for name in FOLDERS
        for version in versions_in(run_directory / name)[:-keep_newest]
        if may_go(version)
    ]
    return [Deletable(folder, size_of(folder)) for folder in folders]


def remove(run_directory: Path, one: Deletable) -> bool:
    """Delete a folder, unless somebody holds it meanwhile or has given it a tag; say whether it is gone."""

    def has_tag(name: str) -> bool:
        return Version.parse(name) in tags.tagged(run_directory)

    return delete(one.path, LEDGER, has_tag)


def exported_version(run_directory: Path, name: str) -> str:
    """Return the version of a model that was exported at the run's end; empty where no checkpoint tells."""
    if name == "model_best":
        return next(map(str, _best(run_directory)), "")
    versions = versions_in(run_directory / CHECKPOINTS)
    return str(versions[-1]) if versions else ""


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder, which may go meanwhile."""
    num_bytes = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            status = path.lstat()
            num_bytes += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return num_bytes


def _folders(run_directory: Path) -> Iterator[tuple[Path, str, Version]]:
    for name, kind in FOLDERS.items():
        for version in versions_in(run_directory / name):
            yield run_directory / name / str(version), kind, version
    for name in MODELS:
        for path in run_directory.glob(f"{name}*"):
            text = path.name.removeprefix(f"{name}_") if path.name != name else exported_version(run_directory, name)
            if path.is_dir() and is_version(text):
                yield path, name, Version.parse(text)


def _best(run_directory: Path) -> set[Version]:
    link = run_directory / CHECKPOINTS / BEST
    name = link.readlink().name if link.is_symlink() else ""
    return {Version.parse(name)} if is_version(name) else set()


def _parents(run_directory: Path) -> dict[int, str]:
    """Return which version each lineage began from that the run has gone through."""
    parents: dict[int, str] = {}
    before = ""
    for line in json_lines(run_directory / "metrics.jsonl"):
        version = str(line.get("weights_version"))
        if is_version(version):
            parents.setdefault(Version.parse(version).lineage, before)
            before = version
    return parents


def _record(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            return decode_object(file.read(MAX_RECORD_BYTES)) or {}
    except OSError:
        return {}


def read_code(run_directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a run's workflows as it was started last; nothing where nothing tells."""
    return {path: str(digest) for path, digest in _record(run_directory / CODE).items()}


def read_rows(run_directory: Path) -> dict[str, dict[str, Any]]:
    """Return what is recorded of a run's rows, by the setting that names them; nothing where nothing is."""
    return {name: one for name, one in _record(run_directory / ROWS).items() if isinstance(one, dict)}


def short_hash(hashes: Mapping[str, str]) -> str:
    """Return a few digits that stand for all of some hashes; empty for none."""
    text = json.dumps(dict(hashes), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8] if hashes else ""
