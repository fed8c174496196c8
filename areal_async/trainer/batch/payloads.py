"""One rank's shard of a cut: which slots are its own, and their payloads, fetched and verified.

The headers in the cut decide everything that ranks must agree on (shards, advantages, positions), so no
rank needs another's tokens. A payload is found by its stream sequence, which is a hint, and proved by id and
checksum; where the hint fails, the group's subject is searched. What it shows is in the stream of images, under the
hash of its bytes.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import anyio

from areal_async.bus import Bus
from areal_async.errors import WireError
from areal_async.process import side_threads
from areal_async.protocol.types import Cut, CutSlot, ImageRef, Slot, Trajectory, Version
from areal_async.protocol.wire import decode_headers, decode_slot, decode_trajectory, split_message
from areal_async.telemetry import spans, wait_graph
from areal_async.trainer.batch.limits import TrainingLimits
from areal_async.trainer.packing.flops import DecoderFlops
from areal_async.trainer.packing.pack import balance

FETCHES_AT_ONCE = 4
"""Each is one message of up to 9 MB, or a search of up to 15; the broker cuts off who leaves 128 MB unread."""
SlotKey = tuple[str, int]
"""Group id and sibling."""
GONE = "its stored payload is gone"
"""Why a slot is missing that is not refused: nobody can say whether it was trained."""
Check = Callable[[Trajectory], None]
"""Raises ``WireError`` for what cannot be trained (``limits``)."""
CheckImage = Callable[[ImageRef, bytes], None]
"""Raises ``WireError`` for a file that cannot be shown to the model; called in a thread beside the loop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSlot:
    """A slot of the cut at its position in the whole batch."""

    position: int
    group_id: str
    workflow: str
    item: CutSlot

    @property
    def header(self) -> Slot:
        """What is known of the trajectory without its tokens."""
        return self.item.slot

    @property
    def key(self) -> SlotKey:
        return self.group_id, self.header.sibling


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
    images: dict[str, bytes] = field(default_factory=dict)
    """SHA-256 -> each image that ``trajectories`` show, a PNG."""


class Fetched(NamedTuple):
    """Payloads of some slots."""

    trajectories: dict[int, Trajectory]
    """By position in the batch."""
    missing: dict[SlotKey, str]
    """Slots whose payload is gone, damaged or refused, each with why."""
    images: dict[str, bytes]
    """SHA-256 -> each image that the trajectories show, a PNG."""


def slots_of(cut: Cut) -> list[BatchSlot]:
    """Number the slots of a cut: groups in their order, siblings within."""
    pairs = [(group, item) for group in cut.groups for item in group.slots]
    return [
        BatchSlot(position=position, group_id=group.group_id, workflow=group.workflow, item=item)
        for position, (group, item) in enumerate(pairs)
    ]


def by_group(slots: Iterable[BatchSlot]) -> dict[str, list[BatchSlot]]:
    """Return the slots of each group, in their order."""
    groups: dict[str, list[BatchSlot]] = defaultdict(list)
    for slot in slots:
        groups[slot.group_id].append(slot)
    return groups


def shard_of(
    slots: Sequence[BatchSlot], *, rank: int, num_ranks: int, flops: DecoderFlops, num_minibatches: int = 1
) -> list[BatchSlot]:
    """Return this rank's slots, the same on every rank that asks.

    Each mini-batch is balanced over the ranks by itself, for they wait for each other in every update. A header knows
    no sequences: a trajectory of several counts as one of all their tokens, which overrates its attention.
    """
    mine: list[BatchSlot] = []
    for turn in range(num_minibatches):
        members = [slot for slot in slots if slot.position % num_minibatches == turn]
        costs = [flops.forward(one.header.num_tokens, one.header.num_output_tokens) for one in members]
        mine += [members[index] for index in balance(costs, num_ranks=num_ranks)[rank]]
    return sorted(mine, key=lambda slot: slot.position)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFetcher:
    """Fetches the cuts of one lineage, a shard of each."""

    bus: Bus
    limits: TrainingLimits
    own_slots: Callable[[Sequence[BatchSlot]], list[BatchSlot]]
    """Tells this rank's slots of a batch."""
    lineage: int

    async def fetch(self, cut: Cut, *, is_whole: bool = False) -> RankShard:
        """Fetch this rank's shard of a cut, or the whole of it."""
        slots = slots_of(cut)
        mine = slots if is_whole else self.own_slots(slots)
        with (
            wait_graph.on(wait_graph.BROKER, "the payloads, from", waiter=wait_graph.cut(cut.step)),
            spans.part_of_step(Version(self.lineage, cut.step), "fetch", num_slots=len(mine)),
        ):
            check = functools.partial(self.limits.check_trajectory, cut=cut, lineage=self.lineage)
            found = await fetch(self.bus, mine, check, self.limits.check_image)
        return RankShard(cut=cut, slots=slots, mine=mine, **found._asdict())


