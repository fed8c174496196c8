"""The files of workflows and of the user's that they import, by their hashes: whether two hosts run the same.

Read and parsed, never run. What a file imports only while it runs, by a name that it makes up, is not seen.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from areal_async.rollout.user_code.source_location import UserCode
from areal_async.user_files import imported_files


def source_hashes(specs: Iterable[str], *, root: Path | None = None) -> dict[str, str]:
    """Return {path: SHA-256} of the files of workflows (``FILE.py[:name]``), and of the user's that they import.

    Args:
        root: what is on the import path besides each workflow's folder; ``None`` takes the working directory. Paths
            below it are relative to it.
    """
    root = (root or Path.cwd()).resolve()
    found: dict[str, str] = {}
    for spec in specs:
        workflow = (root / spec.partition(":")[0]).resolve()
        for path in _read_by(workflow, root):
            name = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return dict(sorted(found.items()))


def _read_by(workflow: Path, root: Path) -> set[Path]:
    """Return the workflow's file, where it is there, and those of the user's that it imports."""
    owner, found, waiting = UserCode(workflow, root=root), set[Path](), [workflow]
    while waiting:
        path = waiting.pop()
        if path in found or not path.is_file():
            continue
        found.add(path)
        waiting += [file for file in imported_files(path, [root, workflow.parent]) if owner.owns(str(file))]
    return found


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return the paths that only one side has, or that differ, sorted."""
    return sorted(path for path in ours.keys() | theirs.keys() if ours.get(path) != theirs.get(path))
