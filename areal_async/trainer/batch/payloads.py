"""One rank's share of a cut: which slots are its own, their payloads fetched and verified, and the rows made of them.

The headers in the cut decide everything that ranks must agree on (shares, advantages, positions), so no
rank needs another's tokens. A payload is found by its stream sequence, which is a hint, and proved by id and
checksum; where the hint fails, the group's subject is searched.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import anyio
import msgspec
import numpy as np
from numpy.typing import NDArray

from areal_async.algorithms.advantages import spread_over_tokens
from areal_async.bus import Bus
from areal_async.errors import StalenessError, WireError
from areal_async.protocol.types import NOT_CREDITED, Cut, CutSlot, Slot, Trajectory, Version
from areal_async.protocol.wire import decode_headers, decode_slot, decode_trajectory, split_message
from areal_async.trainer.packing.flops import DecoderFlops
from areal_async.trainer.packing.pack import balance
from areal_async.trainer.packing.rows import TrainRow

FETCHES_AT_ONCE = 4
"""Each is one message of up to 9 MB, or a search of up to 17; the broker cuts off who leaves 128 MB unread."""
_STEP_BITS = 0xFFFFFFFF
"""Of a packed version. Versions are compared by step: a replayed step stands in for the lost one."""

SlotKey = tuple[str, int]
"""Group id and sibling."""
GONE = "its stored payload is gone"
"""Why a slot is missing that is not refused: nobody can say whether it was trained."""
Check = Callable[[Trajectory], None]
"""Raises ``WireError`` for what cannot be trained (``limits``)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSlot:
    """A slot of the cut at its position in the whole batch."""

    position: int
    group_id: str
    workflow: str
    item: CutSlot

    @property
    def key(self) -> SlotKey:
        return self.group_id, self.item.slot.sibling


class AgeStats(msgspec.Struct):
    """Ages of the trained tokens of some rows, and what they were sampled at."""

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
    """Sum of theirs."""
    num_steered: int = 0
    """Trained tokens whose logprob is not of the model's own distribution (``Sequence.steered``)."""


def place(cut: Cut) -> list[BatchSlot]:
    """Number the slots of a cut: groups in their order, siblings within."""
    pairs = [(group, item) for group in cut.groups for item in group.slots]
    return [
        BatchSlot(position=position, group_id=group.group_id, workflow=group.workflow, item=item)
        for position, (group, item) in enumerate(pairs)
    ]


def share(
    slots: Sequence[BatchSlot], *, rank: int, num_ranks: int, flops: DecoderFlops, num_minibatches: int = 1
) -> list[BatchSlot]:
    """Return this rank's slots, the same on every rank that asks.

    Each mini-batch is balanced over the ranks by itself, for they wait for each other in every update. A header knows
    no sequences: a trajectory of several counts as one of all their tokens, which overrates its attention.
    """
    mine: list[BatchSlot] = []
    for turn in range(num_minibatches):
        members = [placed for placed in slots if placed.position % num_minibatches == turn]
        costs = [flops.forward(one.item.slot.num_tokens, one.item.slot.num_output_tokens) for one in members]
        mine += [members[index] for index in balance(costs, num_ranks=num_ranks)[rank]]
    return sorted(mine, key=lambda placed: placed.position)


async def fetch(
    bus: Bus, slots: Sequence[BatchSlot], check: Check = lambda _: None
) -> tuple[dict[int, Trajectory], dict[SlotKey, str]]:
    """Get and verify the payloads of some slots.

    Returns:
        Trajectories by position, and the slots whose payload is gone, damaged or refused by ``check``, each with why.
    """
    by_message: dict[tuple[str, str, int], list[BatchSlot]] = defaultdict(list)
    for placed in slots:
        by_message[placed.group_id, placed.workflow, placed.item.sequence].append(placed)
    found: dict[int, Trajectory] = {}
    missing: dict[SlotKey, str] = {}
    limiter = anyio.CapacityLimiter(FETCHES_AT_ONCE)

    async def fetch_message(sequence: int, wanted: list[BatchSlot]) -> None:
        async with limiter:
            message = await bus.get_message(bus.names.trajectories_stream, sequence)
            blobs = _split(message.data) if message else []
            for placed in wanted:
                read = _read(blobs, placed.item.slot, check) or await _search(bus, placed, check)
                if isinstance(read, str):
                    missing[placed.key] = read
                else:
                    found[placed.position] = read

    async with anyio.create_task_group() as fetching:
        for (_, _, sequence), wanted in by_message.items():
            fetching.start_soon(fetch_message, sequence, wanted)
    return found, dict(sorted(missing.items()))


