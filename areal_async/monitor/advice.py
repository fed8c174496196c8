"""Why a run may not have learned: a few sentences at its end, chosen by what its files say. Pure.

Silent where rewards differ within groups and the held-out rewards have moved: how much is learned is not judged here.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from areal_async.config.settings import Settings, TaskSettings
from areal_async.monitor.view import number
from areal_async.process.json_lines import Line
from areal_async.process.stdio import program
from areal_async.protocol.types import mean

MUCH: Final = 0.3
"""Share of answers or calls from which on it may be what keeps the reward down."""
LITTLE_ENTROPY: Final = 0.05
"""Entropy, in nats a token, under which siblings say the same."""
MIN_STEPS: Final = 10
"""Steps before which held-out rewards may well stand still."""


def advice(steps: Sequence[Line], evaluations: Mapping[str, Sequence[Line]], settings: Settings) -> list[str]:
    """Return what keeps the run from learning, and what to do about it; none where nothing does.

    Args:
        steps: of ``metrics.jsonl``.
        evaluations: of each workflow, by step; under an empty name where there is one workflow.
    """
    if not steps or not settings.tasks:
        return []
    of_held_out = (text for workflow, part in evaluations.items() for text in _of_held_out(workflow, part, steps))
    return [*_of_rewards(steps, settings), *of_held_out]


def _of_rewards(steps: Sequence[Line], settings: Settings) -> Iterator[str]:
    first = settings.tasks[0]
    rewards = {number(line, "reward_mean") for line in steps}
    is_constant = len(rewards) == 1 and all(number(line, "reward_std") == 0 for line in steps)
    if is_constant and rewards == {0.0}:
        yield f"nothing was learned: the reward was 0 in {_every(steps)}"
        yield from (f"  {cause}" for cause in _causes_of_zero(steps, first, settings))
    elif is_constant:
        yield f"nothing was learned: every answer had the same reward, {rewards.pop():g}, in {_every(steps)}"
        yield (
            "  either all rows are solved already, and harder ones are needed, or the reward does not tell answers "
            f"apart: {_try(first)}"
        )
    elif all(0 < number(line, "num_groups") <= number(line, "groups_all_equal") for line in steps):
        yield f"nothing was learned: the answers to one row always had equal rewards, in {_every(steps)}"
        yield from (f"  {cause}" for cause in _causes_of_equality(steps, first, settings))
    else:
        for task in settings.tasks:
            own = [number(line, f"reward/{task.name}") for line in steps if f"reward/{task.name}" in line]
            if own and not any(own):
                yield f"nothing was learned of {task.name}: its reward was 0 in {_every(steps)}"
                yield f"  {_try(task)}"


def _causes_of_zero(steps: Sequence[Line], task: TaskSettings, settings: Settings) -> Iterator[str]:
    truncated = mean([number(line, "truncated_share") for line in steps])
    calls, errors = (_total(steps, f"rollout/num_tool_{what}") for what in ("calls", "errors"))
    failed, trained = _total(steps, "failed"), _total(steps, "num_trajectories")
    if truncated >= MUCH:
        limit = settings.rollout_of(task.name).sampling.max_new_tokens
        yield f"{truncated:.0%} of the answers were cut off: raise rollout.sampling.max_new_tokens, now {limit}"
    if any("rollout/num_tool_calls" in line for line in steps) and not calls:
        yield "no tool was ever called: the model may not know the template's form of a call"
    elif calls and errors / calls >= MUCH:
        yield f"{errors / calls:.0%} of the tool calls ended in an error: read what the model was told"
    if failed >= MUCH * (failed + trained):
        yield f"{failed:.0f} attempts failed beside {trained:.0f} that were trained: logs/ says why"
    yield f"the reward may refuse right answers: {_try(task)}"
    yield (
        "the task may be too hard for the model as it is: take one that is right now and then, by fine-tuning on "
        "demonstrations first (sft), or easier rows"
    )


def _causes_of_equality(steps: Sequence[Line], task: TaskSettings, settings: Settings) -> Iterator[str]:
    rollout = settings.rollout_of(task.name)
    entropy, heat = mean([number(line, "entropy_mean") for line in steps]), rollout.sampling.temperature
    if entropy < LITTLE_ENTROPY:
        cure = f"raise rollout.sampling.temperature, now {heat:g}"
        yield f"the model hardly varies its answers (entropy {entropy:.3f}): {cure}"
    cure = f"take others, or a larger rollout.group_size, now {rollout.group_size}"
    yield f"the rows may be always or never solved: {cure}"
    yield f"the reward may depend on the row alone: {_try(task)}"


def _of_held_out(workflow: str, evaluations: Sequence[Line], steps: Sequence[Line]) -> Iterator[str]:
    accuracies = {number(line, "accuracy") for line in evaluations}
    if len(steps) < MIN_STEPS or len(evaluations) < 2 or len(accuracies) > 1 or accuracies == {1.0}:
        return
    of_task = f" of {workflow}" if workflow else ""
    yield f"the held-out reward{of_task} never moved: {accuracies.pop():.3f} in all {len(evaluations)} evaluations"
    yield (
        "  the likeliest answers are still the ones from before: more run.steps or a larger trainer.lr; where the "
        "training reward rose, the held-out rows may ask for something else"
    )


def _every(steps: Sequence[Line]) -> str:
    return "the only step" if len(steps) == 1 else f"all {len(steps)} steps"


def _try(task: TaskSettings) -> str:
    return f"look at answers and their rewards with `{program()} try {task.workflow} --n 8`"


def _total(steps: Sequence[Line], key: str) -> float:
    return sum(number(line, key) for line in steps)
