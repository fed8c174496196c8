"""Gathering the evidence from a broker and a run directory, in an order that is sound while the run goes on.

Each thing is read after what it must account for: receipts, then what is still stored, then the log. So a message
that was acknowledged before the first look and is gone at the second has its outcome by the third, and what was
trained after the archive was read is in nobody's records. Payloads are looked at one by one and not kept.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import anyio.to_thread

from areal_async.bus import Bus, Message
from areal_async.doctor.audit.files import read_archive, read_ledger
from areal_async.doctor.audit.run_record import Rules, RunRecord, StoredSlot
from areal_async.doctor.audit.versions import find_faults
from areal_async.errors import StoredImageError, WireError
from areal_async.launch.lost import state_of
from areal_async.launch.orders import pending_rollback
from areal_async.process.json_lines import read_json_lines
from areal_async.protocol.publish_log import Receipt, decode_stamp, read_receipts
from areal_async.protocol.run_state import Rollback, RunState
from areal_async.protocol.subjects import ADMITTED, ROLLBACK, RUN_STATE
from areal_async.protocol.types import Admitted, Cut, ImageRef, Outcome, Record, Slot, SlotStatus, StoredMessage, Ticket
from areal_async.protocol.wire import decode, decode_headers, decode_trajectory
from areal_async.trainer.engine.digests import find_damage, set_aside_in

R = TypeVar("R", bound=Record)


async def gather(bus: Bus, run_directory: Path, rules: Rules, *, is_live: bool) -> RunRecord:
    """Read all that there is."""
    evidence = RunRecord(rules=rules, is_live=is_live)
    reader = _Reader(bus, evidence)
    evidence.produced = read_receipts(run_directory)
    await reader.check_streams()
    evidence.admitted = await reader.get(ADMITTED, Admitted) or Admitted()
    state = await reader.get(RUN_STATE, RunState)
    evidence.is_finished = state is not None and state.state == "finished"
    names = bus.names
    rollback = await reader.get(ROLLBACK, Rollback)
    if pending := pending_rollback(rollback, names.run, is_live=is_live):
        evidence.notes.append(pending)
    tickets = await reader.read(names.tickets_stream, names.all_tickets, Ticket)
    evidence.tickets = {ticket.group_id for ticket in tickets}
    evidence.num_entries_before_messages = len(await reader.read_log())
    await reader.read_trajectories()
    evidence.metrics = read_json_lines(run_directory / "metrics.jsonl")
    evidence.ledger, unreadable = read_ledger(run_directory / "checkpoints")
    # In threads: every byte of them, and of images, is read, and a live run's broker has to be answered meanwhile.
    evidence.damaged_checkpoints = await anyio.to_thread.run_sync(find_damage, run_directory / "checkpoints")
    evidence.notes += [f"checkpoint {name}: was set aside" for name in set_aside_in(run_directory / "checkpoints")]
    evidence.archive, more = await anyio.to_thread.run_sync(read_archive, run_directory / "trajectories")
    evidence.unreadable_files = unreadable + more
    evidence.log = await reader.read_log()
    evidence.dead_letters = await reader.read(names.dead_stream, names.dead_groups, Outcome)
    evidence.admitted_last = await reader.get(ADMITTED, Admitted) or Admitted()
    return evidence


class _Reader:
    """Fills the evidence from the broker."""

    def __init__(self, bus: Bus, evidence: RunRecord) -> None:
        self._bus = bus
        self._evidence = evidence
        self._absent: set[str] = set()
        self._image_damage: dict[tuple[str, ImageRef], str] = {}
        """What is wrong with the images that were looked at, each once for its group; empty for nothing."""

    async def check_streams(self) -> None:
        """Find out which streams there are: one whose files are destroyed is not there at all."""
        names = self._bus.names
        for stream in (
            names.tickets_stream, names.trajectories_stream, names.outcomes_stream, names.dead_stream,
            f"KV_{names.bucket}",
        ):  # fmt: skip
            if await state_of(self._bus, stream) is None:
                self._absent.add(stream)
                self._evidence.absent_streams.append(f"stream {stream}: the broker does not have it")
        if await state_of(self._bus, names.images_stream) is None:  # as in runs of earlier versions
            self._absent.add(names.images_stream)

    async def get(self, key: str, kind: type[R]) -> R | None:
        """Return the record under a key of the run; None where there is none, or no bucket."""
        if f"KV_{self._bus.names.bucket}" in self._absent:
            return None
        record, _ = await self._bus.get(key, kind)
        return record

    async def read(self, stream: str, subject: str, kind: type[R]) -> list[R]:
        """Return the records of one kind that a stream has; none where there is no such stream."""
        return self._decoded(await self._messages(stream, subject), kind)

    async def read_log(self) -> list[Cut | Outcome]:
        names = self._bus.names
        entries: list[Cut | Outcome] = []
        for message in await self._messages(names.outcomes_stream, names.log):
            entries += self._decoded([message], Cut if message.subject == names.cuts else Outcome)
        return entries

    async def read_trajectories(self) -> None:
        stream = self._bus.names.trajectories_stream
        if stream in self._absent:
            return
        receipts = {
            (producer, receipt.number): receipt
            for producer, produced in self._evidence.produced.items()
            for receipt in produced.receipts
        }
        num_read = 0
        async for message in self._bus.find_messages(stream, ">"):
            await self._add(message, receipts)
            num_read += 1
        num_counted = (await self._bus.stream_state(stream)).num_messages
        if not self._evidence.is_live and num_counted != num_read:
            self._evidence.notes.append(
                f"stream {stream}: the broker counts {num_counted} messages, and {num_read} can be read"
            )

    async def _add(self, message: Message, receipts: Mapping[tuple[str, int], Receipt]) -> None:
        try:
            stored = decode_headers(message.headers, sequence=message.sequence, num_bytes=len(message.data))
            stamp = decode_stamp(message.headers)
        except WireError as exc:
            self._evidence.unreadable_messages.append(str(exc))
            return
        if stamp is not None:
            self._evidence.stamps.append(stamp)
        receipt = receipts.get((stamp.producer, stamp.number)) if stamp else None
        for slot in stored.slots:
            self._evidence.stored.append(await self._stored_slot(message.data, stored, slot, _damage(slot, receipt)))

    async def _stored_slot(self, payload: bytes, stored: StoredMessage, slot: Slot, damage: str) -> StoredSlot:
        faults: tuple[str, ...] = ()
        try:
            trajectory = decode_trajectory(payload, slot)
        except WireError as exc:
            damage = damage or str(exc)
        else:
            if slot.status is SlotStatus.SCORED:
                faults = find_faults(trajectory.sequences, oldest=slot.oldest, newest=slot.newest)
            for image in sorted(trajectory.images.values(), key=lambda one: one.sha256):
                damage = damage or await self._damage_of(stored.group_id, image)
        return StoredSlot(
            group_id=stored.group_id,
            sibling=slot.sibling,
            sample_uid=slot.sample_uid,
            damage=damage,
            token_faults=faults,
        )

    async def _damage_of(self, group_id: str, image: ImageRef) -> str:
        """Return what is wrong with a stored image that a trajectory looks at; empty for nothing."""
        if self._bus.names.images_stream in self._absent:
            return f"image {image.sha256}: the broker does not have stream {self._bus.names.images_stream}"
        if (group_id, image) not in self._image_damage:
            self._image_damage[group_id, image] = ""
            try:
                await self._bus.images.get(group_id, image)
            except StoredImageError as exc:
                self._image_damage[group_id, image] = str(exc)
        return self._image_damage[group_id, image]

    async def _messages(self, stream: str, subject: str) -> list[Message]:
        return [] if stream in self._absent else await self._bus.read_log(stream, subject)

    def _decoded(self, messages: Iterable[Message], kind: type[R]) -> list[R]:
        """Return the records; a message that holds none is passed over, as every reader does, and noted."""
        records = []
        for message in messages:
            try:
                records.append(decode(message.data, kind))
            except WireError as exc:
                note = f"{message.stream}: a message on {message.subject} cannot be read: {exc}"
                if note not in self._evidence.notes:
                    self._evidence.notes.append(note)
        return records


def _damage(slot: Slot, receipt: Receipt | None) -> str:
    """Compare a slot's header, by which its payload is then verified, with what its producer noted of it."""
    if receipt is None:
        return ""
    for noted in receipt.slots:
        if (noted.sibling, noted.sample_uid) == (slot.sibling, slot.sample_uid):
            if noted.crc32 == slot.crc32:
                return ""
            return f"its header has checksum {slot.crc32}, its producer noted {noted.crc32}"
    return f"message {receipt.number} of its producer did not hold it"
