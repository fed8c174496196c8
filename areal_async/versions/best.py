"""Which checkpoint of a run is the best, by what its directory says of rewards and evaluations."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from areal_async.config.settings import Settings
from areal_async.process.atomic_folders import versions_in
from areal_async.process.json_lines import json_lines
from areal_async.protocol.types import Version, mean

INTERVAL = "checkpoint_every_steps"
"""Field in a line of ``metrics.jsonl``: how often a checkpoint was made when that step was cut."""


def find_best(run_directory: Path, settings: Settings) -> Version | None:
    """Return the best of the checkpoints that are there, by ``trainer.keep_best``; None where none can be judged."""
    keep_best = settings.trainer.keep_best
    if keep_best is None:
        return None
    there = versions_in(run_directory / "checkpoints")
    made = {
        int(line["step"]): (line["weights_version"], float(line["reward_mean"]), line.get(INTERVAL))
        for line in json_lines(run_directory / "metrics.jsonl")
        if {"step", "weights_version", "reward_mean"} <= line.keys()
    }

    def is_ours(version: Version) -> bool:
        return version.step in made and made[version.step][0] == str(version)

    def every_steps(step: int) -> int:
        """Return the interval that was in force then; a line of before does not say it."""
        interval = made[step][2] if step in made else None
        return settings.trainer.checkpoint_every_steps if interval is None else int(interval)

    ours = [version for version in there if is_ours(version)]
    if keep_best == "reward":
        values = by_reward(ours, {step: reward for step, (_, reward, _) in made.items()}, every_steps=every_steps)
    else:
        evaluated = accuracies_of(run_directory).items()
        accuracies = {version.step: value for version, value in evaluated if is_ours(version)}
        values = by_accuracy(ours, accuracies, every_steps=every_steps)
    return max(values, key=lambda version: (values[version], version), default=None)


def by_reward(
    checkpoints: Iterable[Version], rewards: Mapping[int, float], *, every_steps: Callable[[int], int]
) -> dict[Version, float]:
    """Return the mean reward of the interval up to each checkpoint, of those of its steps that are known.

    Args:
        every_steps: step -> how often a checkpoint was made then.
    """
    values = {}
    for version in checkpoints:
        first = version.step - every_steps(version.step) + 1
        known = [rewards[step] for step in range(first, version.step + 1) if step in rewards]
        if known:
            values[version] = mean(known)
    return values


def by_accuracy(
    checkpoints: Collection[Version], accuracies: Mapping[int, float], *, every_steps: Callable[[int], int]
) -> dict[Version, float]:
    """Return the accuracy of each checkpoint's weights, or of the first evaluated that followed them.

    An evaluation takes what servers hold when it begins, which may be a step or two on. It speaks of one checkpoint,
    the newest before it, and of none that is an interval older.

    Args:
        every_steps: step -> how often a checkpoint was made then.
    """
    values: dict[Version, float] = {}
    for step in sorted(accuracies):
        before = [version for version in checkpoints if step - every_steps(step) < version.step <= step]
        if before:
            values.setdefault(max(before, key=lambda version: version.step), accuracies[step])
    return values


def accuracies_of(run_directory: Path) -> dict[Version, float]:
    """Return the mean over the tasks' accuracies of every version that was evaluated."""
    by_version: dict[Version, dict[str, float]] = defaultdict(dict)
    for line in json_lines(run_directory / "eval.jsonl"):
        if "eval_id" in line and line.get("accuracy") is not None:  # none where no row had a reward
            by_version[Version.parse(line["eval_id"])][line.get("workflow", "")] = float(line["accuracy"])
    return {version: mean(list(own.values())) for version, own in by_version.items()}
