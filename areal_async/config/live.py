"""Settings that may change while the run goes on, and why the others may not. Pure.

A change is a value under a setting's dotted name, beside what the settings said when it was made. Invariant: it holds
as long as they still say that. A resume with another value decides anew.

What a step is computed with (the rate, the bound on the age, ``STEP_NUMBERS``) is written into the step's cut when the
batch is cut, so that a step which is trained again after a crash is trained with the same, and all ranks agree.
"""

import difflib
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from areal_async.config.effects import missing
from areal_async.config.kept import matches, why_kept
from areal_async.config.settings import Settings
from areal_async.config.tree import has_place, value_at
from areal_async.errors import UserError
from areal_async.protocol.fields import MAX_EXACT
from areal_async.protocol.run_state import Changes

TASK = re.compile(r"\Atasks\.[0-9]+\.")
SAMPLED = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "max_new_tokens",
)  # fmt: skip
"""Numbers of ``sampling`` that may change. What the loss is divided by stays as ``max_new_tokens`` was given."""
LIVE = {
    "trainer.lr": "the learning rate of the policy, and of a critic without its own, from the next cut on",
    "trainer.critic.lr": "the learning rate of the critic, from the next cut on",
    "trainer.checkpoint_every_steps": "how often a checkpoint is made, from the next cut on",
    "algorithm.kl_coef": "the weight of the distance to the reference, from the next cut on",
    "algorithm.entropy_coef": "the weight of the entropy bonus, from the next cut on",
    "algorithm.eps_clip": "the clip range, from the next cut on",
    "algorithm.eps_clip_higher": "the upper clip range, from the next cut on",
    "rollout.max_staleness": "the bound on the age, at admission and from the next cut on",
    "tasks.*.ratio": "the mix of the tasks, in the prompts that are admitted from then on; 0 switches one off",
    "rollout.max_trajectories_per_node": "how many run at once on each node",
    **{f"rollout.sampling.{one}": "of groups that begin from then on; every token keeps its own" for one in SAMPLED},
    **{f"tasks.*.sampling.{one}": "the same of the groups of one task" for one in SAMPLED},
    "eval.every_steps": "how often a version is evaluated",
    "gate.at_least": "what a version must do better by, from the next evaluation on",
    "gate.alpha": "how sure that must be, from the next comparison on",
    "health.equal_rewards_steps": "when an alarm is raised, from the next step on",
    "health.logprob_gap": "when an alarm is raised, from the next step on",
    "health.untrained_batches": "when an alarm is raised, from the next group that ends on",
}
"""Setting, a star for any item of a list -> what its change does."""
STEP_NUMBERS = tuple(key for key in LIVE if key.startswith(("trainer.", "algorithm.")) and key != "trainer.lr")
"""Settings whose values a cut holds for its step, besides its rate and its bound."""
AT_MOST_GIVEN = {
    "rollout.max_staleness": "streams and pools were made for that at the start",
    "rollout.max_trajectories_per_node": "streams and pools were made for that at the start",
    "rollout.sampling.max_new_tokens": "memory and token budget were made for that at the start",
    "tasks.*.sampling.max_new_tokens": "memory and token budget were made for that at the start",
}
"""Setting that can only be lowered -> why."""
REASONS = {
    "model": "the servers and the optimizer hold that model",
    "algorithm": "the graph of a step is built from it at the start",
    "rollout.sampling": "only its numbers can",
    "rollout": "tickets that are out, streams and consumers were made for it",
    "trainer": "every rank has read it at the start, and all must agree at every step",
    "inference": "the servers were started with it",
    "endpoint": "nodes and their agents have read it at the start",
    "serve": "the process that serves has read it at its start",
    "bus": "everybody is connected by it",
}
"""Prefix of settings that cannot change while the run goes on -> why; the longest one counts."""


def settings_now(settings: Settings, changes: Changes) -> Settings:
    """Return the settings with the changes that hold."""
    return _with_held(settings, changes)[0]


