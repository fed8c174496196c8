"""What one training step needs, and what it leaves behind: the batch that all ranks agree on, and its metrics line.

Pure. Ranks exchange a ``Report`` before the first collective, so that all of them train the same set.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from areal_async.algorithms.advantages import AdvantageRule, advantage_rule
from areal_async.algorithms.credit import has_differing_replies, sibling_of
from areal_async.config.settings import Settings
from areal_async.protocol.fields import CACHED_TOKENS, OWN_INFO, PROMPT_TOKENS
from areal_async.protocol.types import Cut, Metrics, Trajectory, Version
from areal_async.trainer.batch.advantages import outcome_advantages
from areal_async.trainer.batch.payloads import BatchSlot, SlotKey, by_group
from areal_async.trainer.engine.stats import StepStats
from areal_async.trainer.packing.rows import TrainRow

DIGITS = {"loss": 9, "value_loss": 9}
"""Significant digits of the metrics that ``replay`` compares to 1e-6."""


class AgeStats(msgspec.Struct):
    """Ages of the trained tokens of some rows, and the temperatures that they were sampled at."""

    num_tokens: int = 0
    total: int = 0
    max: int = 0
    num_masked: int = 0
    """Tokens left out of the loss because of their age."""
    num_uncredited: int = 0
    """Sampled tokens left out of the loss because their workflow credits other replies."""
    by_age: dict[int, int] = {}
    """Age -> trained tokens that have it."""
    temperatures: float = 0.0
    """Sum over the trained tokens."""
    num_steered: int = 0
    """Trained tokens whose logprob is not of the model's own distribution (``Sequence.steered``)."""


class ShardStats(msgspec.Struct):
    """What a rank reports of the trajectories it has trained in a step; nothing where another rank reports them."""

    ages: AgeStats = msgspec.field(default_factory=AgeStats)
    info: dict[str, tuple[float, int]] = {}
    """Metric of the workflows -> sum, and number of the trajectories that have it."""


def add_up_info(infos: Iterable[Mapping[str, float]]) -> dict[str, tuple[float, int]]:
    """Return each metric's sum and how many have it: sums of shards add up to those of the batch."""
    sums: dict[str, tuple[float, int]] = {}
    for info in infos:
        for key, value in info.items():
            total, count = sums.get(key, (0.0, 0))
            sums[key] = total + value, count + 1
    return sums


