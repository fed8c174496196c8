"""One rank's shard of a batch, as rows through the calls of a step.

It goes the same way in a run, in a replay, and where a failing group is looked for.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from areal_async.algorithms.advantages import spread_over_tokens
from areal_async.algorithms.dataflow import FunctionCall, execute, plain_name
from areal_async.algorithms.graphs import ELSEWHERE, step_graph
from areal_async.config.live import settings_of_step
from areal_async.config.settings import Settings
from areal_async.errors import StalenessError
from areal_async.protocol.types import NOT_CREDITED, Cut, Trajectory, Version
from areal_async.telemetry import spans, wait_graph
from areal_async.trainer.batch.culprits import said_by
from areal_async.trainer.batch.cut import ages_in
from areal_async.trainer.batch.payloads import BatchSlot, RankShard, SlotKey, shard_of
from areal_async.trainer.batch.step import (
    AgeStats,
    AgreedBatch,
    ShardStats,
    StepReport,
    TrainedShard,
    add_up_info,
    agree_in_run,
    batch_metrics,
)
from areal_async.trainer.engine.engines import Engines, EngineThreads
from areal_async.trainer.packing.rows import TrainRow
from areal_async.trainer.step_calls import RunningStep, StepCalls, Values

T = TypeVar("T")

_STEP_BITS = 0xFFFFFFFF
"""Bits of a packed version that hold its step. Versions are compared by step: a replayed one stands in for the lost."""


class ShardTrainer:
    """One rank's engines, and how a batch goes through them."""

    def __init__(self, settings: Settings, *, engines: Engines, threads: EngineThreads) -> None:
        self._settings = settings
        self._engines = engines
        self._threads = threads
        self._calls = StepCalls(settings, engines)
        self._graph = step_graph(settings).rest(ELSEWHERE)
        self._dims = engines.actor.dims

    def own_slots(self, slots: Sequence[BatchSlot]) -> list[BatchSlot]:
        """Return this rank's slots of a batch."""
        return shard_of(
            slots,
            rank=self._dims.data.rank,
            num_ranks=self._dims.data.size,
            flops=self._engines.actor.flops,
            num_minibatches=self._settings.algorithm.num_minibatches,
        )

    def settings_of(self, cut: Cut) -> Settings:
        """Return the settings that the step of this cut is trained with."""
        return settings_of_step(self._settings, lr=cut.lr, numbers=cut.numbers)

    async def train(self, shard: RankShard, batch: AgreedBatch, *, start: Version) -> TrainedShard:
        """Train this rank's shard of a batch. A collective.

        Args:
            start: the version that the step starts from, in the lineage that trains.

        Raises:
            StalenessError: a token over the bound would be trained.
        """
        cut, used = shard.cut, {slot.position for slot in batch.slots}
        mine = [slot for slot in shard.mine if slot.position in used]
        trajectories = {slot.position: shard.trajectories[slot.position] for slot in mine}
        rows, ages = build_rows(
            trajectories,
            images=shard.images,
            advantages=batch.advantages,
            cut=cut,
            start=start,
            temperature=self._settings.rollout.sampling.temperature,
        )
        report = await self.run_calls(rows, batch, step=cut.step, settings=self.settings_of(cut))
        return TrainedShard(cut=cut, slots=mine, trajectories=trajectories, ages=ages, report=report)

    async def run_calls(
        self, rows: Sequence[TrainRow], batch: AgreedBatch, *, step: int, settings: Settings
    ) -> StepReport:
        """Make every call of one step. A collective: every rank makes the calls of one thread in the same order.

        Args:
            rows: of this rank, with the advantages of ``batch`` or, where calls turn those into advantages, outcomes.
            settings: that this step is trained with (``settings_of_step``).
        """
        here = RunningStep(number=step, batch=batch, settings=settings)
        self._engines.change(settings)

        async def work(call: FunctionCall, inputs: Values) -> Mapping[str, Any]:
            with spans.call_of_step(call.name, call.role):
                return await self._threads.run(call.role, lambda: self._calls.make(call, here, inputs))

        # Where these are still outcomes, a trajectory has one: ``algorithm.one_reward_for`` allows its replies none.
        outcomes = {position: float(np.mean(values)) for position, values in batch.advantages.items()}
        given = {"rows": list(rows), "advantages": [row.advantage for row in rows], "outcomes": outcomes}
        results = await execute(
            self._graph,
            work,
            {name: given[plain_name(name)] for name in self._graph.given},
            thread=lambda call: self._threads.name(call.role),
        )
        stats = results["actor_stats"]
        if "kl_mean" in results:
            stats = replace(stats, kl_mean=results["kl_mean"])
        others: dict[str, float] = {}
        if "critic_stats" in results:
            others = asdict(results["critic_stats"]) | msgspec.structs.asdict(results["value_quality"])
        return StepReport(stats=stats, others=others, rows=here.trained)

    async def attempt(
        self, shard: RankShard, missing: Iterable[SlotKey], groups: Sequence[str], *, start: Version
    ) -> str:
        """Train some groups of a shard alone; return why that fails, nothing where it does not. A collective.

        What is in the engines is worth nothing any more.
        """
        others = [slot.key for slot in shard.slots if slot.group_id not in groups]
        try:
            await self.train(shard, agree_in_run(shard.slots, [*missing, *others], self._settings), start=start)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the step cannot be trained with them
            return said_by(exc)
        return ""

    async def metrics(self, batch: AgreedBatch, trained: TrainedShard, *, lineage: int) -> dict[str, float | int | str]:
        """Return the part of the step's metrics line that its batch decides, over all ranks. A collective."""
        own = ShardStats()
        if self._dims.is_reporting_rank:
            info = add_up_info(one.info for one in trained.trajectories.values())
            own = ShardStats(ages=trained.ages, info=info)
        numbers = batch_metrics(
            batch,
            await self.gather(own, step=trained.cut.step),
            workflows=[task.name for task in self._settings.tasks],
            age=ages_in(trained.cut, lineage),
        )
        return {**numbers, **trained.report.others}

    async def gather(self, own: T, *, step: int) -> list[T]:
        """Return what every rank passes before or after this step, by rank. A collective."""
        ranks, payload = self._dims.all, msgspec.json.encode(own)
        with wait_graph.on(wait_graph.step(step), "all ranks in", waiter=wait_graph.rank(ranks.rank)):
            every = await self._threads.engine.run(lambda: ranks.gather_bytes(payload))
        return [msgspec.json.decode(one, type=type(own)) for one in every]