def held_changes(settings: Settings, changes: Changes) -> list[tuple[str, float]]:
    """Return the changes that hold under these settings: name and value, in the order in which they were made.

    One that was made under other settings, and which these ones forbid, does not. One that another makes possible
    comes after that, though it be older: of each setting only the newest change is known.
    """
    return _with_held(settings, changes)[1]


def _with_held(settings: Settings, changes: Changes) -> tuple[Settings, list[tuple[str, float]]]:
    now = settings
    held: list[tuple[str, float]] = []
    left = [
        (key, change.value)
        for key, change in sorted(changes.by_setting.items(), key=lambda item: item[1].at)
        if _is_live(key)
        and has_place(settings, key.split("."))
        and not tie(settings, key)
        and change.given == value_of(settings, key)
    ]
    while left:
        forbidden = []
        for key, value in left:
            try:
                now = _changed(now, key, value)
            except ValidationError:
                forbidden.append((key, value))
            else:
                held.append((key, value))
        if len(forbidden) == len(left):
            break
        left = forbidden
    return now, held


def live_names(settings: Settings) -> list[str]:
    """Return every name under which something of this run can be changed."""
    tasks = [str(number) for number in range(len(settings.tasks))]
    tasks += [task.name for task in settings.tasks if not task.name.isdecimal()]
    names = [name for one in LIVE for name in ([one.replace("*", task) for task in tasks] if "*" in one else [one])]
    keys = {name: full_name(settings, name) for name in names}
    return [name for name, key in keys.items() if not _idle(settings, key) and not tie(settings, key)]


def full_name(settings: Settings, key: str) -> str:
    """Return a setting's name with the number of a task in it, where it names the task: ``tasks.gsm8k.ratio``."""
    parts, names = key.split("."), [task.name for task in settings.tasks]
    if parts[0] == "tasks" and len(parts) > 1 and parts[1] in names and not parts[1].isdecimal():
        parts[1] = str(names.index(parts[1]))
    return ".".join(parts)


def step_numbers(settings: Settings) -> dict[str, float | None]:
    """Return what a cut says that its step is trained with."""
    return {key: value_of(settings, key) for key in STEP_NUMBERS}


def settings_of_step(settings: Settings, *, lr: float, numbers: Mapping[str, float | None]) -> Settings:
    """Return the settings that a step is trained with.

    What they forbid is left out, as is what asks for models that they do not: they may be others than it was cut under.

    Args:
        lr: as in ``Cut``.
        numbers: likewise.
    """
    now = settings
    for key, value in {**numbers, **({"trainer.lr": lr} if lr else {})}.items():
        if not _is_live(key) or value_of(now, key) == value:
            continue
        try:
            changed = _changed(now, key, value)
        except ValidationError:
            continue
        now = changed if _has_same_models(changed, now) else now
    return now


def value_of(settings: Settings, key: str) -> float | None:
    """Return what the settings themselves say of a live setting; None where that is what another one says."""
    value: float | None = value_at(settings, key.split("."))
    return value


def check_change(settings: Settings, changes: Changes, key: str, value: Any) -> float:
    """Return the value of a change that is safe, after those that were made before.

    Raises:
        UserError: it is none, with the reason.
    """
    if not has_place(settings, key.split(".")) or not _is_live(key):
        raise UserError(f"{key}: {_why_not(settings, key)}")
    if why := _idle(settings, key):
        raise UserError(f"{key}: {why}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(f"{key}: got {value!r:.100}, need a number")
    if not abs(value) <= MAX_EXACT:  # as nan is not
        raise UserError(f"{key}: got a number out of range, need a finite one of at most {MAX_EXACT} either way")
    try:
        changed = _changed(settings_now(settings, changes), key, value)
    except ValidationError as exc:
        reason = exc.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"{key}: got {value!r}: {reason}") from exc
    if ".sampling." in key:
        try:
            changed.check_trained_sampling()
        except ValueError as exc:
            raise UserError(str(exc)) from exc
    if why := tie(settings, key):
        raise UserError(f"{key}: got {value}, need what the run was started with: {why}")
    checked, given = value_of(changed, key), value_of(settings, key)
    why = next((why for one, why in AT_MOST_GIVEN.items() if matches(key, one)), "")
    if why and value > (most := _value_in_use(settings, key)):
        raise UserError(f"{key}: got {value}, need at most {most}: {why}")
    if key == "rollout.max_staleness" and (value == 0) != (given == 0):
        raise UserError(f"{key}: got {value}, is {given}: between on-policy and not the run must be started anew")
    if not _has_same_models(changed, settings):
        raise UserError(
            f"{key}: got {value}, is {given}: with a reference model and without the run must be started anew"
        )
    assert checked is not None  # a number was put there
    return checked


