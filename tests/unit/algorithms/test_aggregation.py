"""Weights and units turn a sum over tokens into the mean that a paper writes, however tokens are laid out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.algorithms.aggregation import Aggregation, AggregationName

batches = st.lists(
    st.lists(st.integers(-50, 50).map(lambda tenths: tenths / 10), min_size=1, max_size=6), min_size=1, max_size=5
)


def plain(losses: list[list[float]], name: AggregationName, constant: float) -> float:
    if name == "token_mean":
        return sum(map(sum, losses)) / sum(map(len, losses))
    if name == "sequence_mean":
        return sum(sum(tokens) / len(tokens) for tokens in losses) / len(losses)
    if name == "sequence_sum":
        return sum(map(sum, losses)) / len(losses)
    return sum(sum(tokens) / constant for tokens in losses) / len(losses)


@settings(deadline=None)
@given(batches, st.sampled_from(["token_mean", "sequence_mean", "sequence_sum", "constant"]), st.floats(1, 2000))
def test_weighted_sums_over_units_equal_the_papers_means(
    losses: list[list[float]], name: AggregationName, constant: float
) -> None:
    shares = [Aggregation(name, constant).share(len(tokens)) for tokens in losses]

    total = sum(share.weight * loss for share, tokens in zip(shares, losses, strict=True) for loss in tokens)
    units = sum(share.unit * len(tokens) for share, tokens in zip(shares, losses, strict=True))

    assert total / units == pytest.approx(plain(losses, name, constant), rel=1e-6, abs=1e-9)


def test_a_trajectory_without_a_trained_token_has_a_share_all_the_same() -> None:
    assert Aggregation("sequence_mean").share(0) == (1.0, 1.0)
