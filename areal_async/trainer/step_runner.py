"""Running one step on one rank: its shard of the cut fetched, agreed on with the other ranks, trained, and archived.

What the engines hold is known here: the version, and the ledger of what it was trained on. Which step is run, and what
follows from it, is the ``Trainer``'s.
"""

import functools
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import structlog

from areal_async.bus import Bus
from areal_async.config.settings import Settings
from areal_async.errors import PipelineError, WireError
from areal_async.process.failpoints import failpoint
from areal_async.protocol.journal import Journal
from areal_async.protocol.types import Cut, OutcomeKind, Version
from areal_async.telemetry import spans, wait_graph
from areal_async.trainer.alone import Alone, Material
from areal_async.trainer.batch.culprits import find_culprits, said_by
from areal_async.trainer.batch.feed import BatchFeed, fail_group
from areal_async.trainer.batch.ledger import Ledger
from areal_async.trainer.batch.limits import TrainingLimits
from areal_async.trainer.batch.payloads import RankShard, ShardFetcher, SlotKey
from areal_async.trainer.batch.step import AgreedBatch, Report, StepResult, TrainedShard, agree_in_run
from areal_async.trainer.engine.engines import Engines, EngineThreads
from areal_async.trainer.engine.parallel.ranks import is_of_peers
from areal_async.trainer.engine.threads import BackgroundJob
from areal_async.trainer.output import archive
from areal_async.trainer.output.archive_reader import find_archived
from areal_async.trainer.shards import ShardTrainer
from areal_async.versions.best import INTERVAL

log = structlog.get_logger()