def build_rows(
    trajectories: Mapping[int, Trajectory],
    *,
    images: Mapping[str, bytes] = MappingProxyType({}),
    advantages: Mapping[int, NDArray[np.float32]],
    cut: Cut,
    start: Version,
    temperature: float,
) -> tuple[list[TrainRow], AgeStats]:
    """Turn trajectories into rows, and prove their freshness: the third guard, *assert*.

    Args:
        trajectories: by position in the batch.
        images: SHA-256 -> each that they show, a PNG.
        advantages: by the same; of each credited reply, or the one of a trajectory without credits.
        cut: of the step that runs now; it may have over-age tokens masked: left out of the loss and counted.
        start: the version the step starts from, in the lineage that trains.
        temperature: of the run, where a token does not know its own.

    Raises:
        StalenessError: a token over the bound would be trained.
    """
    rows, stats, age, max_staleness = [], AgeStats(), ages_in(cut, start.lineage), cut.max_staleness
    for position, trajectory in sorted(trajectories.items()):
        for sequence in trajectory.sequences:
            credited_L = sequence.loss_mask if sequence.turns is None else sequence.turns != NOT_CREDITED
            ages_L = np.zeros(sequence.num_tokens, dtype=np.int64)
            credited: dict[int, int] = defaultdict(int)  # age -> tokens
            for packed in np.unique(sequence.versions).tolist():
                is_of_L = sequence.versions == packed
                own_age = age(Version.unpack(packed)) if packed >= 0 else 0
                ages_L[is_of_L] = own_age
                credited[own_age] += int(np.count_nonzero(credited_L & is_of_L))
            num_stale = sum(count for own_age, count in credited.items() if own_age > max_staleness)
            if num_stale and not cut.masks_stale:
                raise StalenessError(
                    f"trajectory {trajectory.slot.sample_uid}: got {num_stale} tokens of age up to {ages_L.max()}, "
                    f"need at most {max_staleness}; the cut let them through"
                )
            mask_L = credited_L & (ages_L <= max_staleness)
            for own_age, count in credited.items():
                if count and own_age <= max_staleness:
                    stats.by_age[own_age] = stats.by_age.get(own_age, 0) + count
                    stats.num_tokens += count
                    stats.total += own_age * count
                    stats.max = max(stats.max, own_age)
            stats.num_masked += num_stale
            tempered = temperature if sequence.temperatures is None else sequence.temperatures
            stats.temperatures += float(np.broadcast_to(tempered, mask_L.shape)[mask_L].sum(dtype=np.float64))
            steered_L = np.zeros_like(mask_L) if sequence.steered is None else sequence.steered
            stats.num_steered += int(np.count_nonzero(mask_L & steered_L))
            stats.num_uncredited += int(np.count_nonzero(sequence.loss_mask & ~credited_L))
            rows.append(
                TrainRow(
                    token_ids=sequence.token_ids,
                    loss_mask=mask_L,
                    behave_logprobs=sequence.logprobs,
                    advantage=_laid_out(advantages[position], sequence.turns),
                    current_mask=sequence.loss_mask & ~steered_L & ((sequence.versions & _STEP_BITS) == start.step),
                    ages=ages_L,
                    temperature=tempered,
                    turns=sequence.turns,
                    images=tuple(images[image.sha256] for image in sequence.images or ()),
                    index=position,
                )
            )
    return rows, stats


def _laid_out(values_K: NDArray[np.float32], turns_L: NDArray[np.int16] | None) -> float | NDArray[np.float32]:
    return float(values_K[0]) if turns_L is None else spread_over_tokens(values_K, turns_L)
