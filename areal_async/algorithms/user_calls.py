"""Calls of a user's own in the graph of a training step: plain functions in a file, named by ``algorithm.calls``.

A function is named like the value it makes, its parameters like those it takes:

    def advantages(rows, advantages):
        return [np.clip(one, -3.0, 3.0) for one in advantages]

What it takes and makes is read from the source, so that a run is checked before anything is imported.
"""

import ast
from pathlib import Path

from areal_async.algorithms.dataflow import CallKind, FunctionCall
from areal_async.errors import UserError


def read_call(spec: str) -> FunctionCall:
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
    return FunctionCall(name=f"{path.stem}_{name}", kind=CallKind.COMPUTE, inputs=taken, outputs=(name,))
