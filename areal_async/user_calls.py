"""Calls of a user's own in the graph of a training step: plain functions in a file, named by ``algorithm.calls``.

A function is named like the value it makes, its parameters like those it takes:

    def advantages(rows, advantages):
        return [np.clip(one, -3.0, 3.0) for one in advantages]

What it takes and makes is read from the source, so that a run is checked before anything is imported.
"""

import ast
import importlib.util
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal_async.dataflow import Call, Kind
from areal_async.errors import UserError


def read_call(spec: str) -> Call:
    """Return the call that ``FILE.py:name`` makes, by reading the file alone.

    Raises:
        UserError: no file, no Python, no such plain function, or one with other than named parameters.
    """
    file, _, name = spec.partition(":")
    path = Path(file)
    if not name or not path.is_file():
        raise UserError(f"algorithm.calls: got {spec}, need FILE.py:name with a file that is there")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=file)
    except (SyntaxError, UnicodeDecodeError) as exc:
        raise UserError(f"algorithm.calls: {file} is not Python: {exc}") from exc
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not found:
        raise UserError(f"algorithm.calls: no function {name} in {file}; write def {name}(rows, ...)")
    parameters = found[-1].args
    if parameters.vararg or parameters.kwarg or parameters.kwonlyargs:
        raise UserError(f"algorithm.calls: {spec} takes more than named values, need a parameter for each it takes")
    taken = tuple(one.arg for one in (*parameters.posonlyargs, *parameters.args))
    return Call(name=f"{path.stem}_{name}", kind=Kind.COMPUTE, inputs=taken, outputs=(name,))


def load_function(spec: str) -> Callable[..., Any]:
    """Import the file, with the working directory alone on the path, and return its function.

    Raises:
        UserError: importing it raised.
    """
    file, _, name = spec.partition(":")
    root = str(Path.cwd())
    if root not in sys.path:
        sys.path.insert(0, root)
    # A name of its own: two files may have one stem.
    module_name = f"areal_async_calls_{Path(file).stem}_{zlib.crc32(str(Path(file).resolve()).encode()):08x}"
    found = importlib.util.spec_from_file_location(module_name, file)
    if found is None or found.loader is None:
        raise UserError(f"algorithm.calls: got {file}, need a Python file that ends in .py")
    module = importlib.util.module_from_spec(found)
    sys.modules[module_name] = module  # as an import does, before the file runs: its dataclasses look there
    try:
        found.loader.exec_module(module)
    except Exception as exc:  # whatever a user's file raises
        del sys.modules[module_name]
        raise UserError(f"algorithm.calls: importing {file} raised {type(exc).__name__}: {exc}") from exc
    function: Callable[..., Any] = getattr(module, name)
    return function
