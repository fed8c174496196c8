"""A credited reply is trained with its own advantage, one that is not named with none: from the cut to the engine."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from areal_async.algorithms.advantages import AdvantageRule
from areal_async.doctor.audit.files import read_archive
from areal_async.protocol.types import (
    Cut,
    CutGroup,
    CutSlot,
    ReplyReward,
    Sequence,
    Slot,
    SlotStatus,
    Trajectory,
    Version,
    mean,
)
from areal_async.trainer.batch.payloads import slots_of
from areal_async.trainer.batch.step import AgreedBatch, agree_on_batch, batch_metrics
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.packing.rows import TrainRow, pack_rows
from areal_async.trainer.shards import build_rows
from tests.unit.trainer.archives import archive_shard
from tests.unit.trainer.models import engine_of, parameters_differ

V = Version(1, 4).pack()
TURNS = [-1, 0, 0, -1, -1, 1, -1, 2, 2]
"""A prompt, a credited reply of two tokens, a user's turn and one reply nobody named, and two more credited ones."""
SAMPLED = [False, True, True, False, True, True, False, True, True]


def slot(sibling: int, *rewards: float, plain: float = 0.0) -> Slot:
    counts = [TURNS.count(number) for number in range(3)]
    credits = [ReplyReward(reward, count) for reward, count in zip(rewards, counts, strict=False)]
    return Slot(
        sibling=sibling, sample_uid=str(sibling), status=SlotStatus.SCORED, num_tokens=len(TURNS),
        reward=mean(list(rewards)) if rewards else plain, num_output_tokens=sum(SAMPLED), oldest="1-4", newest="1-4",
        credits=credits,
    )  # fmt: skip


def trajectory(one: Slot) -> Trajectory:
    turns = np.array(TURNS, dtype=np.int16)
    sequence = Sequence(
        token_ids=np.arange(len(TURNS), dtype=np.int32) + 3,
        loss_mask=np.array(SAMPLED),
        logprobs=np.where(SAMPLED, -1.0, 0.0).astype(np.float32),
        versions=np.where(SAMPLED, V, -1).astype(np.int64),
        turns=np.where(turns < len(one.credits), turns, -1).astype(np.int16) if one.credits else None,
    )
    return Trajectory(slot=one, sequences=[sequence])


def cut_of(*slots: Slot) -> Cut:
    group = CutGroup(group_id="0-0-0", workflow="w", slots=[CutSlot(slot=one, sequence=1) for one in slots])
    return Cut(lineage=1, step=5, groups=[group])


def rows_of(*slots: Slot) -> tuple[list[TrainRow], dict[str, float | int | str]]:
    batch = agree_on_batch(slots_of(cut_of(*slots)), [], AdvantageRule(std="none"))
    rows, ages = build_rows(
        {number: trajectory(one) for number, one in enumerate(slots)},
        advantages=batch.advantages,
        cut=cut_of(*slots),
        start=Version(1, 4),
        temperature=1.0,
    )
    assert ages.num_uncredited == sum(
        sum(SAMPLED) - sum(credit.num_tokens for credit in one.credits) for one in slots if one.credits
    )
    return rows, batch_metrics(batch, [])


def test_every_token_carries_the_advantage_of_its_reply_and_uncredited_ones_are_not_trained() -> None:
    rows, line = rows_of(slot(0, 3.0, 1.0, 0.0), slot(1, 0.0))

    # Returns 3, 1, 0 and 0: their mean is 1.
    assert np.asarray(rows[0].advantage).tolist() == [0, 2, 2, 0, 0, 0, 0, -1, -1]
    assert rows[0].loss_mask.tolist() == [False, True, True, False, False, True, False, True, True]
    assert np.asarray(rows[1].advantage).tolist() == [0, -1, -1, 0, 0, 0, 0, 0, 0]
    assert rows[1].loss_mask.tolist() == [False, True, True, *[False] * 6]
    assert (line["reward_mean"], line["groups_all_equal"]) == (pytest.approx(2 / 3), 0)


def test_a_group_that_returns_one_number_each_is_trained_as_ever() -> None:
    rows, line = rows_of(slot(0, plain=1.0), slot(1, plain=0.0))

    assert [row.advantage for row in rows] == [0.5, -0.5]
    assert [row.loss_mask.tolist() for row in rows] == [SAMPLED, SAMPLED]
    assert line["groups_all_equal"] == 0


def test_replies_that_differ_make_a_group_of_equal_means_worth_training() -> None:
    _, line = rows_of(slot(0, 0.0, 1.0), slot(1, 1.0, 0.0))

    assert line["groups_all_equal"] == 0


