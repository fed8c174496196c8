"""Find the coroutine that a task's ``FILE.py[:name]`` means."""

import inspect
from pathlib import Path
from typing import cast

from areal_async.contracts import Workflow
from areal_async.errors import UserError
from areal_async.rollout.files import load_file


def load_workflow(spec: str, *, root: Path | None = None) -> Workflow:
    """Return the workflow that ``spec`` names: ``FILE.py:name``, or ``FILE.py`` for the one named like the file.

    Args:
        root: put on the import path; ``None`` takes the working directory. ``spec`` is relative to it.

    Raises:
        UserError: no such file, it does not import, or what it holds under that name is no workflow.
    """
    file, _, name = spec.partition(":")
    path = (root or Path.cwd()) / file
    name = name or path.stem
    module = load_file(path, error=UserError, what=f"workflow {spec}", root=root)
    function = getattr(module, name, None)
    if function is None:
        found = ", ".join(_coroutine_names(vars(module), module.__name__)) or "none"
        raise UserError(f"workflow {spec}: {file} has no {name!r}, its coroutines are: {found}; write {file}:NAME")
    if not inspect.iscoroutinefunction(function):
        raise UserError(
            f"workflow {spec}: got {name!r} which is not async, need `async def {name}(prompt, policy) -> float`"
        )
    try:
        inspect.signature(function).bind(object(), object())
    except TypeError as exc:
        raise UserError(f"workflow {spec}: cannot be called as {name}(prompt, policy): {exc}") from exc
    return cast(Workflow, function)


def _coroutine_names(namespace: dict[str, object], module: str) -> list[str]:
    return [
        name
        for name, value in namespace.items()
        if inspect.iscoroutinefunction(value) and getattr(value, "__module__", None) == module
    ]
