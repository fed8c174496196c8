"""What a producer of trajectories knows to be stored, kept apart from the broker: so that a loss there shows.

A producer is one node process. It numbers its messages 1, 2, 3, ... and each message tells its number and how far
that producer's are all acknowledged (``ProducerSequence``). After each acknowledgement it adds one line to its own
file in the run directory, ``produced/<producer>.jsonl`` (``Receipt``). The line is written before the ticket is acked,
and survives the end of the process, however it ends.
"""

import os
import secrets
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from areal_async.errors import WireError
from areal_async.protocol.fields import Count, GroupIdText
from areal_async.protocol.types import Record, Slot
from areal_async.protocol.wire import decode_json

FOLDER = "produced"
STAMP_HEADER = "Areal-Producer"

log = structlog.get_logger()


class ProducerSequence(Record, frozen=True, kw_only=True):
    """A header of every trajectory message: who sent it, and its place among what that producer sent."""

    producer: str
    number: Count
    """Number of the message in its producer's sequence, from 1."""
    num_acknowledged: Count
    """This producer's messages 1 to this one were all acknowledged when this one was made."""


class ReceivedSlot(Record, frozen=True, kw_only=True):
    """A slot of an acknowledged message."""

    sibling: Count
    sample_uid: str
    crc32: Count
    """CRC-32 of its payload."""


class Receipt(Record, frozen=True, kw_only=True):
    """One acknowledged message."""

    number: Count
    group_id: GroupIdText
    slots: list[ReceivedSlot]


class PublishLog:
    """One producer's counter and its file. Made once per process."""

    def __init__(self, directory: Path, node_id: str) -> None:
        """``directory``: of the run."""
        self.producer = f"{node_id}.{secrets.token_hex(4)}"
        self._path = directory.absolute() / FOLDER / f"{self.producer}.jsonl"
        self._is_writable = True
        self._num_made = 0
        self._unacknowledged: set[int] = set()

    def stamp(self) -> ProducerSequence:
        """Number one more message, which is about to be sent."""
        self._num_made += 1
        self._unacknowledged.add(self._num_made)
        return ProducerSequence(
            producer=self.producer, number=self._num_made, num_acknowledged=min(self._unacknowledged) - 1
        )

    def acknowledge(self, stamp: ProducerSequence, *, group_id: str, slots: Sequence[Slot]) -> None:
        """Note that the broker has stored the message with these slots, whose checksums are filled in.

        A file that cannot be written is told of once and never holds up a rollout: the stamps still count.
        """
        self._unacknowledged.discard(stamp.number)
        receipt = Receipt(
            number=stamp.number,
            group_id=group_id,
            slots=[ReceivedSlot(sibling=one.sibling, sample_uid=one.sample_uid, crc32=one.crc32) for one in slots],
        )
        if not self._is_writable:
            return
        try:
            os.write(self._descriptor, msgspec.json.encode(receipt) + b"\n")
        except OSError as exc:
            self._is_writable = False
            log.warning("receipts.unwritable", path=str(self._path), error=str(exc))

    @cached_property
    def _descriptor(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        weakref.finalize(self, os.close, descriptor)
        return descriptor


class Produced(NamedTuple):
    """What one producer's file says."""

    receipts: list[Receipt]
    num_damaged: int
    """Lines that cannot be read; one that its writer's death cut short is none of them."""


def encode_stamp(stamp: ProducerSequence) -> str:
    """Return the header's value."""
    return msgspec.json.encode(stamp).decode("ascii")


def decode_stamp(headers: Mapping[str, str]) -> ProducerSequence | None:
    """Read a message's stamp; None when it has none.

    Raises:
        WireError: it does not fit.
    """
    text = headers.get(STAMP_HEADER)
    return None if text is None else decode_json(text, ProducerSequence, what=f"header {STAMP_HEADER}")


def read_receipts(directory: Path) -> dict[str, Produced]:
    """Return what every producer of a run has noted, by producer."""
    return {path.stem: _read(path) for path in sorted((directory / FOLDER).glob("*.jsonl"))}


def _read(path: Path) -> Produced:
    receipts, num_damaged = [], 0
    data = path.read_bytes()
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        try:
            receipts.append(decode_json(line, Receipt, what=path.name))
        except WireError:
            num_damaged += 1
    return Produced(receipts, num_damaged)
