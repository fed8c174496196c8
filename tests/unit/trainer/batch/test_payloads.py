"""Ranks share a cut without overlap, and no token over the bound becomes a row."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.algorithms.advantages import AdvantageRule
from areal_async.errors import StalenessError
from areal_async.protocol.types import Cut, CutGroup, CutSlot, Sequence, Slot, SlotStatus, Trajectory, Version
from areal_async.trainer.batch.payloads import BatchSlot, shard_of, slots_of
from areal_async.trainer.batch.step import AgeStats, ShardStats, add_up_info, agree_on_batch, batch_metrics
from areal_async.trainer.packing.flops import DecoderFlops
from areal_async.trainer.packing.rows import TrainRow
from areal_async.trainer.shards import build_rows

FLOPS = DecoderFlops(per_token=100, per_scored_token=10, per_pair=2)


def _slot(sibling: int, *, reward: float = 0.0, num_tokens: int = 4) -> Slot:
    return Slot(
        sibling=sibling,
        sample_uid=str(sibling),
        status=SlotStatus.SCORED,
        reward=reward,
        num_tokens=num_tokens,
        oldest="1-0",
        newest="1-0",
    )


def _cut(*groups: list[float]) -> Cut:
    return Cut(
        lineage=1,
        step=1,
        groups=[
            CutGroup(
                group_id=f"0-{index}-0",
                workflow="w",
                slots=[CutSlot(slot=_slot(sibling, reward=one), sequence=1) for sibling, one in enumerate(rewards)],
            )
            for index, rewards in enumerate(groups)
        ],
    )


def _cut_of_lengths(lengths: list[int]) -> Cut:
    slots = [CutSlot(slot=_slot(i, num_tokens=length), sequence=1) for i, length in enumerate(lengths)]
    return Cut(lineage=1, step=1, groups=[CutGroup(group_id="0-0-0", workflow="w", slots=slots)])


@given(st.lists(st.integers(1, 500), min_size=1, max_size=20), st.integers(1, 4), st.integers(1, 3))
def test_every_slot_is_exactly_one_ranks_and_each_mini_batch_is_balanced(
    lengths: list[int], num_ranks: int, num_minibatches: int
) -> None:
    slots = slots_of(_cut_of_lengths(lengths))

    parts = [
        shard_of(slots, rank=rank, num_ranks=num_ranks, flops=FLOPS, num_minibatches=num_minibatches)
        for rank in range(num_ranks)
    ]

    assert sorted(placed.position for part in parts for placed in part) == list(range(len(lengths)))
    for turn in range(num_minibatches):
        costs = [[_cost(one) for one in part if one.position % num_minibatches == turn] for part in parts]
        loads = [sum(own) for own in costs]
        assert max(loads) - min(loads) <= max((max(own) for own in costs if own), default=0)


def test_a_long_trajectory_weighs_more_than_its_tokens() -> None:
    slots = slots_of(_cut_of_lengths([512, *[64] * 16]))
    linear = DecoderFlops(per_token=1, per_scored_token=0, per_pair=0)

    ways = [[shard_of(slots, rank=rank, num_ranks=2, flops=flops) for rank in range(2)] for flops in (FLOPS, linear)]

    by_cost, by_tokens = (sorted(len(part) for part in parts) for parts in ways)
    assert by_cost == [1, 16]  # the long one alone
    assert by_tokens == [5, 12]


def _cost(placed: BatchSlot) -> int:
    return FLOPS.forward(placed.item.slot.num_tokens, placed.item.slot.num_output_tokens)


def _rows(
    versions: list[int],
    *,
    masks: bool = False,
    temperatures: list[float] | None = None,
    steered: list[bool] | None = None,
) -> tuple[list[TrainRow], AgeStats]:
    length = len(versions)
    sequence = Sequence(
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=np.array([version >= 0 for version in versions]),
        logprobs=np.zeros(length, dtype=np.float32),
        versions=np.array([Version(1, one).pack() if one >= 0 else -1 for one in versions], dtype=np.int64),
        temperatures=None if temperatures is None else np.array(temperatures, dtype=np.float32),
        steered=None if steered is None else np.array(steered),
    )
    return build_rows(
        {0: Trajectory(slot=_slot(0), sequences=[sequence])},
        advantages={0: np.ones(1, dtype=np.float32)},
        cut=Cut(lineage=1, step=5, max_staleness=2, masks_stale=masks),
        start=Version(1, 4),
        temperature=0.75,
    )


def test_a_token_over_the_bound_never_becomes_a_row() -> None:
    with pytest.raises(StalenessError, match="1 tokens of age up to 3, need at most 2"):
        _rows([-1, 1, 2])


def test_a_token_is_trained_at_its_own_temperature_and_at_the_runs_where_it_knows_none() -> None:
    (known,), stats = _rows([-1, 4, 4, 4], temperatures=[9, 0.5, 1, 0])
    (unknown,), of_run = _rows([-1, 4, 4])

    assert np.array(known.temperature).tolist() == [9, 0.5, 1, 0]
    assert stats.temperatures == 1.5
    assert unknown.temperature == 0.75
    assert of_run.temperatures == 1.5


def test_mask_takes_only_the_tokens_over_the_bound_out_of_the_loss() -> None:
    rows, ages = _rows([-1, 1, 2, 4], masks=True)

    assert rows[0].loss_mask.tolist() == [False, False, True, True]
    assert (ages.num_tokens, ages.total, ages.max, ages.num_masked) == (2, 2, 2, 1)
    assert ages.by_age == {0: 1, 2: 1}


def test_the_gap_is_measured_on_tokens_of_the_version_that_the_step_starts_from() -> None:
    rows, _ = _rows([-1, 3, 4])

    assert rows[0].current_mask.tolist() == [False, False, True]


def test_steered_tokens_are_trained_and_counted_and_no_part_of_the_gap() -> None:
    rows, stats = _rows([-1, 1, 4, 4], steered=[False, True, True, False], masks=True)

    assert rows[0].loss_mask.tolist() == [False, False, True, True]
    assert rows[0].current_mask.tolist() == [False, False, False, True]
    assert stats.num_steered == 1


def test_advantages_are_of_the_real_group_and_never_of_a_neighbours() -> None:
    batch = agree_on_batch(slots_of(_cut([0, 1], [5, 5, 5, 9])), [], AdvantageRule(std="none"), min_size=lambda _: 2)

    assert [batch.advantages[position] for position in range(6)] == [-0.5, 0.5, -1, -1, -1, 3]


def test_a_slot_that_no_rank_could_verify_is_left_out_of_its_groups_baseline() -> None:
    batch = agree_on_batch(slots_of(_cut([0, 1, 1])), [("0-0-0", 0)], AdvantageRule(std="none"), min_size=lambda _: 2)

    assert batch.advantages == {1: 0.0, 2: 0.0}
    assert batch.unusable == []


def test_a_group_left_too_small_falls_out_whole() -> None:
    batch = agree_on_batch(
        slots_of(_cut([0, 1], [2, 3])), [("0-0-0", 1)], AdvantageRule(std="none"), min_size=lambda _: 2
    )

    assert batch.unusable == ["0-0-0"]
    assert sorted(batch.advantages) == [2, 3]


def test_batch_metrics_are_over_all_ranks_tokens() -> None:
    batch = agree_on_batch(slots_of(_cut([0, 1], [1, 1])), [], AdvantageRule())

    ages = [
        AgeStats(num_tokens=6, total=6, max=1, by_age={1: 6}, temperatures=6.0, num_steered=1),
        AgeStats(num_tokens=2, total=4, max=2, by_age={1: 1, 3: 1}, temperatures=1.0, num_steered=2),
    ]
    line = batch_metrics(batch, [ShardStats(ages=one, info={}) for one in ages])

    assert (line["reward_mean"], line["num_groups"], line["num_trajectories"], line["num_tokens"]) == (0.75, 2, 4, 8)
    assert (line["staleness_mean"], line["staleness_max"], line["groups_all_equal"]) == (1.25, 2, 1)
    assert [line[f"staleness_tokens/{age}"] for age in range(4)] == [0, 7, 0, 1]
    assert line["temperature_mean"] == 0.875
    assert line["steered_tokens"] == 3


def test_rewards_are_told_by_the_age_of_a_trajectorys_oldest_version() -> None:
    placed = [
        replace(one, item=msgspec.structs.replace(one.item, slot=msgspec.structs.replace(one.item.slot, oldest=oldest)))
        for one, oldest in zip(slots_of(_cut([0, 1], [1, 1])), ("1-4", "1-2", "1-2", "1-2"), strict=True)
    ]
    batch = agree_on_batch(placed, [], AdvantageRule())

    line = batch_metrics(batch, [], age=lambda version: 4 - version.step)

    assert {key: value for key, value in line.items() if "_age/" in key} == {
        "reward_at_age/0": 0.0, "reward_at_age/2": 1.0,
    }  # fmt: skip


def _of_two_tasks() -> Cut:
    cut = _cut([0, 1], [1, 1, 0], [1])
    return msgspec.structs.replace(
        cut, groups=[cut.groups[0], *(msgspec.structs.replace(one, workflow="other") for one in cut.groups[1:])]
    )


def test_a_task_decides_how_many_siblings_its_groups_train_with() -> None:
    batch = agree_on_batch(
        slots_of(_of_two_tasks()), [("0-1-0", 0), ("0-0-0", 1)], AdvantageRule(),
        min_size=lambda workflow: 1 if workflow == "other" else 2,
    )  # fmt: skip

    assert batch.unusable == ["0-0-0"]
    assert batch.num_groups == 2


def test_each_of_several_tasks_has_its_own_reward_and_number_of_groups() -> None:
    batch = agree_on_batch(slots_of(_of_two_tasks()), [], AdvantageRule())

    def own(*workflows: str) -> dict[str, object]:
        line = batch_metrics(batch, [], workflows=workflows)
        return {key: value for key, value in line.items() if key.split("/")[0] in ("groups", "reward")}

    assert own("w") == {}
    assert own("w", "other", "absent") == {
        "groups/w": 1, "reward/w": 0.5, "groups/other": 2, "reward/other": 0.75, "groups/absent": 0,
    }  # fmt: skip


def test_metrics_of_workflows_are_averaged_over_the_trajectories_that_have_them_on_any_rank() -> None:
    batch = agree_on_batch(slots_of(_cut([0, 1], [1, 1])), [], AdvantageRule())
    shares = [[{"tries": 1.0, "ok": 1.0, "rollout/num_turns": 2.0}, {"tries": 4.0}], [{"tries": 1.0}], []]

    line = batch_metrics(batch, [ShardStats(ages=AgeStats(), info=add_up_info(infos)) for infos in shares])

    averaged = {key: value for key, value in line.items() if key.startswith(("info/", "rollout/"))}
    assert averaged == {"info/ok": 1.0, "info/tries": 2.0, "rollout/num_turns": 2.0}
    assert "prompt_tokens" not in line, "no server has counted"


def test_prompts_tokens_are_totals_of_the_step() -> None:
    batch = agree_on_batch(slots_of(_cut([0, 1], [1, 1])), [], AdvantageRule())
    infos = [{"rollout/prompt_tokens": 2000.0, "rollout/cached_tokens": cached} for cached in (0.0, 1999.0)]

    line = batch_metrics(batch, [ShardStats(ages=AgeStats(), info=add_up_info([one])) for one in infos])

    assert (line["prompt_tokens"], line["cached_tokens"]) == (4000, 1999)
    assert (line["rollout/prompt_tokens"], line["rollout/cached_tokens"]) == (2000.0, 999.5)
