"""Settings that may change while the run goes on, and why the others may not. Pure.

A change is a value under a setting's dotted name, beside what the settings said when it was made. Invariant: it holds
as long as they still say that. Whoever resumes the run with another value in its file has decided anew.

What a step is computed with (the rate, the bound on the age) is written into the step's cut when the batch is cut, so
that a step which is trained again after a crash is trained with the same.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from areal_async.errors import UserError
from areal_async.run_state import Changes
from areal_async.settings import DATA_DEFINING, Settings

LIVE = {
    "trainer.lr": "the learning rate of the policy, from the next cut on",
    "rollout.max_staleness": "the bound on the age, at admission and from the next cut on",
    "rollout.max_trajectories_per_node": "how many run at once on each node",
    "eval.every_steps": "how often a version is evaluated",
}
"""Setting -> what its change does."""
REASONS = {
    "model": "the servers and the optimizer hold that model",
    "algorithm": "the graph of a step is built from it at the start",
    "rollout.sampling": "the trainer computes its logprobs for the sampling that the run was started with",
    "rollout": "tickets that are out, streams and consumers were made for it",
    "trainer": "every rank has read it at the start, and all must agree at every step",
    "inference": "the servers were started with it",
    "bus": "everybody is connected by it",
}
"""The longest prefix of a setting -> why it is none of these."""


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """What holds now."""

    lr: float
    max_staleness: int
    max_trajectories_per_node: int
    eval_every_steps: int


def live_settings(settings: Settings, changes: Changes) -> LiveSettings:
    """Return the settings that may change, with the changes that hold."""
    now = {key: value_of(settings, key) for key in LIVE} | dict(held_changes(settings, changes))
    return LiveSettings(
        lr=float(now["trainer.lr"]),
        max_staleness=int(now["rollout.max_staleness"]),
        max_trajectories_per_node=int(now["rollout.max_trajectories_per_node"]),
        eval_every_steps=int(now["eval.every_steps"]),
    )


def held_changes(settings: Settings, changes: Changes) -> Iterator[tuple[str, float]]:
    """Yield the changes that hold under these settings: name and value."""
    for key, change in changes.by_setting.items():
        if key in LIVE and change.given == value_of(settings, key):
            yield key, change.value


def value_of(settings: Settings, key: str) -> float:
    """Return what the settings themselves say of a live setting."""
    section, name = key.split(".")
    value: float = getattr(getattr(settings, section), name)
    return value


def check_change(settings: Settings, key: str, value: Any) -> float:
    """Return the value of a change that is safe.

    Raises:
        UserError: it is none, with the reason.
    """
    if key not in LIVE:
        raise UserError(f"{key}: {_why_not(settings, key)}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{key}: got {value!r:.100}, need a number")
    section, name = key.split(".")
    whole: dict[str, Any] = getattr(settings, section).model_dump()
    try:
        checked = type(getattr(settings, section)).model_validate(whole | {name: value})
    except ValidationError as exc:
        raise UserError(f"{key}: got {value!r}: {exc.errors()[0]['msg']}") from exc
    given = value_of(settings, key)
    if key in ("rollout.max_staleness", "rollout.max_trajectories_per_node") and value > given:
        raise UserError(f"{key}: got {value}, need at most {given}: streams and pools were made for that at the start")
    if key == "rollout.max_staleness" and (value == 0) != (given == 0):
        raise UserError(f"{key}: got {value}, is {given}: between on-policy and not the run must be started anew")
    number: float = getattr(checked, name)
    return number


def _why_not(settings: Settings, key: str) -> str:
    known: Mapping[str, Any] = settings.model_dump()
    if not _is_known(known, key.split(".")):
        near = difflib.get_close_matches(key, LIVE, n=1)
        return f"no such setting; {f'did you mean {near[0]}' if near else 'need one of ' + ', '.join(LIVE)}"
    if any(_matches(key, one) for one in DATA_DEFINING):
        return "cannot change in this run: it says which data the run is made of; start another one"
    prefix = max((one for one in REASONS if f"{key}.".startswith(f"{one}.")), key=len, default="")
    reason = REASONS.get(prefix, "it is read at the start")
    return f"cannot change while the run goes on: {reason}; stop the run, and start it with --{key}"


def _is_known(values: Any, parts: list[str]) -> bool:
    for part in parts:
        if isinstance(values, list | tuple) and part.isdecimal() and int(part) < len(values):
            values = values[int(part)]
        elif isinstance(values, Mapping) and part in values:
            values = values[part]
        else:
            return False
    return True


def _matches(key: str, pattern: str) -> bool:
    parts, wanted = key.split("."), pattern.split(".")
    return len(parts) >= len(wanted) and all(b in ("*", a) for a, b in zip(parts, wanted, strict=False))
