"""Import a user's Python file by its location, and what lies beside it by its name.

On the import path are Python's own modules first, then the root (the working directory), then what is installed, and
the file's own folder last: what Python has keeps its name, so that a file called ``random.py`` shadows nothing, and
beside a file below the root what is installed does too. Two folders whose files would import each other's modules are
refused.
"""

import ast
import importlib.util
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from areal_async.errors import ArealError, UserError

MAX_MESSAGE_CHARACTERS = 1500
_OWN_PATHS = {
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")),
    *(path for path in sys.path if path.endswith("lib-dynload")),
}
"""Those of Python's own modules."""
_importing = ContextVar("importing", default=False)
_own_folders: list[Path] = []
"""Those on the import path, in their order there."""


def import_file(path: Path, *, what: str, root: Path | None = None) -> ModuleType:
    """Return the module in ``path``, imported once per process.

    Args:
        what: the file is, as a sentence begins with it.
        root: ``None`` takes the working directory.

    Raises:
        UserError: no such file, no Python file, or it would be given another folder's modules for those beside it.
        Exception: whatever running it raises.
    """
    location = path.resolve()
    if not location.is_file():
        raise UserError(f"{what}: there is no file {path}")
    # The name is private: a user's file must not replace a module that someone else imports by name.
    name = f"areal_async_file_{location.stem}_{zlib.crc32(str(location).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, location)
    if spec is None or spec.loader is None:
        raise UserError(f"{what}: got {path}, need a Python file that ends in .py")
    root_entry = add_root(root or Path.cwd())
    add_folder(location.parent)
    _refuse_strangers(location, what)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as an import does, before the file runs: its dataclasses look there
    was_importing = _importing.set(True)
    try:
        spec.loader.exec_module(module)
    except _Enough:
        pass
    except BaseException as exc:
        del sys.modules[name]
        if isinstance(exc, SystemExit):  # else it would end this process without a word
            raise ImportError(
                f"it calls sys.exit({exc.code!r}) as it is imported; do that where __name__ == '__main__' alone"
            ) from exc
        if isinstance(exc, ModuleNotFoundError):
            message = (
                f"{exc}, neither installed, nor in {root_entry}, nor beside the file; {_where_to_get(exc, location)}"
            )
            raise ModuleNotFoundError(message, name=exc.name) from exc
        raise
    finally:
        _importing.reset(was_importing)
    return module


def is_importing() -> bool:
    """Say whether a user's file is being imported here, which then is not what was started."""
    return _importing.get()


def stop_importing() -> NoReturn:
    """End the import of a user's file where it stands, with what it has defined so far: what follows is a program."""
    raise _Enough


class _Enough(BaseException):
    """No error: no ``except Exception`` of the file's is meant to see it."""


def parts_of(spec: str, *, default: str = "") -> tuple[Path, str]:
    """Return file and name of ``FILE.py[:name]``; where it has no name ``default``, and else the file's own."""
    file, _, name = spec.partition(":")
    return Path(file), name or default or Path(file).stem


def import_named(spec: str, *, what: str, default: str = "", root: Path | None = None) -> tuple[ModuleType, str]:
    """Return the module of ``FILE.py[:name]``, and the name.

    Args:
        what: the file is, as a sentence begins with it.
        default: the name where ``spec`` has none; empty takes the file's own.
        root: ``spec`` is relative to it, and it is put on the import path; ``None`` takes the working directory.

    Raises:
        UserError: no such file, or importing it raised.
    """
    file, name = parts_of(spec, default=default)
    path = (root or Path.cwd()) / file
    with mistakes_in(f"{what}: importing {path}"):
        return import_file(path, what=what, root=root), name


def add_root(root: Path) -> str:
    """Let what lies in the root be imported, before all that is importable already but Python's own; return its path.

    A package that somebody has installed may be called ``rewards`` too.
    """
    entry = str(root.resolve())
    if entry not in sys.path:
        own = [path for path in sys.path if path in _OWN_PATHS]
        sys.path[:] = [*own, entry, *(path for path in sys.path if path not in own)]
    return entry


def add_folder(folder: Path) -> None:
    """Let what lies in a folder be imported, after all that is importable already."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        _own_folders.append(folder)


def imported_files(path: Path, roots: Sequence[Path]) -> Iterator[Path]:
    """Yield the files below ``roots`` that a file's imports may mean; nothing for one that is not Python.

    Read and parsed, never run. What lies in the first root that has it goes before the others'.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files_of(roots, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            parts = node.module.split(".") if node.module else []
            bases = [path.parents[node.level - 1]] if 0 < node.level <= len(path.parents) else roots
            for alias in node.names:
                yield from _files_of(bases, [*parts, alias.name])


@contextmanager
def mistakes_in(what: str) -> Iterator[None]:
    """Turn whatever a user's file raises while no workflow runs into a mistake of the user's, keeping the cause.

    ``sys.exit`` too: the process would end with that status, without a word, and be started again.
    """
    try:
        yield
    except ArealError:
        raise
    except (Exception, SystemExit) as exc:
        message = " ".join(str(exc).split())[:MAX_MESSAGE_CHARACTERS]
        raise UserError(f"{what}: {type(exc).__name__}: {message}") from exc


def _files_of(roots: Sequence[Path], parts: list[str]) -> Iterator[Path]:
    """Yield the module that a dotted name leads to, and the packages on the way."""
    for root in roots:
        found = [
            file
            for count in range(1, len(parts) + 1)
            for file in (root.joinpath(*parts[:count]).with_suffix(".py"), root.joinpath(*parts[:count], "__init__.py"))
            if file.is_file()
        ]
        if found:
            yield from found
            return


def _refuse_strangers(location: Path, what: str) -> None:
    """Refuse a file that imports modules beside it, or lets them do so, by a name that has another folder's by now.

    Raises:
        UserError: there is such a module.
    """
    folder, waiting, seen = location.parent, [location], {location}
    while waiting and len(_own_folders) > 1:
        for file in imported_files(waiting.pop(), [folder]):
            if file in seen or not file.is_relative_to(folder):
                continue
            seen.add(file)
            waiting.append(file)
            name = file.relative_to(folder).parts[0].removesuffix(".py")
            home = _home_of(name)
            if home != folder and home in _own_folders:
                raise UserError(
                    f"{what}: imports {name}, got the one in {home}, which another file has imported already, need "
                    f"{file}; give one of them another name"
                )


def _where_to_get(missing: ModuleNotFoundError, location: Path) -> str:
    """Say what to do for a module to be found: a project's files are often started from outside of it."""
    parts = (missing.name or "").split(".")
    for folder in location.parents[1:]:
        module = folder.joinpath(*parts)
        if parts[0] and (module.with_suffix(".py").is_file() or (module / "__init__.py").is_file()):
            return f"start in {folder}, which has it"
    return "install it, or start in the folder that has it"


def _home_of(name: str) -> Path | None:
    """Return the folder in which ``import name`` finds what it means; ``None`` where it has none."""
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations))).parent
        if spec is not None and spec.has_location and spec.origin:
            return Path(spec.origin).parent
    return None
