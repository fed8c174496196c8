"""From a workflow that credits one of its replies to the weights: the other reply is read and never learned."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from areal_async.algorithms.advantages import AdvantageRule
from areal_async.protocol.types import Cut, CutGroup, CutSlot, Ticket, Trajectory, Version
from areal_async.protocol.wire import decode_headers, decode_trajectory, encode_message
from areal_async.trainer.batch.payloads import slots_of
from areal_async.trainer.batch.step import agree_on_batch
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.packing.rows import TrainRow
from areal_async.trainer.shards import build_rows
from tests.unit.rollout.rewards.test_reply_rewards import play
from tests.unit.trainer.models import engine_of, parameters_differ

pytestmark = pytest.mark.anyio


async def test_a_reply_without_credit_gets_no_gradient_from_the_workflow_to_the_engine(
    model: Path, ranks: Ranks
) -> None:
    """The step is, to the last bit, the one of a conversation in which that reply stood in the prompt."""

    def only_second(value: float) -> Any:
        return lambda first, second: {second: value}

    credited = [await play(only_second(1.0)), await play(only_second(0.0), sibling=1)]
    whole = [await play(lambda first, second: 1.0), await play(lambda first, second: 0.0, sibling=1)]
    told = [_with_first_reply_in_the_prompt(one) for one in whole]
    engines = [engine_of(model, ranks, algorithm={"name": "rloo"}) for _ in range(3)]

    stats = [
        engine.train_step(_rows(trajectories), step=1, total_steps=1)
        for engine, trajectories in zip(engines, (credited, told, whole), strict=True)
    ]

    assert [one.num_tokens for one in stats] == [4, 4, 10]
    assert parameters_differ(engines[0], engines[1]) == 0
    assert parameters_differ(engines[0], engines[2]) > 0


def _with_first_reply_in_the_prompt(one: Trajectory) -> Trajectory:
    (sequence,) = one.sequences
    said = np.arange(9) < 7
    changed = msgspec.structs.replace(
        sequence,
        loss_mask=sequence.loss_mask & ~said,
        versions=np.where(said, -1, sequence.versions),
        logprobs=np.where(said, 0, sequence.logprobs).astype(np.float32),
    )
    return Trajectory(slot=one.slot, sequences=[changed])


def _rows(trajectories: list[Trajectory]) -> list[TrainRow]:
    """Over the wire and through the cut, as in a run."""
    payload, headers, _ = encode_message(
        trajectories, Ticket(row={}, group_id="0-0-0", workflow="w", version="1-0", group_size=2)
    )
    slots = decode_headers(headers, sequence=1, num_bytes=len(payload)).slots
    group = CutGroup(group_id="0-0-0", workflow="w", slots=[CutSlot(slot=one, sequence=1) for one in slots])
    cut = Cut(lineage=1, step=1, groups=[group])
    placed = slots_of(cut)
    batch = agree_on_batch(placed, [], AdvantageRule(baseline="leave_one_out", std="none"), min_size=lambda _: 2)
    received = {one.position: decode_trajectory(payload, one.item.slot) for one in placed}
    rows, _ = build_rows(
        received,
        advantages=batch.advantages,
        cut=cut,
        start=Version(1, 0),
        temperature=1.0,
    )
    return rows