def _split(payload: bytes) -> list[memoryview]:
    try:
        return split_message(payload)
    except WireError:
        return []


def _read(blobs: Sequence[memoryview], slot: Slot, check: Check) -> Trajectory | None:
    try:
        trajectory = decode_slot(blobs, slot)
        check(trajectory)
    except WireError:
        return None  # of another group, where the hint is wrong; the search says which message is damaged
    return trajectory


async def _search(bus: Bus, placed: BatchSlot, check: Check) -> Trajectory | str:
    """Return the payload that a slot's subject holds, or why there is none to be trained."""
    why = GONE
    subject = bus.names.trajectories(placed.workflow, placed.group_id)
    async for message in bus.find_messages(bus.names.trajectories_stream, subject):
        try:
            stored = decode_headers(message.headers, sequence=message.sequence, num_bytes=len(message.data))
        except WireError:
            continue  # rank 0's inbox makes it a dead letter
        for slot in stored.slots:
            if slot.sample_uid == placed.item.slot.sample_uid:
                try:
                    trajectory = decode_trajectory(message.data, slot)
                    check(trajectory)
                    return trajectory
                except WireError as exc:
                    why = str(exc)
                    await bus.dead_letter(message, why)
    return why


def build_rows(
    trajectories: Mapping[int, Trajectory],
    *,
    advantages: Mapping[int, NDArray[np.float32]],
    start: Version,
    age: Callable[[Version], int],
    max_staleness: int,
    masks_stale: bool,
    temperature: float,
) -> tuple[list[TrainRow], AgeStats]:
    """Turn trajectories into rows, and prove their freshness: the third guard, *assert*.

    Args:
        trajectories: by position in the batch.
        advantages: by the same; of each credited reply, or the one of a trajectory without credits.
        start: the version the step starts from.
        age: in the step that runs now.
        masks_stale: take over-age tokens out of the loss and count them, instead of refusing them.
        temperature: of the run, where a token does not know its own.

    Raises:
        StalenessError: a token over the bound would be trained.
    """
    rows, stats = [], AgeStats()
    for position, trajectory in sorted(trajectories.items()):
        for sequence in trajectory.sequences:
            packed, inverse = np.unique(sequence.versions, return_inverse=True)
            ages_by_version = np.array([age(Version.unpack(int(one))) if one >= 0 else 0 for one in packed])
            ages_L = ages_by_version[inverse]
            is_fresh_L = ages_L <= max_staleness
            credited_L = sequence.loss_mask if sequence.turns is None else sequence.turns != NOT_CREDITED
            mask_L = credited_L & is_fresh_L
            num_stale = int((credited_L & ~is_fresh_L).sum())
            if num_stale and not masks_stale:
                raise StalenessError(
                    f"trajectory {trajectory.slot.sample_uid}: got {num_stale} tokens of age up to {ages_L.max()}, "
                    f"need at most {max_staleness}; the cut let them through"
                )
            stats.num_masked += num_stale
            stats.num_uncredited += int((sequence.loss_mask & ~credited_L).sum())
            stats.num_tokens += int(mask_L.sum())
            stats.total += int(ages_L[mask_L].sum())
            stats.max = max(stats.max, int(ages_L[mask_L].max(initial=0)))
            tempered = temperature if sequence.temperatures is None else sequence.temperatures
            stats.temperatures += float(np.broadcast_to(tempered, mask_L.shape)[mask_L].sum(dtype=np.float64))
            steered_L = np.zeros_like(mask_L) if sequence.steered is None else sequence.steered
            stats.num_steered += int((mask_L & steered_L).sum())
            for one, count in zip(*np.unique(ages_L[mask_L], return_counts=True), strict=True):
                stats.by_age[int(one)] = stats.by_age.get(int(one), 0) + int(count)
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
                    index=position,
                )
            )
    return rows, stats


def _laid_out(values_K: NDArray[np.float32], turns_L: NDArray[np.int16] | None) -> float | NDArray[np.float32]:
    return float(values_K[0]) if turns_L is None else spread_over_tokens(values_K, turns_L)
