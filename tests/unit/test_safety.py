"""No bytes become code: nothing is unpickled, evaluated or handed to a shell anywhere in the sources.

The one exception is torch's own: DCP keeps its ``.metadata`` as a pickle, which
``areal_async/trainer/engine/checkpoint.py`` reads.
"""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("areal_async", "workflows", "rewards", "tools")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS: dict[str, Callable[[dict[str, ast.expr]], bool]] = {
    "torch.load": lambda keywords: not _is(keywords.get("weights_only"), True),
    "numpy.load": lambda keywords: not _is(keywords.get("allow_pickle", ast.Constant(False)), False),
    "np.load": lambda keywords: not _is(keywords.get("allow_pickle", ast.Constant(False)), False),
    "yaml.load": lambda _: True,
    "yaml.load_all": lambda _: True,
    "yaml.full_load": lambda _: True,
    "yaml.unsafe_load": lambda _: True,
    "os.system": lambda _: True,
    "os.popen": lambda _: True,
    "subprocess.getoutput": lambda _: True,
    "subprocess.getstatusoutput": lambda _: True,
    "asyncio.create_subprocess_shell": lambda _: True,
    "tempfile.mktemp": lambda _: True,
}
"""Calls that are refused, by how they are called."""
PROGRAM = "compile(source, 'program.py', 'exec')"
ALLOWED = {"areal_async/sandbox/init.py": [f"exec({PROGRAM}, main_module.__dict__)", PROGRAM]}
"""A sandbox is there to run what a model wrote."""


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _dotted(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def unsafe_parts(source: str) -> Iterator[str]:
    """Yield line and text of everything in a source that could turn bytes into code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if any(name.split(".")[0] in MODULES for name in names):
                yield f"{node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call):
            keywords = {one.arg: one.value for one in node.keywords if one.arg}
            name = _dotted(node.func)
            is_unsafe = name in BUILTINS or (name in CALLS and CALLS[name](keywords))
            if is_unsafe or not _is(keywords.get("shell", ast.Constant(False)), False):
                yield f"{node.lineno}: {ast.unparse(node)}"


def test_no_bytes_become_code() -> None:
    for path in SOURCES:
        name = str(path.relative_to(ROOT))
        found = [part.partition(": ")[2] for part in unsafe_parts(path.read_text(encoding="utf-8"))]
        assert found == ALLOWED.get(name, []), name


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import a.b, dill",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "eval(text)",
        "subprocess.run(text, shell=True)",
        "anyio.run_process(text, shell=is_shell)",
        "os.system(text)",
    ],
)
def test_the_walk_finds(line: str) -> None:
    assert list(unsafe_parts(line))


@pytest.mark.parametrize(
    "line", ["torch.load(path, weights_only=True)", "model.eval()", "yaml.safe_load(text)", "re.compile('a')"]
)
def test_the_walk_lets_pass(line: str) -> None:
    assert not list(unsafe_parts(line))
