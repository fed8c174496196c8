"""The files of workflows and of what they import from the repository, by their hashes: whether two hosts run the same.

Read and parsed, never run. What a file imports only while it runs, by a name that it makes up, is not seen.
"""

import ast
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from areal_async.rollout.user_code import UserCode


def source_hashes(specs: Iterable[str], *, root: Path | None = None) -> dict[str, str]:
    """Return {path: SHA-256} of the files of workflows (``FILE.py[:name]``) and of those they import from the root.

    Args:
        root: what is on the import path; ``None`` takes the working directory. Paths below it are relative to it.
    """
    root = (root or Path.cwd()).resolve()
    found: dict[str, str] = {}
    waiting = [(root / spec.partition(":")[0]).resolve() for spec in specs]
    while waiting:
        path = waiting.pop()
        name = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
        if name in found or not path.is_file():
            continue
        source = path.read_bytes()
        found[name] = hashlib.sha256(source).hexdigest()
        owner = UserCode(path, root=root)
        waiting += [file for file in _imported_files(source, path, root) if owner.owns(str(file))]
    return dict(sorted(found.items()))


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return the paths that only one side has, or that differ, sorted."""
    return sorted(path for path in ours.keys() | theirs.keys() if ours.get(path) != theirs.get(path))


def _imported_files(source: bytes, path: Path, root: Path) -> Iterator[Path]:
    """Yield the files that a file's imports may mean; nothing for one that is not Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files_of(root, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = path.parents[node.level - 1] if 0 < node.level <= len(path.parents) else root
            parts = node.module.split(".") if node.module else []
            for alias in node.names:
                yield from _files_of(base, [*parts, alias.name])


def _files_of(base: Path, parts: list[str]) -> Iterator[Path]:
    """Yield the module that a dotted name leads to, and the packages on the way."""
    for count in range(1, len(parts) + 1):
        place = base.joinpath(*parts[:count])
        yield from (file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())
