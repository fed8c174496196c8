"""A token's advantage equals a plain computation in float64, whichever rank holds its trajectory."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import Queue
from threading import Thread
from typing import Any, Literal, TypeVar

import numpy as np
import pytest
import torch

from areal_async.algorithms.advantages import AdvantageRule, Sibling, step_advantages
from areal_async.algorithms.kl import MAX_ESTIMATE
from areal_async.config.settings import AlgorithmSettings
from areal_async.protocol.types import CutSlot, Slot, SlotStatus
from areal_async.trainer.batch.advantages import Columns, Moments, critic_advantages, kl_penalties, penalised_advantages
from areal_async.trainer.batch.payloads import BatchSlot
from areal_async.trainer.packing.rows import TrainRow
from tests.unit.trainer.models import random_rows

T = TypeVar("T")


def alone(payload: bytes) -> list[bytes]:
    return [payload]


def together(works: Sequence[Callable[[Callable[[bytes], list[bytes]]], T]]) -> list[T]:
    """Run a function per rank, each in a thread, with a gather that meets the others'."""
    boxes: list[Queue[bytes]] = [Queue() for _ in range(len(works) ** 2)]
    results: dict[int, T] = {}

    def run(rank: int) -> None:
        def gather(payload: bytes) -> list[bytes]:
            for other in range(len(works)):
                boxes[rank * len(works) + other].put(payload)
            return [boxes[other * len(works) + rank].get(timeout=60) for other in range(len(works))]

        results[rank] = works[rank](gather)

    threads = [Thread(target=run, args=(rank,)) for rank in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [results[rank] for rank in range(len(works))]


def trajectories() -> list[TrainRow]:
    """Make seven rows of five trajectories: the second and the third have two sequences."""
    rows = random_rows(7, seed=4)
    return [replace(row, index=index) for row, index in zip(rows, [0, 1, 1, 2, 2, 3, 4], strict=True)]


def random_columns(rows: Sequence[TrainRow], *, seed: int) -> list[torch.Tensor]:
    random = np.random.default_rng(seed)
    return [torch.from_numpy(random.normal(size=row.num_tokens).astype(np.float32)) for row in rows]


OUTCOMES = {0: 1.0, 1: 0.0, 2: 0.5, 3: -1.0, 4: 2.0}


def plain_gae(
    rows: Sequence[TrainRow],
    values: Sequence[torch.Tensor],
    penalties: Columns | None,
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """Return advantages and returns by row and token, one token of one trajectory after the other, backwards."""
    advantages, returns = {}, {}
    for index in OUTCOMES:
        places = [
            (number, int(t))
            for number, row in enumerate(rows)
            if row.index == index
            for t in np.flatnonzero(row.loss_mask)
        ]
        running, next_value, reward = 0.0, 0.0, OUTCOMES[index]
        for number, t in reversed(places):
            value = float(values[number][t])
            earned = reward - (float(penalties[number][t]) if penalties else 0.0)
            running = earned + gamma * next_value - value + gamma * gae_lambda * running
            advantages[number, t], returns[number, t] = running, running + value
            next_value, reward = value, 0.0
    return advantages, returns


@pytest.mark.parametrize("is_whitened", [True, False])
@pytest.mark.parametrize("has_penalties", [True, False])
def test_a_critics_advantages_equal_a_loop_over_tokens(is_whitened: bool, has_penalties: bool) -> None:
    rows = trajectories()
    values = random_columns(rows, seed=1)
    penalties = [one.numpy() for one in random_columns(rows, seed=2)] if has_penalties else None
    plain, plain_returns = plain_gae(rows, values, penalties, gamma=0.9, gae_lambda=0.8)
    if is_whitened:
        every = np.array(list(plain.values()))
        plain = {place: (value - every.mean()) / (every.std() + 1e-6) for place, value in plain.items()}

    algorithm = AlgorithmSettings(gamma=0.9, gae_lambda=0.8, advantage_std="batch" if is_whitened else "none")
    advantages, returns, quality = critic_advantages(rows, OUTCOMES, values, penalties, algorithm, gather=alone)

    for number, row in enumerate(rows):
        for t in range(row.num_tokens):
            assert advantages[number][t] == pytest.approx(plain.get((number, t), 0.0), abs=1e-6)
            assert returns[number][t] == pytest.approx(plain_returns.get((number, t), 0.0), abs=1e-6)
    targets = np.array(list(plain_returns.values()))
    expected = np.array([float(values[number][t]) for number, t in plain_returns])
    assert quality.explained_variance == pytest.approx(1 - (targets - expected).var() / targets.var(), rel=1e-6)
    assert quality.returns_mean == pytest.approx(targets.mean(), rel=1e-6)
    assert quality.value_mean == pytest.approx(expected.mean(), rel=1e-6)


def test_advantages_are_the_same_on_one_rank_and_on_three_of_which_one_has_nothing() -> None:
    rows = trajectories()
    values = random_columns(rows, seed=1)

    def work(part: slice) -> Callable[[Any], tuple[Columns, Columns, Any]]:
        algorithm = AlgorithmSettings(name="ppo")
        return lambda gather: critic_advantages(rows[part], OUTCOMES, values[part], None, algorithm, gather=gather)

    ((whole, whole_returns, quality),) = together([work(slice(None))])
    parts = together([work(slice(0, 3)), work(slice(0, 0)), work(slice(3, 7))])

    for mine, parted in ((whole, 0), (whole_returns, 1)):
        joined = np.concatenate([column for part in parts for column in part[parted]])
        assert np.allclose(np.concatenate(mine), joined, atol=1e-6)
    assert all(part[2].explained_variance == pytest.approx(quality.explained_variance) for part in parts)


def test_a_batch_whose_advantages_are_all_equal_teaches_nothing() -> None:
    rows = [replace(row, index=number) for number, row in enumerate(random_rows(3))]
    values = [torch.zeros(row.num_tokens) for row in rows]

    outcomes, algorithm = dict.fromkeys(range(3), 1.0), AlgorithmSettings(name="ppo", gae_lambda=1.0)
    advantages, returns, quality = critic_advantages(rows, outcomes, values, None, algorithm, gather=alone)

    assert not np.concatenate(advantages).any()
    assert (quality.explained_variance, quality.returns_mean) == (0.0, 1.0)
    assert all((column[row.loss_mask] == 1.0).all() for column, row in zip(returns, rows, strict=True))


def test_moments_of_parts_are_those_of_the_whole() -> None:
    values = torch.from_numpy(np.random.default_rng(0).normal(5, 2, 100))

    joined = Moments.of(values[:30]).joined(Moments()).joined(Moments.of(values[30:]))

    assert joined.mean == pytest.approx(float(values.mean()))
    assert joined.variance == pytest.approx(float(values.var(correction=0)))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_penalty_is_beta_times_the_estimate_at_trained_tokens(estimator: Literal["k1", "k2", "k3"]) -> None:
    rows = trajectories()
    logprobs, reference = random_columns(rows, seed=1), random_columns(rows, seed=2)
    estimates = {"k1": lambda d: d, "k2": lambda d: d**2 / 2, "k3": lambda d: np.exp(-d) - 1 + d}

    algorithm = AlgorithmSettings(kl_estimator=estimator, kl_coef=0.1)
    penalties, mean = kl_penalties(rows, logprobs, reference, algorithm, gather=alone)

    every = []
    for row, mine, other, penalty in zip(rows, logprobs, reference, penalties, strict=True):
        plain = estimates[estimator](mine.double().numpy() - other.double().numpy())
        plain = plain.clip(-MAX_ESTIMATE, MAX_ESTIMATE)
        assert np.allclose(penalty, np.where(row.loss_mask, 0.1 * plain, 0.0), atol=1e-6)
        every.extend(plain[row.loss_mask])
    assert mean == pytest.approx(np.mean(every), rel=1e-6)


def slots_of(rows: Sequence[TrainRow]) -> list[BatchSlot]:
    """Return the batch: trajectories 0, 1 and 2 are one group, 3 and 4 another."""
    tokens = {index: sum(int(row.loss_mask.sum()) for row in rows if row.index == index) for index in OUTCOMES}
    return [
        BatchSlot(
            position=index,
            group_id="a" if index < 3 else "b",
            workflow="w",
            item=CutSlot(
                sequence=1,
                slot=Slot(
                    sibling=index,
                    sample_uid=str(index),
                    status=SlotStatus.SCORED,
                    reward=reward,
                    num_tokens=tokens[index],
                    num_output_tokens=tokens[index],
                    oldest="1-0",
                    newest="1-0",
                ),
            ),
        )
        for index, reward in OUTCOMES.items()
    ]


def test_without_a_baseline_a_token_loses_the_penalties_from_it_on() -> None:
    rows = trajectories()
    penalties = [one.numpy() for one in random_columns(rows, seed=2)]
    zeros = [torch.zeros(row.num_tokens) for row in rows]
    plain, _ = plain_gae(rows, zeros, penalties, gamma=1.0, gae_lambda=1.0)
    every = np.array(list(plain.values()))

    advantages = penalised_advantages(
        rows, slots_of(rows), penalties, rule=AdvantageRule(baseline="none", std="batch"), gather=alone
    )

    for (number, t), value in plain.items():
        expected = (value - every.mean()) / (every.std() + 1e-6)
        assert advantages[number][t] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("rule", [AdvantageRule(), AdvantageRule(baseline="leave_one_out", std="none")])
def test_a_baseline_is_taken_of_outcomes_less_all_their_penalties(rule: AdvantageRule) -> None:
    rows = trajectories()
    penalties = [one.numpy() for one in random_columns(rows, seed=2)]
    less = {
        index: reward
        - sum(float(p[row.loss_mask].sum()) for p, row in zip(penalties, rows, strict=True) if row.index == index)
        for index, reward in OUTCOMES.items()
    }
    groups = [[Sibling(reward=less[index]) for index in members] for members in ((0, 1, 2), (3, 4))]
    expected = np.concatenate(step_advantages(groups, rule))

    parts = together(
        [
            lambda gather: penalised_advantages(rows[:3], slots_of(rows), penalties[:3], rule=rule, gather=gather),
            lambda gather: penalised_advantages(rows[3:], slots_of(rows), penalties[3:], rule=rule, gather=gather),
        ]
    )

    for row, column in zip(rows, [*parts[0], *parts[1]], strict=True):
        assert column == pytest.approx(np.full(row.num_tokens, expected[row.index]), abs=1e-5)
