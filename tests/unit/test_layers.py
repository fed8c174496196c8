"""Arrows point down: what a module may import, read from its source. Third-party clients stay at home."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "areal_async"
LAYERS = (
    {"errors"},
    {"protocol", "sandbox", "user_files", "vision"},
    {"api", "process"},
    {"environments"},
    {"config"},
    {"algorithms", "bus", "chat_template", "data", "telemetry", "versions"},
    {"controller", "inference"},
    {"rollout", "trainer"},
    {"launch"},
    {"doctor", "monitor"},
    {"hub", "serving"},
    {"cli"},
    {"runs"},
    {"__main__"},
)
"""The rooms of the package: each imports only what lies in those above it in this list."""
ONLY_IN = {
    "nats": ("bus",),
    "httpx": ("inference",),
    "mcp": ("rollout/tools",),
    "PIL": ("vision",),
    "torch": ("trainer", "algorithms", "inference/embedded", "inference/weight_group.py", "process/device.py"),
}
OURS = {"areal_async", "workflows", "rewards", "tools", "tests"}
MAY_IMPORT = {"areal_async": {"areal_async"}, "workflows": {"areal_async", "rewards"}, "rewards": {"areal_async"}}
MAX_LINES = 500
MAX_ROOT_MODULES = 10
MAX_FILES = 25
"""Of one folder, beside its folders."""

LIBRARY = sorted(PACKAGE.rglob("*.py"))
SOURCES = [*LIBRARY, *sorted(path for name in ("workflows", "rewards", "tools") for path in (ROOT / name).glob("*.py"))]


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def _imports(path: Path) -> tuple[str, ...]:
    """Return the dotted name of every module that is imported anywhere in a file, inside functions too."""
    return tuple(_read_imports(path))


def _read_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{_name(path)}:{node.lineno}: relative import"
            # `from areal_async.telemetry import log` imports the module areal_async.telemetry.log
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if _file_of(name) else str(node.module) for name in names)


def _file_of(module: str) -> Path | None:
    """Return the file of a module of ours, ``None`` where there is none of that name."""
    stem = ROOT.joinpath(*module.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


@cache
def _arrows() -> list[tuple[Path, Path]]:
    """Return each of our modules with each one that it imports."""
    return [
        (path, other)
        for path in LIBRARY
        for name in _imports(path)
        if name.startswith("areal_async.") and (other := _file_of(name)) is not None
    ]


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def test_rooms_import_only_what_lies_below_them() -> None:
    level = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
    homeless = {_room(path) for path in LIBRARY} - {"__init__"} - set(level)
    assert not homeless, "give each a layer"

    upward = [
        f"{_name(path)} imports {_name(other)}"
        for path, other in _arrows()
        if "__init__" not in (_room(path), _room(other))
        and _room(path) != _room(other)
        and level[_room(other)] >= level[_room(path)]
    ]

    assert not upward


def test_no_folder_imports_in_a_circle() -> None:
    """Of one folder: its folders, and the modules beside them taken as one."""
    for folder in {path.parent for path in LIBRARY} - {PACKAGE}:

        def part_of(path: Path, folder: Path = folder) -> str:
            parts = path.relative_to(folder).parts
            return parts[0] if len(parts) > 1 and parts[1] != "__init__.py" else "."

        graph: dict[str, set[str]] = {}
        for path, other in _arrows():
            if folder in path.parents and folder in other.parents and part_of(path) != part_of(other):
                graph.setdefault(part_of(path), set()).add(part_of(other))
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as exc:
            raise AssertionError(f"{_name(folder)}: {' <- '.join(exc.args[1])}") from None


def test_rooms_have_a_size_that_can_be_seen() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MAX_ROOT_MODULES
    crowded = {
        _name(folder): count
        for folder in {path.parent for path in LIBRARY}
        if (count := len(list(folder.glob("*.py")))) > MAX_FILES
    }
    assert not crowded


def test_clients_stay_home() -> None:
    strangers = [
        f"{_name(path)} imports {name}"
        for path in LIBRARY
        for name in _imports(path)
        if (homes := ONLY_IN.get(name.split(".")[0])) is not None
        and not {Path(home) for home in homes} & {path.relative_to(PACKAGE), *path.relative_to(PACKAGE).parents}
    ]

    assert not strangers


def test_nothing_imports_what_names_it() -> None:
    for path in SOURCES:
        top = path.relative_to(ROOT).parts[0]
        if top != "tools":
            imported = {name.split(".")[0] for name in _imports(path)} & OURS
            assert imported <= MAY_IMPORT[top] | {top}, _name(path)


def test_modules_say_what_they_are_for_and_stay_short() -> None:
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert ast.get_docstring(ast.parse(text)), f"{_name(path)}: no docstring at the head"
        assert len(text.splitlines()) <= MAX_LINES, _name(path)
