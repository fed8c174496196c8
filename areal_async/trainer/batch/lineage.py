"""Taking the right to train, and losing it.

One trainer at a time: a compare-and-set on KV ``lineage`` takes the next number; the broker's consumer of
the older lineage is deleted, so a zombie's acks reach nothing, and a ``begin`` entry in the journal fences
its cuts and outcomes for every reader. All else that a lineage writes is compare-and-set as well.

Going back: the record of the checkpoint first, then ``begin`` and ``branch`` at its step, then the order's end. Whoever
is killed in between leaves the order due, and the next lineage does all of it again.
"""

from contextlib import suppress

import msgspec
import structlog

from areal_async.bus import Bus, JournalSnapshots, Message, entries_after, take_trainer_consumer
from areal_async.errors import ConflictError, DeniedError, FencedError
from areal_async.process.failpoints import failpoint
from areal_async.protocol.events import CheckpointWritten, Event, RunRolledBack, WeightsAnnounced
from areal_async.protocol.journal import Journal, without_slots
from areal_async.protocol.run_state import CardHold, Rollback
from areal_async.protocol.subjects import CARD, CHECKPOINT, LINEAGE, ROLLBACK
from areal_async.protocol.types import (
    DISK,
    DISTRIBUTED,
    CheckpointRecord,
    Cut,
    CutKind,
    LineageRecord,
    Outcome,
    Version,
    WeightsVersion,
)

log = structlog.get_logger()


