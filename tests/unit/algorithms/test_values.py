"""GAE and a critic's loss equal plain loops over each sequence's own steps; observations are no steps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.algorithms.values import gae, reward_to_go, value_loss

Step = tuple[float, float, bool]
numbers = st.integers(-30, 30).map(lambda tenths: tenths / 10)
packs = st.lists(st.lists(st.tuples(numbers, numbers, st.booleans()), min_size=1, max_size=7), min_size=1, max_size=5)


def columns(sequences: list[list[Step]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    steps = [step for sequence in sequences for step in sequence]
    return (
        torch.tensor([reward for reward, _, _ in steps], dtype=torch.float64),
        torch.tensor([value for _, value, _ in steps], dtype=torch.float64).requires_grad_(),
        torch.tensor([is_sampled for _, _, is_sampled in steps]),
        torch.tensor([number for number, sequence in enumerate(sequences) for _ in sequence]),
    )


def plain_gae(sequence: list[Step], gamma: float, lam: float) -> list[float]:
    """The sum of eq. 16, term by term, over the sampled steps alone."""
    steps = [(reward, value) for reward, value, is_sampled in sequence if is_sampled]
    after = [value for _, value in steps[1:]] + [0.0]
    deltas = [reward + gamma * later - value for (reward, value), later in zip(steps, after, strict=False)]
    sums = iter([sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(deltas))) for i in range(len(deltas))])
    return [next(sums) if is_sampled else 0.0 for _, _, is_sampled in sequence]


@given(packs, st.sampled_from([1.0, 0.9]), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
@settings(deadline=None)
def test_gae_equals_its_sum_over_sampled_steps(sequences: list[list[Step]], gamma: float, lam: float) -> None:
    rewards, values, mask, sequence = columns(sequences)

    advantages, returns = gae(rewards, values, mask, sequence, gamma=gamma, gae_lambda=lam)

    expected = [one for steps in sequences for one in plain_gae(steps, gamma, lam)]
    assert advantages.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert returns.tolist() == pytest.approx([
        advantage + value if is_sampled else 0.0
        for advantage, (_, value, is_sampled) in zip(expected, (s for steps in sequences for s in steps), strict=True)
    ])  # fmt: skip
    assert not advantages.requires_grad
    assert not returns.requires_grad


def test_an_observation_between_two_turns_changes_no_advantage() -> None:
    turn = [(0.0, 0.5, True), (0.0, 0.2, True)]
    last = [(1.0, 0.7, True)]
    with_tool, _ = gae(*columns([[*turn, (9.0, 9.0, False), (9.0, 9.0, False), *last]]), gamma=0.9, gae_lambda=0.8)
    without, _ = gae(*columns([[*turn, *last]]), gamma=0.9, gae_lambda=0.8)

    assert with_tool[[0, 1, 4]].tolist() == without.tolist()
    assert with_tool[[2, 3]].tolist() == [0.0, 0.0]


def test_packed_advantages_are_those_of_each_sequence_alone() -> None:
    sequences = [[(0.0, 0.5, True), (1.0, -0.2, True)], [(0.3, 0.1, True)], [(0.0, 2.0, False), (2.0, 1.0, True)]]
    together, _ = gae(*columns(sequences), gamma=0.9, gae_lambda=0.95)
    alone = [gae(*columns([one]), gamma=0.9, gae_lambda=0.95)[0] for one in sequences]

    assert together.tolist() == torch.cat(alone).tolist()


def test_a_row_without_a_sampled_token_has_no_advantages() -> None:
    rewards, values, mask, sequence = columns([[(1.0, 1.0, False)]])

    assert gae(rewards, values, mask, sequence, gamma=1.0, gae_lambda=1.0)[0].tolist() == [0.0]


def test_with_lambda_one_and_no_critic_advantages_are_discounted_returns() -> None:
    rewards, _, mask, sequence = columns([[(1.0, 0.0, True), (2.0, 0.0, True), (4.0, 0.0, True)]])

    assert reward_to_go(rewards, mask, sequence, gamma=0.5).tolist() == [1 + 1 + 1, 2 + 2, 4]


@given(
    st.lists(st.tuples(numbers, numbers, numbers, st.booleans(), st.floats(0.1, 2)), min_size=1, max_size=9),
    st.sampled_from([None, 0.2, 1.0]),
)
@settings(deadline=None)
def test_value_loss_equals_a_plain_loop(
    tokens: list[tuple[float, float, float, bool, float]], clip: float | None
) -> None:
    expected = 0.0
    for value, old, target, is_sampled, weight in tokens:
        near = value if clip is None else min(max(value, old - clip), old + clip)
        expected += weight * 0.5 * max((value - target) ** 2, (near - target) ** 2) if is_sampled else 0.0
    values, old_values, returns, mask, weights = (torch.tensor(column) for column in zip(*tokens, strict=True))

    terms = value_loss(
        values.double(), old_values.double(), returns.double(), mask, value_clip=clip, weight_T=weights.double()
    )

    assert terms.loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_passes_gradcheck_and_stops_where_the_clip_takes_over(clip: float | None) -> None:
    values = torch.tensor([0.13, 1.7, -0.9, 0.4], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.1, 1.0, 0.2, 0.4], dtype=torch.float64)
    returns = torch.tensor([1.0, 1.65, 3.0, 0.0], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])

    def loss(values_T: torch.Tensor) -> torch.Tensor:
        return value_loss(values_T, old, returns, mask, value_clip=clip).loss

    assert torch.autograd.gradcheck(loss, (values,))
    (gradient,) = torch.autograd.grad(loss(values), values)
    # The second value has moved 0.7 towards its return: clipped to 1.2 its error is larger, so it gets no gradient.
    assert (gradient[1] == 0) == (clip is not None)
    assert gradient[3] == 0
