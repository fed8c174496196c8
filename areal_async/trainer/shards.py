"""One rank's shard of a batch, trained: the same way in a run, in a replay, and where a failing group is looked for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from areal_async.algorithms.advantages import advantage_rule
from areal_async.config.live import settings_of_step
from areal_async.config.settings import Settings
from areal_async.protocol.types import Cut, Trajectory, Version
from areal_async.telemetry import wait_graph
from areal_async.trainer.batch.culprits import said_by
from areal_async.trainer.batch.cut import ages_in
from areal_async.trainer.batch.payloads import BatchSlot, SlotKey, shard_of
from areal_async.trainer.batch.step import (
    AgeStats,
    AgreedBatch,
    ShardStats,
    add_up_info,
    agree_on_batch,
    batch_metrics,
    build_rows,
)
from areal_async.trainer.engine.engines import Engines, EngineThreads
from areal_async.trainer.step_calls import StepCalls, StepReport


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShard:
    """This rank's part of a cut, fetched."""

    cut: Cut
    slots: list[BatchSlot]
    """Slots of the whole cut, the same on every rank."""
    mine: list[BatchSlot]
    """Slots of this rank."""
    trajectories: dict[int, Trajectory]
    """Payloads of ``mine``, by position in the batch."""
    missing: dict[SlotKey, str]
    """Slots of ``mine`` that cannot be trained, each with why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedShard:
    """This rank's part of a batch, trained."""

    cut: Cut
    slots: list[BatchSlot]
    trajectories: dict[int, Trajectory]
    ages: AgeStats
    report: StepReport


class ShardTrainer:
    """One rank's engines, and how a batch goes through them."""

    def __init__(self, settings: Settings, *, engines: Engines, threads: EngineThreads) -> None:
        self._settings = settings
        self._engines = engines
        self._threads = threads
        self._calls = StepCalls(settings, engines=engines, threads=threads)
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

    def agree(self, slots: Sequence[BatchSlot], missing: Iterable[SlotKey]) -> AgreedBatch:
        """Return what every rank trains of a cut of which these slots are missing."""
        settings = self._settings
        return agree_on_batch(
            slots,
            missing,
            min_group_size=settings.rollout.min_group_size,
            min_group_sizes={task.name: settings.rollout_of(task.name).min_group_size for task in settings.tasks},
            rule=advantage_rule(settings),
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
            advantages=batch.advantages,
            start=start,
            age=ages_in(cut, start.lineage),
            max_staleness=cut.max_staleness,
            masks_stale=cut.masks_stale,
            temperature=self._settings.rollout.sampling.temperature,
        )
        report = await self._calls.run(rows, batch, step=cut.step, settings=self.settings_of(cut))
        return TrainedShard(cut=cut, slots=mine, trajectories=trajectories, ages=ages, report=report)

    async def attempt(
        self, shard: RankShard, missing: Iterable[SlotKey], groups: Sequence[str], *, start: Version
    ) -> str:
        """Train some groups of a shard alone; return why that fails, nothing where it does not. A collective.

        What is in the engines is worth nothing any more.
        """
        others = [slot.key for slot in shard.slots if slot.group_id not in groups]
        try:
            await self.train(shard, self.agree(shard.slots, [*missing, *others]), start=start)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the step cannot be trained with them
            return said_by(exc)
        return ""

    async def metrics(self, batch: AgreedBatch, trained: TrainedShard, *, lineage: int) -> dict[str, float | int | str]:
        """Return the part of the step's metrics line that its batch decides, over all ranks. A collective."""
        own = ShardStats()
        if self._dims.is_reporting_rank:
            info = add_up_info(one.info for one in trained.trajectories.values())
            own = ShardStats(ages=trained.ages, info=info)
        every = await self.gather(msgspec.json.encode(own), step=trained.cut.step)
        numbers = batch_metrics(
            batch,
            [msgspec.json.decode(one, type=ShardStats) for one in every],
            workflows=[task.name for task in self._settings.tasks],
            age=ages_in(trained.cut, lineage),
        )
        return {**numbers, **trained.report.others}

    async def gather(self, payload: bytes, *, step: int) -> list[bytes]:
        """Return what every rank passes before or after this step, by rank. A collective."""
        ranks = self._dims.all
        with wait_graph.on(wait_graph.step(step), "all ranks in", waiter=wait_graph.rank(ranks.rank)):
            return await self._threads.engine.run(lambda: ranks.gather_bytes(payload))
