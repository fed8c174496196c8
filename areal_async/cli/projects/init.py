"""``init``: write a small project that runs at once on a CPU, every file of it the user's own.

Invariant: a folder that has anything in it is left as it is; what begins with a dot and virtual environments do not
count.
"""

import argparse
import difflib
import importlib.util
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from areal_async.cli.projects.templates import TEMPLATES, Template, files_of
from areal_async.errors import UserError
from areal_async.process.stdio import program, say

MAX_NAME = 44
"""Characters of the name of a project's runs: that of a run has four more at most, ``_cpu``."""


def run(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Write the project, and say what there is and what to do next."""
    if not arguments.folder:
        raise UserError("init: got no folder; name one that is to be made, or . for this one")
    template = find_template(arguments.template)
    folder = Path(arguments.folder)
    check_folder(folder)
    files = files_of(template, name_of(folder))
    write(folder, files)
    tops = {f"{file.partition('/')[0]}/" if "/" in file else file for file in files}
    say(f"{folder}: {template.sentence}; written: {', '.join(sorted(tops))}")
    for package in template.needs:
        if importlib.util.find_spec(package) is None:
            say(f"it imports {package}, which is not installed: pip install {package}")
    there = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    say(f"next: {there}{program()} run workflow.py")
    return 0


def find_template(name: str) -> Template:
    """Return the template of this name.

    Raises:
        UserError: there is none.
    """
    if name not in TEMPLATES:
        near = difflib.get_close_matches(name, TEMPLATES, n=1)
        remedy = f"did you mean {near[0]}" if near else f"need one of {', '.join(TEMPLATES)}"
        raise UserError(f"--template: got {name}; {remedy}")
    return TEMPLATES[name]


def check_folder(folder: Path) -> None:
    """Make sure that there is nothing where the project is to be.

    Raises:
        UserError: there is, or it is no folder.
    """
    try:
        if not folder.is_dir():
            if folder.exists() or folder.is_symlink():
                raise UserError(f"init: {folder} is no folder; name one that is to be made")
            return
        found = sorted(one.name for one in folder.iterdir() if not _is_aside(one))
    except OSError as exc:
        raise UserError(f"init: {folder} cannot be read: {exc.strerror}; name another folder") from exc
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise UserError(f"init: {folder} has {found[0]}{more} in it, need an empty folder; name one that is to be made")


def name_of(folder: Path) -> str:
    """Return what a project's runs are called: as its folder, in the letters that a run's name may have."""
    return re.sub(r"[^a-z0-9_-]", "_", folder.resolve().name.lower())[:MAX_NAME].strip("_-") or "project"


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files; none of them is left where one cannot be.

    Raises:
        UserError: it cannot, or somebody else has written it meanwhile.
    """
    made: list[Path] = []
    try:
        for file, content in files.items():
            path = folder / file
            for parent in reversed(path.parents):
                if not parent.exists():
                    parent.mkdir()
                    made.append(parent)
            with path.open("xb") as written:
                made.append(path)
                written.write(content)
    except OSError as exc:
        for one in reversed(made):
            with suppress(OSError):
                one.rmdir() if one.is_dir() else one.unlink()
        raise UserError(f"init: cannot write {exc.filename or folder}: {exc.strerror}; name another folder") from exc


def _is_aside(path: Path) -> bool:
    return path.name.startswith(".") or (path / "pyvenv.cfg").is_file()
