"""Paths in settings: each is relative to a folder that its source has, and is passed on as it is seen from here.

One of a YAML file is relative to the folder of that file, one of the command line or of the environment to the working
directory. Merged settings hold what lies below the working directory relative to it, so that a host with the same
repository elsewhere understands them, and all else absolute; a run records absolute ones, so that it goes on wherever
its command is given.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal_async.config.section import OPTION_BEGINNINGS, PathKind
from areal_async.config.tree import Parts, path_kind, step_into, without_none
from areal_async.environments.names import SCHEMES, environment_name
from areal_async.process.hub import is_local, looks_like_hub_name
from areal_async.user_files import parts_of

_PYTHON_FILE = re.compile(r"[^\s:]+\.py(:[A-Za-z_]\w*)?")
"""Among options of an environment."""


def placed(value: Any, annotation: Any, *, parts: Parts, folder: Path) -> tuple[Any, dict[Parts, str]]:
    """Return the value of a setting with its paths as they are seen from the working directory.

    Args:
        annotation: the setting's type; what does not fit it is returned as it is.
        folder: that they are relative to.

    Returns:
        And what is wrong with those that are there from the working directory alone, by their places.
    """
    misplaced: dict[Parts, str] = {}

    def place(file: str, kind: PathKind, parts: Parts) -> str:
        base = Path.cwd() if kind is PathKind.OUTPUT else folder
        looked, here = _joined(base, file), _joined(Path.cwd(), file)
        if looked != here and not os.path.exists(looked) and os.path.exists(here):
            misplaced[parts] = (
                f"got {file}, need a path from the folder of the file it stands in, where there is no {looked}; write "
                f"{os.path.relpath(here, os.path.realpath(folder))}"
            )
        return _as_seen(looked, kind) if _is_path(file, kind, base) else file

    return _mapped(value, annotation, parts, place), misplaced


def with_absolute_paths(dumped: Any, kind: Any) -> Any:
    """Return dumped settings, or a part of them with its own type, with every path absolute."""
    return _with_paths(dumped, kind, _joined)


def with_real_paths(dumped: Any, kind: Any) -> Any:
    """Return dumped settings with every path absolute and without links: those of one file are equal."""
    return _with_paths(dumped, kind, lambda folder, file: os.path.realpath(_joined(folder, file)))


def is_same_function(left: str, right: str) -> bool:
    """Say whether both ``FILE.py[:name]``, or environments, are one; without a name it is that of the file."""
    one, other = environment_name(left), environment_name(right)
    if one is not None or other is not None:
        return one is not None and other is not None and _meant(*one) == _meant(*other)
    (file, name), (other_file, other_name) = parts_of(left), parts_of(right)
    return (os.path.realpath(file), name) == (os.path.realpath(other_file), other_name)


def _meant(scheme: str, name: str) -> tuple[str, str]:
    return scheme, os.path.realpath(name) if SCHEMES[scheme].is_path else name


def _with_paths(dumped: Any, kind: Any, change: Callable[[Path, str], str]) -> Any:
    here = Path.cwd()
    return _mapped(dumped, kind, (), lambda file, kind, _: change(here, file) if _is_path(file, kind, here) else file)


def _mapped(value: Any, annotation: Any, parts: Parts, change: Callable[[str, PathKind, Parts], str]) -> Any:
    """Return a value with something else for every path in it, which ``change`` is told with its kind and place."""
    annotation = without_none(annotation)
    if isinstance(value, dict):
        return {key: _mapped(one, step_into(annotation, key), (*parts, str(key)), change) for key, one in value.items()}
    if isinstance(value, list | tuple):
        indexed = enumerate(value)
        return [_mapped(one, step_into(annotation, str(index)), (*parts, str(index)), change) for index, one in indexed]
    kind = path_kind(annotation)
    if annotation is Any and isinstance(value, str):
        kind = _kind_of_option(value)
    if kind is None or not isinstance(value, str) or not value:
        return value
    if kind is not PathKind.FUNCTION:
        return change(value, kind, parts)
    if (environment := environment_name(value)) is not None:
        scheme, place = environment
        return f"{scheme}:{change(place, kind, parts)}" if environment.kind.is_path else value
    file, colon, name = value.partition(":")
    return change(file, kind, parts) + colon + name


def _kind_of_option(text: str) -> PathKind | None:
    if _PYTHON_FILE.fullmatch(text):
        return PathKind.FUNCTION
    return PathKind.OPTION if text.startswith(OPTION_BEGINNINGS) else None


def _is_path(text: str, kind: PathKind, folder: Path) -> bool:
    """Say whether it is a path, and not a hub name or a program that is searched for."""
    if kind is PathKind.HUB:
        return is_local(text, folder)
    return kind is not PathKind.PROGRAM or "/" in text


def _joined(folder: Path, file: str) -> str:
    """Return an absolute path. Links of the folder are followed, and not those of the file: it has its own name."""
    return os.path.normpath(os.path.join(os.path.realpath(folder), os.path.expanduser(file)))


def _as_seen(path: str, kind: PathKind) -> str:
    """Return an absolute path as it is written in merged settings, so that it cannot be taken for another thing."""
    here = Path.cwd()
    if not Path(path).is_relative_to(here):
        return path
    seen = os.path.relpath(path, here)
    if kind is PathKind.PROGRAM and "/" not in seen:
        return path
    has_mark = kind is PathKind.OPTION or (kind is PathKind.HUB and looks_like_hub_name(seen))
    return f"./{seen}" if has_mark else seen
