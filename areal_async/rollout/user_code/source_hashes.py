"""The files of workflows and of the user's that they import, by their hashes: whether two hosts run the same.

Read and parsed, never run. What a file imports only while it runs, by a name that it makes up, is not seen.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from areal_async.config.settings import Settings
from areal_async.config.tasks import TaskSettings
from areal_async.environments.names import code_of
from areal_async.rollout.user_code.source_location import PACKAGE, UserCode
from areal_async.user_files import imported_files


def code_of_tasks(settings: Settings, tasks: Iterable[TaskSettings] | None = None) -> list[str]:
    """Return the ``FILE.py[:name]`` that answer the rows of tasks: workflows, and what environments play with.

    Args:
        tasks: some of the settings'; ``None`` takes all.
    """
    chosen = settings.tasks if tasks is None else tasks
    return [code for task in chosen if (code := code_of(task.workflow, settings.env_of(task)))]


def source_hashes(specs: Iterable[str], *, root: Path | None = None) -> dict[str, str]:
    """Return {path: SHA-256} of the files of workflows (``FILE.py[:name]``), and of the user's that they import.

    Args:
        root: what is on the import path besides each workflow's folder; ``None`` takes the working directory. Paths
            below it are relative to it; one that is installed with this package is told as it lies there.
    """
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in sorted(source_files(specs, root=root).items())
    }


def source_files(specs: Iterable[str], *, root: Path | None = None) -> dict[str, Path]:
    """Return the files that ``source_hashes`` hashes, by the paths that it tells."""
    root = (root or Path.cwd()).resolve()
    workflows = [(root / Path(spec.partition(":")[0]).expanduser()).resolve() for spec in specs]
    return {_told(path, root): path for workflow in workflows for path in _read_by(workflow, root)}


def _told(path: Path, root: Path) -> str:
    for base, folder in ((root, root), (PACKAGE, PACKAGE.parent)):
        if path.is_relative_to(base):
            return path.relative_to(folder).as_posix()
    return str(path)


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
