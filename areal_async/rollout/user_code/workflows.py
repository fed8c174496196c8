"""Find the coroutine that a task's ``FILE.py[:name]`` or environment means."""

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, cast

from areal_async.api import Workflow
from areal_async.environments.environment import workflow_of
from areal_async.environments.names import environment_name
from areal_async.errors import UserError
from areal_async.rollout.user_code.per_node import made_for
from areal_async.user_files import import_named

NUM_GIVEN = 2
"""Parameters before those of further policies: the prompt and ``policy``."""
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def load_workflow(
    spec: str, *, root: Path | None = None, policies: Collection[str] = (), env: Mapping[str, Any] | None = None
) -> Workflow:
    """Return the workflow that ``spec`` names: ``FILE.py:name``, ``FILE.py`` for the one named like the file, or the
    one that plays an environment.

    Args:
        root: put on the import path; ``None`` takes the working directory. ``spec`` is relative to it.
        policies: names of those that it may take beside ``policy``; it is not given them yet (``named_policies``).
        env: options of the environment.

    Raises:
        UserError: no such file, it does not import, what it holds under that name is no workflow, or it takes another
            policy; what an environment needs is not installed, or has no such option.
    """
    if environment_name(spec) is not None:
        return workflow_of(spec, env or {})
    module, name = import_named(spec, what=f"workflow {spec}", root=root)
    function = getattr(module, name, None)
    if function is None:
        found = ", ".join(_coroutine_names(vars(module), module.__name__)) or "none"
        file = spec.partition(":")[0]
        raise UserError(f"workflow {spec}: {file} has no {name!r}, its coroutines are: {found}; write {file}:NAME")
    if not inspect.iscoroutinefunction(function):
        raise UserError(
            f"workflow {spec}: got {name!r} which is not async, need `async def {name}(prompt, policy) -> float`"
        )
    try:
        signature = inspect.signature(function)
        made = [one for one in made_for(function) if one in signature.parameters]
        signature.bind(object(), object(), **dict.fromkeys([*policies_taken(function, policies), *made]))
    except TypeError as exc:
        raise UserError(f"workflow {spec}: cannot be called as {name}(prompt, policy): {exc}") from exc
    return cast(Workflow, function)


def policies_taken(function: Callable[..., Any], policies: Collection[str]) -> tuple[str, ...]:
    """Return which of ``policies`` a workflow takes, by the names of its parameters after the first two.

    Others are what its file has made once per node (``per_node``).

    Raises:
        UserError: it needs one that is not there, or that could be either.
    """
    made, name = made_for(function), getattr(function, "__name__", "workflow")
    parameters = list(inspect.signature(function).parameters.values())[NUM_GIVEN:]
    by_name = [one for one in parameters if one.kind in _BY_NAME]
    if twice := [one.name for one in by_name if one.name in policies and one.name in made]:
        raise UserError(
            f"workflow {name}: policies.{twice[0]} is made once per node too; give one of both another name"
        )
    needed = [one.name for one in by_name if one.default is inspect.Parameter.empty and one.name not in made]
    check_needed(needed, policies, name=name)
    return tuple(one.name for one in by_name if one.name in policies)


def check_needed(needed: Collection[str], policies: Collection[str], *, name: str) -> None:
    """Refuse a workflow that needs a policy which the settings do not have.

    Raises:
        UserError: it is so.
    """
    missing = [one for one in needed if one not in policies]
    if missing:
        raise UserError(
            f"workflow {name}: takes the policy {missing[0]!r}, the settings have {sorted(policies) or 'none'}; "
            f"add policies.{missing[0]}, with the path of a frozen model or, for a role of the trained one, without"
        )


def check_all_taken(policies: Collection[str], taken: Collection[str]) -> None:
    """Refuse a policy that no workflow takes: its servers would be idle, or its name is misspelt.

    Raises:
        UserError: there is one.
    """
    idle = [one for one in policies if one not in taken]
    if idle:
        raise UserError(
            f"policies.{idle[0]}: no workflow of this run takes it; give one a parameter {idle[0]!r} after policy, "
            "or remove it"
        )


def _coroutine_names(namespace: dict[str, object], module: str) -> list[str]:
    return [
        name
        for name, value in namespace.items()
        if inspect.iscoroutinefunction(value) and getattr(value, "__module__", None) == module
    ]