class Report(msgspec.Struct):
    """Message of a rank to the others before a step."""

    missing: list[tuple[SlotKey, str]] = []
    """Slots whose payload it could not get or verify, each with why."""
    stop: bool = False
    """Whether rank 0 wants to end before this step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgreedBatch:
    """The slots that every rank trains, and what fell out."""

    slots: list[BatchSlot]
    advantages: dict[int, NDArray[np.float32]]
    """Advantages [K] by position: one per credited reply of the slot, K = 1 without credits."""
    unusable: list[str]
    """Groups left with fewer than ``min_group_size`` slots."""

    @property
    def num_groups(self) -> int:
        return len({slot.group_id for slot in self.slots})


def agree_in_run(slots: Sequence[BatchSlot], missing: Iterable[SlotKey], settings: Settings) -> AgreedBatch:
    """Return what every rank of a run trains of a cut of which these slots are missing."""
    return agree_on_batch(
        slots, missing, advantage_rule(settings), min_size=lambda name: settings.rollout_of(name).min_group_size
    )


def agree_on_batch(
    slots: Sequence[BatchSlot],
    missing: Iterable[SlotKey],
    rule: AdvantageRule,
    *,
    min_size: Callable[[str], int] = lambda workflow: 1,
) -> AgreedBatch:
    """Leave out what some rank could not verify, and compute the slots' advantages, within their real groups.

    Headers alone decide them, so every rank comes to the same ones.

    Args:
        min_size: workflow -> siblings below which its groups are not trained.
    """
    gone, used, unusable = set(missing), list[list[BatchSlot]](), list[str]()
    for group_id, whole in by_group(slots).items():
        siblings = [slot for slot in whole if slot.key not in gone]
        if len(siblings) >= min_size(whole[0].workflow):
            used.append(siblings)
        else:
            unusable.append(group_id)
    slots = [slot for siblings in used for slot in siblings]
    return AgreedBatch(slots=slots, advantages=outcome_advantages(used, rule), unusable=unusable)


def batch_metrics(
    batch: AgreedBatch,
    shards: Sequence[ShardStats],
    *,
    workflows: Sequence[str] = (),
    age: Callable[[Version], int] = lambda version: 0,
) -> dict[str, float | int | str]:
    """Return the part of a metrics line that the batch alone decides.

    Args:
        shards: one per rank.
        workflows: of the run; where they are several, each has numbers of its own.
        age: in the step.
    """
    ages = [shard.ages for shard in shards]
    headers = [slot.header for slot in batch.slots]
    rewards = np.array([one.reward for one in headers], dtype=np.float64)
    num_tokens = sum(one.num_tokens for one in ages)
    return {
        "reward_mean": float(rewards.mean()) if rewards.size else 0.0,
        "reward_std": float(rewards.std()) if rewards.size else 0.0,
        "num_groups": batch.num_groups,
        "num_trajectories": len(headers),
        "num_tokens": num_tokens,
        "staleness_mean": sum(one.total for one in ages) / num_tokens if num_tokens else 0.0,
        "staleness_max": max((one.max for one in ages), default=0),
        "stale_tokens_masked": sum(one.num_masked for one in ages),
        "uncredited_tokens": sum(one.num_uncredited for one in ages),
        "steered_tokens": sum(one.num_steered for one in ages),
        "temperature_mean": sum(one.temperatures for one in ages) / num_tokens if num_tokens else 0.0,
        "output_tokens_mean": float(np.mean([one.num_output_tokens for one in headers])) if headers else 0.0,
        "truncated_share": float(np.mean([one.num_truncated > 0 for one in headers])) if headers else 0.0,
        "groups_all_equal": _num_all_equal(batch),
        **_staleness_histogram(ages),
        **_age_means(batch, age),
        **_task_means(batch, workflows if len(workflows) > 1 else ()),
        **_prompt_totals([shard.info for shard in shards]),
        **_info_means([shard.info for shard in shards]),
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
    for slot in batch.slots:
        if slot.header.oldest:
            rewards[age(Version.parse(slot.header.oldest))].append(slot.header.reward)
    return {f"reward_at_age/{number}": float(np.mean(rewards[number])) for number in sorted(rewards)}


def _task_means(batch: AgreedBatch, workflows: Iterable[str]) -> dict[str, float | int | str]:
    """Return ``groups/<workflow>``, and ``reward/<workflow>`` of those that are in the batch."""
    means: dict[str, float | int | str] = {}
    for workflow in workflows:
        own = [slot for slot in batch.slots if slot.workflow == workflow]
        means[f"groups/{workflow}"] = len({slot.group_id for slot in own})
        if own:
            means[f"reward/{workflow}"] = float(np.mean([slot.header.reward for slot in own]))
    return means


def _prompt_totals(infos: Sequence[Mapping[str, tuple[float, int]]]) -> dict[str, int]:
    """Return the tokens of the prompts behind a batch, and how many servers had in their caches; none if unknown."""
    return {
        name: int(sum(info[key][0] for info in infos if key in info))
        for name in (PROMPT_TOKENS, CACHED_TOKENS)
        if any((key := f"{OWN_INFO}{name}") in info for info in infos)
    }


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
    groups = by_group(batch.slots).values()
    return sum(not has_differing_replies([sibling_of(slot.header) for slot in group]) for group in groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """Results of the calls of a step."""

    stats: StepStats
    others: dict[str, float]
    """Numbers of the models beside the policy, for the step's line; none where there are none."""
    rows: list[TrainRow]
    """Rows of this rank, with the advantages that the policy was trained with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedShard:
    """This rank's part of a batch, trained."""

    cut: Cut
    slots: list[BatchSlot]
    trajectories: dict[int, Trajectory]
    ages: AgeStats
    report: StepReport


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """A trained step."""

    version: Version
    """The version that the step made."""
    batch: dict[str, float | int | str]
    stats: StepStats
    started: float
    """Monotonic seconds when the wait for its data began."""
    wait_s: float
    train_s: float


def metrics_line(
    result: StepResult, *, weights_s: float = 0.0, checkpoint_s: float = 0.0, num_ended: tuple[int, int] = (0, 0)
) -> dict[str, float | int | str]:
    """Return the step's line of ``metrics.jsonl``.

    Args:
        checkpoint_s: for which a checkpoint has held up the steps since the line before.
        num_ended: groups dropped as stale, and groups that failed, since then.
    """
    dropped_stale, failed = num_ended
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