async def fetch(
    bus: Bus,
    slots: Sequence[BatchSlot],
    check: Check = lambda _: None,
    check_image: CheckImage = lambda _, __: None,
) -> Fetched:
    """Get and verify the payloads of some slots, and what they show."""
    by_message: dict[tuple[str, str, int], list[BatchSlot]] = defaultdict(list)
    for slot in slots:
        by_message[slot.group_id, slot.workflow, slot.item.sequence].append(slot)
    found: dict[int, Trajectory] = {}
    missing: dict[SlotKey, str] = {}
    limiter = anyio.CapacityLimiter(FETCHES_AT_ONCE)

    async def fetch_message(sequence: int, slots: list[BatchSlot]) -> None:
        async with limiter:
            message = await bus.get_message(bus.names.trajectories_stream, sequence)
            blobs: list[memoryview] = []
            if message is not None:
                with suppress(WireError):
                    blobs = split_message(message.data)
            for slot in slots:
                read = _read(blobs, slot.header, check) or await _search(bus, slot, check)
                if isinstance(read, str):
                    missing[slot.key] = read
                else:
                    found[slot.position] = read

    async with anyio.create_task_group() as fetching:
        for (_, _, sequence), same in by_message.items():
            fetching.start_soon(fetch_message, sequence, same)
    images, refused = await _fetch_images(bus, _shown(slots, found), check_image, limiter)
    for slot in slots:
        for image in found[slot.position].images.values() if slot.position in found else ():
            if (why := refused.get((slot.group_id, image))) is not None:
                missing[slot.key] = why
                del found[slot.position]
                break
    return Fetched(found, dict(sorted(missing.items())), images)


def _shown(slots: Sequence[BatchSlot], found: Mapping[int, Trajectory]) -> list[tuple[str, ImageRef]]:
    """Return the images of each group, each once."""
    shown = ((slot.group_id, found[slot.position]) for slot in slots if slot.position in found)
    return list(dict.fromkeys((group_id, image) for group_id, one in shown for image in one.images.values()))


async def _fetch_images(
    bus: Bus, shown: Iterable[tuple[str, ImageRef]], check: CheckImage, limiter: anyio.CapacityLimiter
) -> tuple[dict[str, bytes], dict[tuple[str, ImageRef], str]]:
    """Return the files of images by their hash, and which of a group cannot be shown to the model, with why."""
    files: dict[str, bytes] = {}
    refused: dict[tuple[str, ImageRef], str] = {}

    async def fetch_image(group_id: str, image: ImageRef) -> None:
        async with limiter:
            try:
                data = await bus.images.get(group_id, image)
                await side_threads.IMAGES.run(functools.partial(check, image, data))
                files[image.sha256] = data
            except WireError as exc:
                refused[group_id, image] = str(exc)

    async with anyio.create_task_group() as fetching:
        for group_id, image in shown:
            fetching.start_soon(fetch_image, group_id, image)
    return files, refused


def _read(blobs: Sequence[memoryview], slot: Slot, check: Check) -> Trajectory | None:
    try:
        trajectory = decode_slot(blobs, slot)
        check(trajectory)
    except WireError:
        return None  # of another group, where the hint is wrong; the search says which message is damaged
    return trajectory


async def _search(bus: Bus, wanted: BatchSlot, check: Check) -> Trajectory | str:
    """Return the payload that a slot's subject holds, or why there is none to be trained."""
    why = GONE
    subject = bus.names.trajectories(wanted.workflow, wanted.group_id)
    async for message in bus.find_messages(bus.names.trajectories_stream, subject):
        try:
            stored = decode_headers(message.headers, sequence=message.sequence, num_bytes=len(message.data))
        except WireError:
            continue  # rank 0's inbox makes it a dead letter
        for slot in stored.slots:
            if slot.sample_uid == wanted.header.sample_uid:
                try:
                    trajectory = decode_trajectory(message.data, slot)
                    check(trajectory)
                    return trajectory
                except WireError as exc:
                    why = str(exc)
                    await bus.dead_letter(message, why)
    return why
