"""What one training step needs, and what it leaves behind: the arithmetic between a cut and a metrics line.

Pure. Ranks exchange a ``Report`` before the first collective, so that all of them train the same set.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from areal_async.algorithms.advantages import AdvantageRule, Sibling
from areal_async.algorithms.credit import has_differing_replies, reply_advantages, sibling_of
from areal_async.protocol.fields import OWN_INFO
from areal_async.protocol.types import Metrics, Version
from areal_async.trainer.batch.payloads import AgeStats, BatchSlot, SlotKey
from areal_async.trainer.engine.stats import StepStats

DIGITS = {"loss": 9, "value_loss": 9}
"""Significant ones of what ``replay`` compares to 1e-6."""


class ShareStats(msgspec.Struct):
    """What a rank says of the trajectories it has trained in a step; nothing where another one speaks for it."""

    ages: AgeStats = msgspec.field(default_factory=AgeStats)
    info: dict[str, tuple[float, int]] = {}
    """Metric of the workflows -> sum, and number of the trajectories that have it."""


def add_up_info(infos: Iterable[Mapping[str, float]]) -> dict[str, tuple[float, int]]:
    """Return each metric's sum and how many have it: sums of shares add up to those of the batch."""
    sums: dict[str, tuple[float, int]] = {}
    for info in infos:
        for key, value in info.items():
            total, count = sums.get(key, (0.0, 0))
            sums[key] = total + value, count + 1
    return sums