def _value_in_use(settings: Settings, key: str) -> float:
    """Return what the sampling of a task is: the run's, where it says nothing; or another live setting."""
    own = value_of(settings, key)
    if own is None:
        own = value_of(settings, TASK.sub("rollout.", key))
    assert own is not None  # what has a bound is never left open by the run
    return own


def _idle(settings: Settings, key: str) -> str:
    """Return why nothing in this run goes by a live setting; empty where something does."""
    algorithm = settings.algorithm
    if why := missing(settings, key):
        return f"got {why}; leave it as it is"
    match key:
        case "algorithm.kl_coef" if "reference" not in algorithm.needs_models:
            return (
                f"is {algorithm.kl_coef}: with a reference model and without the run must be started anew; stop it, "
                "and start it with --algorithm.kl_coef"
            )
        case "trainer.critic.lr" if "critic" not in algorithm.needs_models:
            return f"got algorithm.name={algorithm.name}, which has no critic, need one that has, as ppo"
        case "eval.every_steps" if not settings.held_out:
            return "this run has no held-out rows to evaluate; stop it, set eval.dataset, and start it again"
    if key.startswith("gate.") and settings.gate.action is None:
        return "this run has no gate; stop it, set gate.action, and start it again"
    if key.endswith(".ratio") and len(settings.tasks) == 1:
        return "the run has one task, so there is nothing to mix"
    return ""


def tie(settings: Settings, key: str) -> str:
    """Return which other setting keeps a live one as it is; empty where none does."""
    algorithm = settings.algorithm
    is_tied = algorithm.overlong_cache != 0 and algorithm.overlong_max is None
    if key.endswith(".sampling.max_new_tokens") and is_tied:
        return f"algorithm.name={algorithm.name} takes off from answers near the longest; set algorithm.overlong_max"
    return ""


def _has_same_models(settings: Settings, other: Settings) -> bool:
    return settings.algorithm.needs_models == other.algorithm.needs_models


def _changed(settings: Settings, key: str, value: float | None) -> Settings:
    """Return the settings with another value under a dotted name, checked as a whole.

    Raises:
        pydantic.ValidationError: they do not go together.
    """
    whole = settings.model_dump()
    *path, last = key.split(".")
    section: Any = whole
    for part in path:
        section = section[int(part) if part.isdecimal() else part]
    section[last] = value
    return Settings.model_validate(whole)


def _is_live(key: str) -> bool:
    return any(matches(key, one) and key.count(".") == one.count(".") for one in LIVE)


def _why_not(settings: Settings, key: str) -> str:
    if not has_place(settings, key.split(".")):
        names = live_names(settings)
        near = difflib.get_close_matches(key, names, n=1)
        return f"no such setting; {f'did you mean {near[0]}' if near else 'need one of ' + ', '.join(names)}"
    if why := why_kept(key):
        return f"cannot change in this run: {why}; start another one"
    prefix = max((one for one in REASONS if f"{key}.".startswith(f"{one}.")), key=len, default="")
    reason = REASONS.get(prefix, "it is read at the start")
    return f"cannot change while the run goes on: {reason}; stop the run, and start it with --{key}"