class Lineage:
    """This trainer's writes to the run's state, each fenced."""

    def __init__(self, bus: Bus, *, number: int, checkpoint: CheckpointRecord | None) -> None:
        self._bus = bus
        self.number = number
        self.checkpoint = checkpoint
        self.rollback: Rollback | None = None
        """An order to go back that nobody has carried out."""
        self._revisions: dict[str, int] = {}
        self._last_cut_sequence = 0
        self.snapshots = JournalSnapshots(bus)

    @classmethod
    async def take(cls, bus: Bus) -> "Lineage":
        """Become the trainer of the run.

        Raises:
            FencedError: another one took the same number first.
        """
        record, revision = await bus.get(LINEAGE, LineageRecord)
        lineage = cls(bus, number=(record.lineage if record else 0) + 1, checkpoint=None)
        while True:
            try:
                lineage._revisions[LINEAGE] = await bus.compare_and_set(
                    LINEAGE, LineageRecord(lineage=lineage.number), revision
                )
                break
            except ConflictError as exc:
                record, revision = await bus.get(LINEAGE, LineageRecord)
                if record is not None and record.lineage >= lineage.number:
                    raise FencedError(
                        f"lineage {lineage.number}: another trainer took it first; only one may run"
                    ) from exc
                # the older trainer has written its own anew (``_is_mine``)
        await lineage.take_consumer()
        await lineage._take_checkpoint()
        if not await lineage._take_weights():
            await lineage._take_rollback()
        return lineage

    async def take_consumer(self) -> None:
        """Have all that is stored delivered from its beginning.

        Raises:
            FencedError: a newer lineage has been taken.
        """
        await take_trainer_consumer(self._bus, self.number)
        # Only now: anyone who takes a newer one from here on finds this consumer, and deletes it.
        record, _ = await self._bus.get(LINEAGE, LineageRecord)
        self._check_newest(record.lineage if record else 0)
        if not await self._is_mine():
            raise FencedError(f"lineage {self.number}: another has been taken since; this trainer must stop")

    async def _is_mine(self) -> bool:
        """Say whether no newer lineage was taken, as the one who decides by it must know.

        Of a cluster an old leader may say so; there this one is written anew, which only the present leader can do.
        """
        if self._bus.is_clustered:
            record = LineageRecord(lineage=self.number)
            try:
                self._revisions[LINEAGE] = await self._bus.compare_and_set(LINEAGE, record, self._revisions[LINEAGE])
            except ConflictError:
                return False
        return True

    async def read_log(self, *, is_whole: bool = False) -> Journal:
        """Return what the log says before this lineage begins.

        Args:
            is_whole: keep the cuts of steps that are checkpointed, too; with their groups' names alone.

        Raises:
            FencedError: a newer one has begun.
        """
        if is_whole:
            journal, sequence = Journal(own_lineage=self.number), 0
        else:
            journal, sequence = await self.snapshots.load_journal()
        self._last_cut_sequence = journal.last_cut_sequence
        async for message in entries_after(self._bus, sequence):
            await read_entry(self._bus, message, journal, keeps_slots=not is_whole)
            if message.subject == self._bus.names.cuts:
                self._last_cut_sequence = message.sequence  # also of one that cannot be read
        self._check_newest(journal.lineage)
        return journal

    def _check_newest(self, taken: int) -> None:
        if taken > self.number:
            raise FencedError(f"lineage {self.number}: lineage {taken} has been taken since; this trainer must stop")

    async def write_begin(self) -> int:
        """Fence the older lineages in the log; return the entry's stream sequence."""
        restored_step = Version.parse(self.checkpoint.version).step if self.checkpoint else 0
        return await self.write_cut(Cut(kind=CutKind.BEGIN, lineage=self.number, step=restored_step))

    async def write_branch(self, journal: Journal) -> int:
        """Give up what was cut after the checkpoint, on an order to go back; return the entry's stream sequence.

        Args:
            journal: as it was before this lineage began.
        """
        failpoint("trainer.before_branch")
        shared_step = Version.parse(self.checkpoint.version).step if self.checkpoint else 0
        branches = {**journal.branches, str(self.number): shared_step}
        return await self.write_cut(Cut(kind=CutKind.BRANCH, lineage=self.number, step=shared_step, branches=branches))

    async def end_rollback(self, order: Rollback, *, refusal: str = "") -> None:
        """Say that an order is carried out, or why it was not, unless there is a newer one since."""
        failpoint("trainer.before_rollback_ends")
        ended = msgspec.structs.replace(order, lineage=self.number, refusal=refusal)
        with suppress(ConflictError):
            self._revisions[ROLLBACK] = await self._bus.compare_and_set(ROLLBACK, ended, self._revisions[ROLLBACK])
        self.rollback = None
        event = RunRolledBack(version=order.version, by=order.by, reason=order.reason, refusal=refusal)
        await self._bus.publish_event(event)

    async def write_cut(self, entry: Cut) -> int:
        """Add an entry to the journal, directly after the last one this lineage knows.

        Raises:
            FencedError: another trainer has written since.
        """
        while True:
            try:
                published = await self._bus.publish(
                    self._bus.names.cuts, entry, expected_last_subject_sequence=self._last_cut_sequence
                )
            except ConflictError as exc:
                if await self._skip_unreadable():
                    continue
                raise FencedError(
                    f"lineage {self.number}: a newer trainer writes the journal; this one must stop"
                ) from exc
            self._last_cut_sequence = published.sequence
            return published.sequence

    async def _skip_unreadable(self) -> bool:
        """Pass over what is no entry after the last one; say whether nothing else has come."""
        names = self._bus.names
        newer = await self._bus.read_log(names.outcomes_stream, names.cuts, start_sequence=self._last_cut_sequence + 1)
        for message in newer:
            if await self._bus.decode(message, Cut) is not None:
                return False
            self._last_cut_sequence = message.sequence
        return bool(newer)

    async def is_newest(self) -> bool:
        """Say whether the journal's last entry is this lineage's.

        If so, no newer one has begun, and one that begins later finds in the log all that was stored before this call.
        """
        names = self._bus.names
        last = await self._bus.get_last(names.outcomes_stream, names.cuts)
        entry = None if last is None else await self._bus.decode(last, Cut)
        return entry is not None and entry.lineage == self.number and await self._is_mine()

    async def announce(self, weights: WeightsVersion) -> None:
        """Make ``weights`` the newest, then tell everybody."""
        failpoint("trainer.before_announce")
        await self._write(self._bus.names.weights_key(), weights)
        await self._bus.emit(self._bus.names.weights, weights)
        await self._bus.publish_event(WeightsAnnounced(version=weights.version))
        failpoint("trainer.after_announce")

    async def hold_cards(self, hold: CardHold) -> None:
        """Say whether the trainer has the GPUs that it shares with servers."""
        await self._write(CARD, hold)

    async def record_checkpoint(self, checkpoint: CheckpointRecord, *, event: Event | None = None) -> None:
        """Make ``checkpoint`` the one a restart begins from. It must be on disk, whole and synced.

        Args:
            event: told of it, where it was not just written.
        """
        await self._write(CHECKPOINT, checkpoint)
        self.checkpoint = checkpoint
        await self._bus.publish_event(event or CheckpointWritten(version=checkpoint.version))

    async def _take_checkpoint(self) -> None:
        """Start from the newest checkpoint, and make it this lineage's to replace.

        Rewritten as it is (or as a record without a folder), so that an older trainer, which goes on until it
        notices, cannot record another one behind our back: its acks reach nothing any more, and what it trained
        after our checkpoint we train again.
        """
        while True:
            held, revision = await self._bus.get(CHECKPOINT, CheckpointRecord)
            mine = held or CheckpointRecord(version=str(Version(self.number, 0)), path="")
            try:
                self._revisions[CHECKPOINT] = await self._bus.compare_and_set(CHECKPOINT, mine, revision)
            except ConflictError:
                continue  # that older trainer was faster: its acks may have been too
            self.checkpoint = mine if mine.path else None
            return

    async def _take_weights(self) -> bool:
        """Have an older trainer, which goes on until it notices, announce nothing more and send to nobody.

        Say whether it has announced the run's last version.
        """
        key = self._bus.names.weights_key()
        while True:
            held, revision = await self._bus.get(key, WeightsVersion)
            if held is None:
                return False  # the very first version is the same from everyone
            kind = DISK if held.kind == DISTRIBUTED else held.kind
            mine = msgspec.structs.replace(held, kind=kind, group=None, buckets=[], taken_by=self.number)
            with suppress(ConflictError):  # that older trainer was faster
                self._revisions[key] = await self._bus.compare_and_set(key, mine, revision)
                return held.final

    async def _take_rollback(self) -> None:
        """Have the order that is due, which an older trainer can end no more.

        None is, once the run's last version is announced: those who see that end the run, and its next start takes it.
        """
        while True:
            held, revision = await self._bus.get(ROLLBACK, Rollback)
            mine = held or Rollback()
            try:
                self._revisions[ROLLBACK] = await self._bus.compare_and_set(ROLLBACK, mine, revision)
            except ConflictError:
                continue
            except DeniedError as exc:  # an external broker whose permissions are older than this
                log.warning("rollback.not_read", reason=str(exc))
                return
            self.rollback = mine if mine.is_due else None
            return

    async def _write(self, key: str, record: WeightsVersion | CheckpointRecord | CardHold) -> None:
        if key not in self._revisions:
            held, self._revisions[key] = await self._bus.get(key, type(record))
            if held is not None and Version.parse(held.version).lineage > self.number:
                raise FencedError(f"lineage {self.number}: {key} is at {held.version}; this trainer must stop")
        try:
            self._revisions[key] = await self._bus.compare_and_set(key, record, self._revisions[key])
        except ConflictError as exc:
            raise FencedError(f"lineage {self.number}: a newer trainer writes {key}; this one must stop") from exc


async def read_entry(bus: Bus, message: Message, journal: Journal, *, keeps_slots: bool = True) -> None:
    """Add an entry of the log, a cut or an outcome, to a journal; one that cannot be read becomes a dead letter."""
    entry = await bus.decode(message, Cut if message.subject == bus.names.cuts else Outcome)
    if isinstance(entry, Cut):
        journal.add_cut(entry if keeps_slots else without_slots(entry), sequence=message.sequence)
    elif isinstance(entry, Outcome):
        journal.add_outcome(entry)
