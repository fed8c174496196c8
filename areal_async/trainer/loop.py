"""The trainer's ring: cut -> payloads -> rows -> step -> weights -> event, the same on every rank.

``run_prefetch``  consumes the journal; waits for the next cut; produces verified payloads one step ahead;
                  unblocked by rank 0's feed
``run_steps``     consumes those; waits for them and for its peers; produces a weights version per step, an
                  archive file, and copies for a checkpoint when due, which is written meanwhile; unblocks the
                  planner (``BatchFeed.allow``) and, through the announced weights, the servers and the controller

The asyncio side waits, the engine's one thread computes. Collectives are called in the same order on every
rank; which steps exist is decided by the journal alone.
"""

import functools
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from areal_async.bus import Bus
from areal_async.config.live import settings_of_step
from areal_async.config.settings import Settings
from areal_async.errors import PipelineError, WireError
from areal_async.process.failpoints import failpoint
from areal_async.protocol.journal import Journal
from areal_async.protocol.types import Cut, CutKind, Metrics, OutcomeKind, Version
from areal_async.telemetry import spans, wait_graph
from areal_async.trainer.alone import Alone, Material
from areal_async.trainer.batch.culprits import find_culprits, said_by
from areal_async.trainer.batch.feed import BatchFeed, fail_group
from areal_async.trainer.batch.ledger import Ledger
from areal_async.trainer.batch.limits import TrainingLimits
from areal_async.trainer.batch.payloads import GONE, Check, SlotKey, fetch, place, share
from areal_async.trainer.batch.reader import JournalReader
from areal_async.trainer.batch.step import (
    AgreedBatch,
    Report,
    ShareStats,
    StepResult,
    add_up_info,
    batch_metrics,
    metrics_line,
)
from areal_async.trainer.engine.engines import Engines, EngineThreads
from areal_async.trainer.engine.parallel.ranks import Ranks, is_of_peers
from areal_async.trainer.engine.threads import BackgroundJob
from areal_async.trainer.health import HISTORY_STEPS, Health
from areal_async.trainer.output.archive import MetricsFile, write_archive
from areal_async.trainer.output.archive_reader import find_archived
from areal_async.trainer.output.checkpoint_retention import INTERVAL
from areal_async.trainer.output.checkpointer import Checkpointer
from areal_async.trainer.output.publisher import WeightsPublisher
from areal_async.trainer.shares import Done, RankShard, ages_in, agree, train_share
from areal_async.trainer.step_calls import StepCalls

log = structlog.get_logger()