@dataclass(eq=False, kw_only=True)
class StepRunner:
    """One rank's engines, as one lineage trains them."""

    settings: Settings
    directory: Path
    """The run's."""
    bus: Bus
    engines: Engines
    threads: EngineThreads
    archiving: BackgroundJob
    """Writes the batches that were trained."""
    lineage: int
    feed: BatchFeed | None
    """Rank 0's alone."""
    step: int = field(default=0, init=False)
    """The newest step that the engines have trained."""
    culprits_of: int = field(default=0, init=False)
    """The step whose failing groups are looked for now; 0 for none."""
    step_settings: Settings = field(init=False)
    """Settings that the newest step was trained with: the same on every rank."""

    def __post_init__(self) -> None:
        self.step_settings = self.settings
        self.ledger = Ledger(Version(self.lineage, 0))
        self._dims = self.engines.actor.dims
        self._ranks = self._dims.all
        self.rank = self._ranks.rank
        self._shards = ShardTrainer(self.settings, engines=self.engines, threads=self.threads)
        self._limits = TrainingLimits(self.settings, vocab_size=self.engines.vocab_size, vision=self.engines.vision)
        self.fetcher = ShardFetcher(
            bus=self.bus, limits=self._limits, own_slots=self._shards.own_slots, lineage=self.lineage
        )

    @property
    def version(self) -> Version:
        """The version of the weights that the engines hold now."""
        return Version(self.lineage, self.step)

    async def load(self, checkpoint: Path) -> None:
        """Restore the engines. A collective."""
        ledger = await self.threads.engine.run(lambda: self.engines.load_checkpoint(checkpoint))
        self.ledger = Ledger.decode(ledger, what=f"ledger of {checkpoint}")
        self.step = self.ledger.version.step

    async def export(self) -> None:
        """Write the final model into the run directory. A collective."""
        with self.waiting(wait_graph.checkpoint(self.step), "the export after"):
            await self.threads.engine.run(lambda: self.engines.actor.export(self.directory))

    def check_ledger(self, journal: Journal) -> None:
        """Hold the checkpoint's own list of what it was trained on against the journal.

        Raises:
            PipelineError: they disagree: the journal is not of these weights, and going on could train twice.
        """
        for step, trained in self.ledger.steps():
            strangers = journal.unknown_to(step, trained)
            if strangers:
                raise PipelineError(
                    f"checkpoint {self.ledger.version}: step {step} trained {strangers[:3]}, which the "
                    "journal does not know of: the broker's store is of another run; start anew with --fresh"
                )

    # before the step

    async def fetch_again(self, cut: Cut, *, is_whole: bool = False) -> RankShard:
        """Fetch what was trained before; what is not stored any more is taken from the archive.

        A checkpoint that was whole let its messages go, and turned out damaged later.
        """
        shard = await self.fetcher.fetch(cut, is_whole=is_whole)
        if not shard.missing:
            return shard
        wanted = {slot.header.sample_uid: slot for slot in shard.mine if slot.key in shard.missing}
        look = functools.partial(find_archived, self.directory, cut.step, set(wanted))
        (archived, images), missing = await anyio.to_thread.run_sync(look), dict(shard.missing)
        for uid, found in archived.items():
            slot = wanted[uid]
            trajectory = msgspec.structs.replace(found, slot=slot.header)
            try:
                self._limits.check_trajectory(trajectory, cut=cut, lineage=self.lineage)
            except WireError as exc:
                missing[slot.key] = str(exc)
                continue
            shard.trajectories[slot.position] = trajectory
            del missing[slot.key]
        log.info("replay.from_archive", step=cut.step, num_found=len(archived), num_missing=len(missing))
        return replace(shard, missing=missing, images={**images, **shard.images})

    async def prepare(self) -> None:
        """Import beside a wait what would hold up the first steps."""
        if self._dims.is_reporting_rank:
            await self.archiving.start(lambda: anyio.to_thread.run_sync(archive.prepare))

    async def exchange(self, shard: RankShard, *, stop: bool) -> dict[SlotKey, str] | None:
        """Return what any rank misses of a cut, each slot with why; None where rank 0 wants to stop. A collective."""
        report = Report(missing=list(shard.missing.items()), stop=stop)
        reports = await self._shards.gather(report, step=self.step + 1)
        return None if reports[0].stop else dict(pair for report in reports for pair in report.missing)

    # the step

    async def run(self, shard: RankShard, missing: Mapping[SlotKey, str], *, waited_s: float) -> StepResult:
        """Train a batch and archive this rank's part of it. A collective.

        Groups left with too few slots are recorded as failed before, and those that the step fails with after that.
        """
        started, cut = time.monotonic(), shard.cut
        made = Version(self.lineage, cut.step)
        batch = agree_in_run(shard.slots, missing, self.settings)
        if self.feed is not None:
            for group_id in batch.unusable:
                reason = next((why for (name, _), why in missing.items() if name == group_id), "too few of its slots")
                await self.feed.settle([group_id], OutcomeKind.FAILED, reason=reason, step=cut.step)
        train_since = time.monotonic()
        failpoint("trainer.before_step")
        try:
            self.step_settings = self._shards.settings_of(cut)
            with (
                self.waiting(wait_graph.step(cut.step), "the engine in"),
                spans.part_of_step(made, "train"),
            ):
                trained = await self._shards.train(shard, batch, start=self.version)
        except Exception as exc:
            await self._give_up_culprits(shard, missing, batch, exc)
            raise
        failpoint("trainer.after_step")
        if self.settings.inference.colocate == "release":
            await self.threads.engine.run(self.engines.release_memory)
        train_s = time.monotonic() - train_since
        if self._dims.is_reporting_rank:
            await self._archive(trained, batch, made, shard.images)
        numbers = await self._shards.metrics(batch, trained, lineage=self.lineage)
        self.step = cut.step
        self.ledger.add(made, sorted({slot.group_id for slot in batch.slots}))
        return StepResult(
            version=made,
            batch=numbers | {INTERVAL: self.step_settings.trainer.checkpoint_every_steps},
            stats=trained.report.stats,
            started=started - waited_s,
            wait_s=waited_s,
            train_s=train_s,
        )

    async def _archive(
        self, trained: TrainedShard, batch: AgreedBatch, made: Version, images: Mapping[str, bytes]
    ) -> None:
        write = functools.partial(
            archive.write_archive,
            self.directory / "trajectories",
            trained,
            made=made,
            rank=self._dims.data.rank,
            advantages=batch.advantages,
            images=None if self.engines.actor.vision is None else images,
        )
        await self.archiving.start(lambda: anyio.to_thread.run_sync(write))

    # a step that fails

    async def _give_up_culprits(
        self, shard: RankShard, missing: Mapping[SlotKey, str], batch: AgreedBatch, error: Exception
    ) -> None:
        """Record the groups that a step fails with, so that it is replayed without them; this process is to end."""
        if is_of_peers(error):
            return
        cut = shard.cut
        self.culprits_of = cut.step
        groups = list(dict.fromkeys(slot.group_id for slot in batch.slots))
        with self.waiting(wait_graph.step(cut.step), "what fails in"):
            found = await self._find_culprits(shard, missing, groups, said_by(error))
        for group_id, why in found.items():
            log.warning("group.given_up", step=cut.step, group_id=group_id, reason=why)
            reason = f"the step fails with it: {why}"
            if self.feed is not None:
                await self.feed.settle([group_id], OutcomeKind.FAILED, reason=reason, step=cut.step)
            else:
                await fail_group(self.bus, self.settings, cut, group_id, reason=reason, lineage=self.lineage)

    async def _find_culprits(
        self, shard: RankShard, missing: Mapping[SlotKey, str], groups: Sequence[str], why: str
    ) -> dict[str, str]:
        """Return the groups that the step fails with, each with why.

        A single rank tries parts of the batch on its engine. Of several, the one that has raised looks for them in a
        process of its own, where the whole cut is on one rank, while its peers wait for it in their collectives: no
        longer than half of what they wait. Those who only miss a peer look for nothing.
        """
        if self._ranks.size == 1:
            attempt = functools.partial(self._shards.attempt, shard, missing, start=self.version)
            return await find_culprits(groups, why, attempt)
        with anyio.move_on_after(self._ranks.deadline_s / 2):
            whole = await self.fetch_again(shard.cut, is_whole=True)
            material = Material.of(whole, [*missing, *whole.missing], start=self.version)
            async with aclosing(Alone(self.directory, material)) as alone:
                return await find_culprits(groups, why, alone.attempt)
        return {}

    def waiting(self, on: str, what: str) -> AbstractContextManager[wait_graph.Wait]:
        """Say what this rank waits for, as long as the block lasts."""
        return wait_graph.on(on, what, waiter=wait_graph.rank(self.rank))