def test_what_a_sequence_ratio_is_taken_of_is_the_credited_reply() -> None:
    (credited, _), _ = rows_of(slot(0, 3.0, 1.0, 0.0), slot(1, 0.0))
    (plain, _), _ = rows_of(slot(0, plain=1.0), slot(1, plain=0.0))

    packed = pack_rows([plain, credited, plain], torch.device("cpu"))

    assert packed.sequence_S.tolist() == [0] * 6 + [1, 1, 2, 3, 3] + [4] * 6


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_pp", "gspo", "cispo", "sapo", "m2po", "icepop"])
def test_an_uncredited_reply_is_read_and_never_learned(name: str, model: Path, ranks: Ranks) -> None:
    """Its gradient is exactly that of a trajectory in which it stood in the prompt."""
    (credited, other), _ = rows_of(slot(0, 3.0, 1.0, 0.0), slot(1, 0.0))
    asked = replace(credited, current_mask=credited.loss_mask)  # the engine may look at nothing else of the reply
    garbled = replace(credited, behave_logprobs=np.where(credited.loss_mask, credited.behave_logprobs, 7.0))
    engines = [engine_of(model, ranks, algorithm={"name": name}, lr=1e-2) for _ in range(3)]

    stats = [
        engine.train_step([row, other], step=1, total_steps=1)
        for engine, row in zip(engines, (credited, asked, garbled), strict=True)
    ]

    assert stats[0].num_tokens == 7
    assert parameters_differ(engines[0], engines[1]) == parameters_differ(engines[0], engines[2]) == 0


def test_credits_come_back_from_the_archive_reply_by_reply(tmp_path: Path) -> None:
    slots = [slot(0, 3.0, 1.0, 0.0), slot(1, plain=1.0)]
    batch = agree_on_batch(slots_of(cut_of(*slots)), [], AdvantageRule(std="none"))
    trajectories = {number: trajectory(one) for number, one in enumerate(slots)}

    rows, _ = rows_of(*slots)

    archive(tmp_path, batch, trajectories, rows)

    (first, second), unreadable = read_archive(tmp_path)
    assert (first.credits, first.advantages, unreadable) == (tuple(slots[0].credits), (1.75, -0.25, -1.25), [])
    assert (second.credits, second.advantages) == ((), (-0.25,))
    (path,) = tmp_path.glob("*.parquet")
    assert pq.read_table(path).column("turns").to_pylist() == [[TURNS], None]


def test_the_archive_holds_what_was_trained_where_rewards_do_not_say_it(tmp_path: Path) -> None:
    slots = [slot(0, 3.0, 1.0, 0.0), slot(1, plain=1.0), slot(2, plain=1.0)]
    batch = agree_on_batch(slots_of(cut_of(*slots)), [], AdvantageRule(std="none"))
    trajectories = {number: trajectory(one) for number, one in enumerate(slots)}
    rows, _ = rows_of(*slots)
    tokens = np.arange(len(TURNS), dtype=np.float32)
    masked = np.where(np.arange(len(TURNS)) < 5, rows[1].loss_mask, False)
    trained = [
        replace(rows[0], advantage=tokens),
        replace(rows[1], advantage=tokens, loss_mask=masked),
        replace(rows[2], advantage=0.5, loss_mask=np.zeros_like(masked)),
    ]

    archive(tmp_path, batch, trajectories, trained)

    (credited, plain, untrained), _ = read_archive(tmp_path)
    # Replies are at places 1 and 2, 5, 7 and 8.
    assert credited.advantages == (1.5, 5.0, 7.5)
    assert (credited.advantage, credited.by_token) == (23 / 5, (23.0, 1.0 + 4 + 25 + 49 + 64, 5))
    assert (plain.advantage, plain.by_token) == ((1 + 2 + 4) / 3, (7.0, 21.0, 3))
    assert (untrained.advantage, untrained.by_token) == (0.5, (0.0, 0.0, 0))
    (path,) = tmp_path.glob("*.parquet")
    assert pq.read_table(path).column("advantages").to_pylist()[1] == [
        [None, 1.0, 2.0, None, 4.0, None, None, None, None]
    ]


def archive(directory: Path, batch: AgreedBatch, trajectories: dict[int, Trajectory], rows: Iterable[TrainRow]) -> None:
    archive_shard(
        directory, made=Version(1, 5), cut=Cut(lineage=1, step=5, max_staleness=2), slots=batch.slots,
        trajectories=trajectories,
        advantages=batch.advantages, rows=list(rows),
    )  # fmt: skip