class Trainer:
    """One rank, from its restored checkpoint to the last step."""

    def __init__(
        self,
        settings: Settings,
        run_directory: Path,
        *,
        ranks: Ranks,
        engines: Engines,
        threads: EngineThreads,
        publisher: WeightsPublisher,
        archiving: BackgroundJob,
        checkpointer: Checkpointer,
        bus: Bus,
        reader: JournalReader,
        number: int,
        feed: BatchFeed | None,
    ) -> None:
        """``number`` is the lineage's; ``feed`` is rank 0's alone."""
        self._settings = settings
        self._of_step = settings
        """As the newest step is trained with them: the same on every rank."""
        self._directory = run_directory
        self._ranks = ranks
        self._engines = engines
        self._dims = engines.actor.dims
        self._thread = threads.engine
        self._calls = StepCalls(settings, engines=engines, threads=threads)
        self._limits = TrainingLimits(settings, vocab_size=engines.vocab_size)
        self._publisher = publisher
        self._archiving = archiving
        self._checkpointer = checkpointer
        self._bus = bus
        self._reader = reader
        self._number = number
        self._feed = feed
        self._ledger = Ledger(Version(number, 0))
        self._wants_stop = False
        self._metrics_file = MetricsFile(run_directory / "metrics.jsonl")
        self._health = Health(settings.health, bus)
        self.step = 0
        self.state = "starting"
        self.last_line: Metrics | None = None

    @property
    def version(self) -> Version:
        """What the engine holds now."""
        return Version(self._number, self.step)

    @property
    def alarms(self) -> list[str]:
        """What is wrong with learning now, a sentence each."""
        return self._health.sentences

    @property
    def waits_for(self) -> str:
        return self._feed.waits_for if self._feed is not None and self.state == "waiting" else ""

    def stop(self) -> None:
        """Finish the step that runs, checkpoint, and leave."""
        log.info("trainer.stop_requested", step=self.step)
        self._wants_stop = True
        if self._feed is not None:
            self._feed.stop()

    async def restore(self, checkpoint: Path | None) -> None:
        """Load a checkpoint and drop what was written after it. Collective; before ``run``."""
        if checkpoint is not None:
            ledger = await self._thread.run(lambda: self._engines.load_checkpoint(checkpoint))
            self._ledger = Ledger.decode(ledger, what=f"ledger of {checkpoint}")
            self.step = self._ledger.version.step
        self._checkpointer.restored(self.step)
        if self._feed is not None:
            self._metrics_file.rewind(to_step=self.step)
            await self._health.restore(self._metrics_file.newest(HISTORY_STEPS))
            num_moved = self._checkpointer.abandon_archive()
            self._check_ledger(self._reader.journal)
            await self._feed.on_checkpoint(self.step)
            log.info("trainer.restored", step=self.step, lineage=self._number, num_archives_abandoned=num_moved)

    async def run(self) -> None:
        """Replay what was journalled, announce where that led, and train on."""
        is_current = await self._replay()
        await self._checkpoint_now()
        if not is_current:
            return  # stopped: the servers hold newer weights than these, and the next trainer replays the rest
        await self._publish_weights()
        self.state = f"waiting for servers to hold {self.version}"
        with self._waiting(wait_graph.weights(str(self.version)), "all servers to hold"):
            await self._publisher.wait_until_held(self.version, should_stop=lambda: self._wants_stop)
        await self._train()
        await self._checkpoint_now()
        if self._feed is not None:
            await self._feed.make_room()
        if self.step >= self._settings.run.steps:
            self.state = "exporting the model"
            with self._waiting(wait_graph.checkpoint(self.step), "the export after"):
                await self._thread.run(lambda: self._engines.actor.export(self._directory))
            await self._publisher.announce_final()  # last: whoever sees it may end the run
        await self._publisher.finish()
        self.state = "finished"
        log.info("trainer.finished", step=self.step)

    # the ring

    async def _replay(self) -> bool:
        """Train again, from the stored messages, what was journalled after the checkpoint; False when stopped early.

        Checkpointed after its first step, and whenever it has got twice as far: whatever killed the last trainer may
        kill this one as soon, and the next is to start further on.
        """
        first_step = due_step = self.step + 1
        for step in self._reader.journal.steps_to_replay():
            self.state = f"replaying step {step}"
            part = await self._fetch_again(self._reader.journal.cut_to_replay(step))
            reports = await self._exchange(Report(missing=list(part.missing.items()), stop=self._wants_stop))
            if reports[0].stop:
                return False
            missing = dict(pair for report in reports for pair in report.missing)
            gone = [key for key, why in missing.items() if why == GONE]
            if gone:
                log.warning("replay.ended", step=step, num_missing=len(gone))
                if self._feed is not None:
                    why = f"{len(gone)} of its payloads are gone, of group {gone[0][0]} for one"
                    await self._feed.give_up_cuts(after_step=self.step, why=why)
                break
            # What cannot be trained for another reason falls out, as it does when a cut is new.
            result = await self._run_step(part, missing, waited_s=0.0)
            await self._close_books(result, weights_s=0.0)
            if self.step == due_step:
                await self._checkpoint()
                due_step += self.step + 1 - first_step
        return True

    async def _train(self) -> None:
        """Train the cuts of this lineage, until its journal ends or a stop."""
        send, receive = anyio.create_memory_object_stream[RankShard | None](0)
        async with anyio.create_task_group() as loops:
            loops.start_soon(self._run_prefetch, send, self.step + 1)
            if self._feed is not None:
                self._feed.allow(self.step + 1)
                loops.start_soon(self._feed.run_journal, self.step + 1)
            await self._run_steps(receive)

    async def _run_prefetch(self, send: MemoryObjectSendStream[RankShard | None], first_step: int) -> None:
        """Hand over what the journal says next: a batch, or None for a checkpoint before it."""
        async with send:
            step, is_checkpointed = first_step, False
            while entry := await self._reader.next_entry(step, lineage=self._number, is_checkpointed=is_checkpointed):
                is_checkpointed = entry.kind is CutKind.CHECKPOINT
                try:
                    await send.send(None if is_checkpointed else await self._fetch(entry))
                except anyio.BrokenResourceError:
                    return  # stopped before this step
                step += not is_checkpointed

    async def _run_steps(self, receive: MemoryObjectReceiveStream[RankShard | None]) -> None:
        async with receive:
            while True:
                self.state, since = "waiting", time.monotonic()
                try:
                    with self._waiting(wait_graph.cut(self.step + 1), "the groups of"):
                        part = await receive.receive()
                except anyio.EndOfStream:
                    return
                if part is None:
                    await self._checkpoint_now()  # to make room: there may be none to go on with
                    continue
                reports = await self._exchange(Report(missing=list(part.missing.items()), stop=self._wants_stop))
                if reports[0].stop:
                    return
                missing = dict(pair for report in reports for pair in report.missing)
                result = await self._run_step(part, missing, waited_s=time.monotonic() - since)
                weights_since = time.monotonic()
                await self._publish_weights()
                await self._close_books(result, weights_s=time.monotonic() - weights_since)
                if self.step % self._of_step.trainer.checkpoint_every_steps == 0:
                    await self._checkpoint()
                if self._feed is not None:
                    self._feed.allow(self.step + 1)

    async def _run_step(self, part: RankShard, missing: dict[SlotKey, str], *, waited_s: float) -> StepResult:
        started = time.monotonic()
        step, settings = part.cut.step, self._settings
        self.state = f"training step {step}"
        if self._feed is not None and settings.rollout.max_staleness > 0:
            self._feed.allow(step + 1)
        batch = agree(part, missing, settings)
        if self._feed is not None:
            for group_id in batch.unusable:
                reason = next((why for (name, _), why in missing.items() if name == group_id), "too few of its slots")
                await self._feed.settle([group_id], OutcomeKind.FAILED, reason=reason, step=step)
        train_since = time.monotonic()
        failpoint("trainer.before_step")
        try:
            done = await self._train_batch(part, batch)
        except Exception as exc:
            await self._give_up_culprits(part, missing, batch, exc)
            raise
        failpoint("trainer.after_step")
        train_s = time.monotonic() - train_since
        made = self._made(step)
        archive = functools.partial(
            write_archive,
            self._directory / "trajectories",
            made=made,
            cut=part.cut,
            rank=self._dims.data.rank,
            slots=done.slots,
            trajectories=done.trajectories,
            advantages=batch.advantages,
            rows=done.trained.rows,
        )
        own = ShareStats()
        if self._dims.is_reporting_rank:
            await self._archiving.start(lambda: anyio.to_thread.run_sync(archive))
            own = ShareStats(ages=done.ages, info=add_up_info(one.info for one in done.trajectories.values()))
        shares = await self._gather(msgspec.json.encode(own))
        self.step = step
        self._ledger.add(made, sorted({placed.group_id for placed in batch.slots}))
        return StepResult(
            version=made,
            batch={
                **batch_metrics(
                    batch,
                    [msgspec.json.decode(one, type=ShareStats) for one in shares],
                    workflows=[task.name for task in settings.tasks],
                    age=ages_in(part.cut, self._number),
                ),
                **done.trained.others,
                INTERVAL: self._of_step.trainer.checkpoint_every_steps,
            },
            stats=done.trained.stats,
            started=started - waited_s,
            wait_s=waited_s,
            train_s=train_s,
        )

    async def _train_batch(self, part: RankShard, batch: AgreedBatch) -> Done:
        """Train this rank's share of a batch. A collective."""
        step, cut = part.cut.step, part.cut
        self._of_step = settings_of_step(self._settings, lr=cut.lr, numbers=cut.numbers)
        with self._waiting(wait_graph.step(step), "the engine in"), spans.part_of_step(self._made(step), "train"):
            return await train_share(
                part, batch, self._calls, start=self.version, settings=self._settings, of_step=self._of_step
            )

    async def _give_up_culprits(
        self, part: RankShard, missing: Mapping[SlotKey, str], batch: AgreedBatch, error: Exception
    ) -> None:
        """Record the groups that a step fails with, so that it is replayed without them; this process is to end.

        What is in its engine is worth nothing any more. A single rank tries parts of the batch on it. Of several, the
        one that has raised looks for them in a process of its own, while its peers wait for it in their collectives;
        those who only miss a peer look for nothing.
        """
        if is_of_peers(error):
            return
        self.state = f"looking for what step {part.cut.step} fails with"
        groups = list(dict.fromkeys(placed.group_id for placed in batch.slots))
        find = self._find_here if self._ranks.size == 1 else self._find_alone
        with self._waiting(wait_graph.step(part.cut.step), "what fails in"):
            found = await find(part, missing, batch, groups, said_by(error))
        for group_id, why in found.items():
            log.warning("group.given_up", step=part.cut.step, group_id=group_id, reason=why)
            reason = f"the step fails with it: {why}"
            if self._feed is not None:
                await self._feed.settle([group_id], OutcomeKind.FAILED, reason=reason, step=part.cut.step)
            else:
                await fail_group(
                    self._bus,
                    group_id,
                    part.cut,
                    reason=reason,
                    lineage=self._number,
                    max_attempts=self._settings.rollout.max_attempts,
                )

    async def _find_here(
        self, part: RankShard, missing: Mapping[SlotKey, str], batch: AgreedBatch, groups: Sequence[str], why: str
    ) -> dict[str, str]:
        async def attempt(tried: Sequence[str]) -> str:
            others = [placed.key for placed in batch.slots if placed.group_id not in tried]
            try:
                await self._train_batch(part, agree(part, [*missing, *others], self._settings))
            except Exception as exc:  # noqa: BLE001 - whatever it is, the step cannot be trained with them
                return said_by(exc)
            return ""

        return await find_culprits(groups, why, attempt)

    async def _find_alone(
        self, part: RankShard, missing: Mapping[SlotKey, str], batch: AgreedBatch, groups: Sequence[str], why: str
    ) -> dict[str, str]:
        """Look in a process of its own, where the whole cut is on one rank; no longer than half of what peers wait."""
        found: dict[str, str] = {}
        with anyio.move_on_after(self._ranks.deadline_s / 2):
            whole = await self._fetch_again(part.cut, is_whole=True)
            material = Material.of(whole, [*missing, *whole.missing], start=self.version)
            async with aclosing(Alone(self._directory, material)) as alone:
                found = await find_culprits(groups, why, alone.attempt)
        return found

    # what a step leaves behind

    async def _publish_weights(self) -> None:
        self.state = f"publishing {self.version}"
        publication = wait_graph.publication(str(self.version))
        with (
            wait_graph.doing(publication, "the", waiter=wait_graph.rank(self._ranks.rank)),
            spans.part_of_step(self.version, "publish weights"),
        ):
            await self._publisher.publish(self.version)

    async def _checkpoint(self) -> None:
        """Checkpoint what no checkpoint holds yet; it is written beside the next steps. The same on every rank."""
        self.state = f"copying for the checkpoint of step {self.step}"
        await self._checkpointer.start(self.version, self._ledger.encode())

    async def _checkpoint_now(self) -> None:
        """Checkpoint it, and wait until that is on disk, recorded and settled."""
        await self._checkpoint()
        self.state = f"writing the checkpoint of step {self.step}"
        await self._checkpointer.finish()

    async def _close_books(self, result: StepResult, *, weights_s: float) -> None:
        if self._feed is None:
            return
        spans.trained(
            result.version,
            self._ledger.newest,
            since_s=result.started,
            wait_s=result.wait_s,
            train_s=result.train_s,
        )
        dropped_stale, failed = self._feed.planner.take_counts()
        line = metrics_line(
            result,
            weights_s=weights_s,
            checkpoint_s=self._checkpointer.take_held_up_s(),
            dropped_stale=dropped_stale,
            failed=failed,
        )
        self._health.settings = self._feed.now.health
        judged = await self._health.judge(line)
        self._metrics_file.append(judged)
        self.last_line = judged
        log.info("step.trained", **judged)

    # helpers

    def _made(self, step: int) -> Version:
        """Return what a step of this lineage makes, or is to make."""
        return Version(self._number, step)

    async def _fetch(self, cut: Cut, *, is_whole: bool = False) -> RankShard:
        """Fetch this rank's share of a cut, or the whole of it."""
        slots = place(cut)
        mine = slots
        if not is_whole:
            mine = share(
                slots,
                rank=self._dims.data.rank,
                num_ranks=self._dims.data.size,
                flops=self._engines.actor.flops,
                num_minibatches=self._settings.algorithm.num_minibatches,
            )
        with (
            wait_graph.on(wait_graph.BROKER, "the payloads, from", waiter=wait_graph.cut(cut.step)),
            spans.part_of_step(self._made(cut.step), "fetch", num_slots=len(mine)),
        ):
            trajectories, missing = await fetch(self._bus, mine, self._check_of(cut))
        return RankShard(cut=cut, slots=slots, mine=mine, trajectories=trajectories, missing=missing)

    async def _fetch_again(self, cut: Cut, *, is_whole: bool = False) -> RankShard:
        """Fetch what was trained before; what is not stored any more is taken from the archive.

        A checkpoint that was whole let its messages go, and turned out damaged later.
        """
        part = await self._fetch(cut, is_whole=is_whole)
        if not part.missing:
            return part
        wanted = {placed.item.slot.sample_uid: placed for placed in part.mine if placed.key in part.missing}
        look = functools.partial(find_archived, self._directory, cut.step, set(wanted))
        archived, missing = await anyio.to_thread.run_sync(look), dict(part.missing)
        for uid, found in archived.items():
            placed = wanted[uid]
            trajectory = msgspec.structs.replace(found, slot=placed.item.slot)
            try:
                self._check_of(cut)(trajectory)
            except WireError as exc:
                missing[placed.key] = str(exc)
                continue
            part.trajectories[placed.position] = trajectory
            del missing[placed.key]
        log.info("replay.from_archive", step=cut.step, num_found=len(archived), num_missing=len(missing))
        return replace(part, missing=missing)

    def _check_of(self, cut: Cut) -> Check:
        return functools.partial(self._limits.check_trajectory, cut=cut, lineage=self._number)

    def _check_ledger(self, journal: Journal) -> None:
        """Hold the checkpoint's own list of what it was trained on against the journal.

        Raises:
            PipelineError: they disagree: the journal is not of these weights, and going on could train twice.
        """
        for step, trained in self._ledger.steps():
            strangers = journal.unknown_to(step, trained)
            if strangers:
                raise PipelineError(
                    f"checkpoint {self._ledger.version}: step {step} trained {strangers[:3]}, which the "
                    "journal does not know of: the broker's store is of another run; start anew with --fresh"
                )

    async def _exchange(self, report: Report) -> list[Report]:
        every = await self._gather(msgspec.json.encode(report))
        return [msgspec.json.decode(one, type=Report) for one in every]

    def _waiting(self, on: str, what: str) -> AbstractContextManager[wait_graph.Wait]:
        return wait_graph.on(on, what, waiter=wait_graph.rank(self._ranks.rank))

    async def _gather(self, payload: bytes) -> list[bytes]:
        with self._waiting(wait_graph.step(self.step + 1), "all ranks in"):
            return await self._thread.run(lambda: self._ranks.gather_bytes(payload))