class Report(msgspec.Struct):
    """What a rank says before a step."""

    missing: list[tuple[SlotKey, str]] = []
    """Slots whose payload it could not get or verify, each with why."""
    stop: bool = False
    """Rank 0's wish to end before this step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgreedBatch:
    """The slots that every rank trains, and what fell out."""

    slots: list[BatchSlot]
    advantages: dict[int, NDArray[np.float32]]
    """By position: of each credited reply of the slot, or the one of a slot without credits."""
    unusable: list[str]
    """Groups left with fewer than ``min_group_size`` slots."""

    @property
    def rewards(self) -> list[float]:
        return [placed.item.slot.reward for placed in self.slots]

    @property
    def num_groups(self) -> int:
        return len({placed.group_id for placed in self.slots})


def part_usable(
    slots: Sequence[BatchSlot],
    missing: Iterable[SlotKey],
    *,
    min_group_size: int,
    min_group_sizes: Mapping[str, int] | None = None,
) -> tuple[list[list[BatchSlot]], list[str]]:
    """Return the groups that train with the slots that are there, and the names of those left with too few.

    Args:
        min_group_sizes: workflow -> its own, where it is another.
    """
    gone = set(missing)
    groups: dict[str, list[BatchSlot]] = defaultdict(list)
    for placed in slots:
        siblings = groups[placed.group_id]
        if placed.key not in gone:
            siblings.append(placed)
    least = {placed.group_id: (min_group_sizes or {}).get(placed.workflow, min_group_size) for placed in slots}
    unusable = [group_id for group_id, siblings in groups.items() if len(siblings) < least[group_id]]
    return [siblings for group_id, siblings in groups.items() if len(siblings) >= least[group_id]], unusable


def agree_on_batch(
    slots: Sequence[BatchSlot],
    missing: Iterable[SlotKey],
    *,
    min_group_size: int,
    rule: AdvantageRule,
    min_group_sizes: Mapping[str, int] | None = None,
) -> AgreedBatch:
    """Leave out what some rank could not verify, and compute the slots' advantages, within their real groups.

    Headers alone decide them, so every rank comes to the same ones.
    """
    used, unusable = part_usable(slots, missing, min_group_size=min_group_size, min_group_sizes=min_group_sizes)
    outcomes = [[sibling_of(one.item.slot) for one in siblings] for siblings in used]
    advantages: dict[int, NDArray[np.float32]] = {}
    for siblings, values in zip(used, reply_advantages(outcomes, rule), strict=True):
        advantages.update({placed.position: value for placed, value in zip(siblings, values, strict=True)})
    return AgreedBatch(
        slots=[placed for siblings in used for placed in siblings], advantages=advantages, unusable=unusable
    )


def batch_metrics(
    batch: AgreedBatch,
    shares: Sequence[ShareStats],
    *,
    workflows: Sequence[str] = (),
    age: Callable[[Version], int] = lambda version: 0,
) -> dict[str, float | int | str]:
    """Return the part of a metrics line that the batch alone decides.

    Args:
        shares: one per rank.
        workflows: of the run; where they are several, each has numbers of its own.
        age: in the step.
    """
    ages = [share.ages for share in shares]
    rewards = np.array(batch.rewards, dtype=np.float64)
    num_tokens = sum(one.num_tokens for one in ages)
    slots = [placed.item.slot for placed in batch.slots]
    return {
        "reward_mean": float(rewards.mean()) if rewards.size else 0.0,
        "reward_std": float(rewards.std()) if rewards.size else 0.0,
        "num_groups": batch.num_groups,
        "num_trajectories": len(slots),
        "num_tokens": num_tokens,
        "staleness_mean": sum(one.total for one in ages) / num_tokens if num_tokens else 0.0,
        "staleness_max": max((one.max for one in ages), default=0),
        "stale_tokens_masked": sum(one.num_masked for one in ages),
        "uncredited_tokens": sum(one.num_uncredited for one in ages),
        "steered_tokens": sum(one.num_steered for one in ages),
        "temperature_mean": sum(one.temperatures for one in ages) / num_tokens if num_tokens else 0.0,
        "output_tokens_mean": float(np.mean([slot.num_output_tokens for slot in slots])) if slots else 0.0,
        "truncated_share": float(np.mean([slot.num_truncated > 0 for slot in slots])) if slots else 0.0,
        "groups_all_equal": _num_all_equal(batch),
        **_staleness_histogram(ages),
        **_age_means(batch, age),
        **_task_means(batch, workflows if len(workflows) > 1 else ()),
        **_info_means([share.info for share in shares]),
    }


def _staleness_histogram(ages: Iterable[AgeStats]) -> dict[str, int]:
    """Return ``staleness_tokens/<age>``: how many trained tokens have it, from 0 to the oldest."""
    counts = Counter[int]()
    for one in ages:
        counts.update(one.by_age)
    return {f"staleness_tokens/{age}": counts[age] for age in range(max(counts, default=-1) + 1)}


def _age_means(batch: AgreedBatch, age: Callable[[Version], int]) -> dict[str, float]:
    """Return ``reward_at_age/<age>`` of the trajectories whose oldest version has that age: n - 1 - age in step n."""
    rewards: dict[int, list[float]] = defaultdict(list)
    for placed in batch.slots:
        slot = placed.item.slot
        if slot.oldest:
            rewards[age(Version.parse(slot.oldest))].append(slot.reward)
    return {f"reward_at_age/{number}": float(np.mean(rewards[number])) for number in sorted(rewards)}


def _task_means(batch: AgreedBatch, workflows: Iterable[str]) -> dict[str, float | int | str]:
    """Return ``groups/<workflow>``, and ``reward/<workflow>`` of those that are in the batch."""
    means: dict[str, float | int | str] = {}
    for workflow in workflows:
        own = [placed for placed in batch.slots if placed.workflow == workflow]
        means[f"groups/{workflow}"] = len({placed.group_id for placed in own})
        if own:
            means[f"reward/{workflow}"] = float(np.mean([placed.item.slot.reward for placed in own]))
    return means


def _info_means(infos: Sequence[Mapping[str, tuple[float, int]]]) -> dict[str, float]:
    """Return ``info/<key>`` for every key of the workflows', averaged over the trajectories that have it.

    What trajectories bring along by themselves keeps its name.
    """
    names = sorted({key for info in infos for key in info})
    found = {name: [info[name] for info in infos if name in info] for name in names}
    return {
        name if name.startswith(OWN_INFO) else f"info/{name}": sum(total for total, _ in parts)
        / sum(count for _, count in parts)
        for name, parts in found.items()
    }


def _num_all_equal(batch: AgreedBatch) -> int:
    groups: dict[str, list[Sibling]] = defaultdict(list)
    for placed in batch.slots:
        groups[placed.group_id].append(sibling_of(placed.item.slot))
    return sum(not has_differing_replies(siblings) for siblings in groups.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """A trained step."""

    version: Version
    """That it made."""
    batch: dict[str, float | int | str]
    stats: StepStats
    started: float
    """Monotonic seconds when the wait for its data began."""
    wait_s: float
    train_s: float


def metrics_line(
    result: StepResult, *, weights_s: float, checkpoint_s: float, dropped_stale: int, failed: int
) -> dict[str, float | int | str]:
    """Return the step's line of ``metrics.jsonl``.

    Args:
        checkpoint_s: for which a checkpoint has held up the steps since the line before.
    """
    stats = {name: value for name, value in asdict(result.stats).items() if name != "num_tokens"}
    return plain(
        {
            "step": result.version.step,
            "weights_version": str(result.version),
            **result.batch,
            **stats,
            "dropped_stale": dropped_stale,
            "failed": failed,
            "time_step_s": time.monotonic() - result.started,
            "time_wait_data_s": result.wait_s,
            "time_train_s": result.train_s,
            "time_weights_s": weights_s,
            "time_checkpoint_s": checkpoint_s,
        }
    )


def plain(metrics: Metrics) -> dict[str, float | int | str]:
    """Round what people read; six significant digits say all that a step can mean, but a replay is held to more."""
    return {
        name: float(f"{value:.{DIGITS.get(name, 6)}g}") if isinstance(value, float) else value
        for name, value in metrics.items()
    }
