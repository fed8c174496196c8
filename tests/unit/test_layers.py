"""Arrows point down: what a module may import, read from its source. Third-party clients stay at home."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = (
    {
        "accuracy",
        "collector",
        "types",
        "run_state",
        "fields",
        "id_sets",
        "ids",
        "errors",
        "subjects",
        "staleness",
        "fault_points",
        "waits",
        "stacks",
        "events",
        "plain_text",
        "speech",
    },
    {
        "section",
        "algorithm_settings",
        "health_settings",
        "lora_settings",
        "chat_template",
        "policy_settings",
        "template_settings",
        "settings",
        "settings_effects",
        "settings_paths",
        "settings_sources",
        "settings_tree",
        "settings_yaml",
        "reward_model_settings",
        "sft_settings",
        "task_settings",
        "trainer_settings",
        "tuning_settings",
        "change_record",
        "user_calls",
        "user_files",
        "contracts",
        "stations",
        "tracing",
        "wire",
        "kept_settings",
        "live_settings",
        "made_rows",
        "endpoint_settings",
        "resumed_settings",
        "log",
        "metrics_settings",
        "data",
        "dataflow",
        "host",
        "http_server",
        "hub",
        "journal",
        "receipts",
        "recorded_rows",
        "weight_group",
    },
    {"bus", "exporters", "inference", "algorithms", "sandbox"},
    {"rollout", "trainer", "controller"},
    {"launch"},
    {"doctor", "preflight"},
    {"cli"},
    {"__main__"},
)
ONLY_IN = {
    "nats": ("bus",),
    "httpx": ("inference",),
    "mcp": ("rollout/tools",),
    "torch": ("trainer", "algorithms", "inference/embedded", "weight_group.py"),
}
OURS = {"areal_async", "workflows", "rewards", "tools", "tests"}
MAY_IMPORT = {"areal_async": {"areal_async"}, "workflows": {"areal_async", "rewards"}, "rewards": {"areal_async"}}
MAX_LINES = 500

LIBRARY = sorted((ROOT / "areal_async").rglob("*.py"))
SOURCES = [*LIBRARY, *sorted(path for name in ("workflows", "rewards", "tools") for path in (ROOT / name).glob("*.py"))]


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def _imports(path: Path) -> tuple[str, ...]:
    """Return the dotted name of every module that is imported anywhere in a file, inside functions too."""
    return tuple(_walk_imports(path))


def _walk_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{_id(path)}:{node.lineno}: relative import"
            # `from areal_async import log` imports the module areal_async.log
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from names if node.module == "areal_async" else [node.module or ""]


def _layer_of(module: str) -> int:
    layers = [number for number, names in enumerate(LAYERS) if module in names]
    assert layers, f"areal_async.{module} has no layer; give it one in {Path(__file__).name}"
    return layers[0]


def _module_of(path: Path) -> str:
    return path.relative_to(ROOT / "areal_async").with_suffix("").parts[0]


def _is_package(module: str) -> bool:
    return (ROOT / "areal_async" / module).is_dir()


@pytest.mark.parametrize("path", [path for path in LIBRARY if path.parent.name != "areal_async"], ids=_id)
def test_packages_import_only_what_lies_below_them(path: Path) -> None:
    own = _module_of(path)

    for name in _imports(path):
        if name.startswith("areal_async."):
            other = name.split(".")[1]
            assert other == own or _layer_of(other) < _layer_of(own), f"imports {name}"


@pytest.mark.parametrize(
    "path", [path for path in LIBRARY if path.parent.name == "areal_async" and path.stem != "__init__"], ids=_id
)
def test_modules_import_only_modules_of_their_layer_and_what_lies_below(path: Path) -> None:
    own = _layer_of(path.stem)

    for name in _imports(path):
        if name.startswith("areal_async."):
            other = name.split(".")[1]
            assert _layer_of(other) < own or (_layer_of(other) == own and not _is_package(other)), f"imports {name}"


@pytest.mark.parametrize("path", LIBRARY, ids=_id)
def test_clients_stay_home(path: Path) -> None:
    place = path.relative_to(ROOT / "areal_async")

    for name in _imports(path):
        homes = ONLY_IN.get(name.split(".")[0])
        assert homes is None or any(Path(home) in (place, *place.parents) for home in homes), f"imports {name}"


@pytest.mark.parametrize("path", [path for path in SOURCES if "tools" not in path.parts], ids=_id)
def test_nothing_imports_what_names_it(path: Path) -> None:
    top = path.relative_to(ROOT).parts[0]

    imported = {name.split(".")[0] for name in _imports(path)} & OURS

    assert imported <= MAY_IMPORT[top] | {top}


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_modules_say_what_they_are_for_and_stay_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")

    assert ast.get_docstring(ast.parse(text)), "no docstring at the head"
    assert len(text.splitlines()) <= MAX_LINES
