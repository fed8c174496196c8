"""Slots that attend together: all that a sequence holds is seen, and little more is read."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.inference.embedded.engine.compute import bands
from areal_async.inference.embedded.engine.compute.bands import Band, cut


def arranged(lengths: list[int]) -> tuple[list[Band], list[int]]:
    """Return the bands, and the lengths slot by slot after the exchanges."""
    found, exchanges = cut(lengths)
    slots = list(lengths)
    for one, other in exchanges:
        slots[one], slots[other] = slots[other], slots[one]
    return found, slots


def num_read(found: list[Band]) -> int:
    starts = [0, *(band.end for band in found)]
    return sum((band.end - start) * band.num_positions for start, band in zip(starts, found, strict=False))


@pytest.mark.parametrize("least_saved", [1, 64, 1024])
@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=60))
def test_every_slot_sees_all_that_it_holds(lengths: list[int], least_saved: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bands, "_LEAST_SAVED", least_saved)
        found, slots = arranged(lengths)
        again, exchanges = cut(slots)

    seen = np.repeat([band.num_positions for band in found], np.diff([0, *(band.end for band in found)]))
    assert len(seen) == len(lengths)
    assert (seen >= slots).all()
    assert sorted(slots) == sorted(lengths)
    assert num_read(found) <= len(lengths) * max(lengths) - least_saved * (len(found) - 1)
    assert exchanges == [], "what is in its place was moved"
    assert again == found


def test_equal_lengths_are_one_band() -> None:
    assert cut([90] * 256) == ([Band(256, 90)], [])


def test_of_heavy_tailed_lengths_little_more_is_read_than_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    lengths = [60 + min(192, int(8 * draw.paretovariate(1.1))) for _ in range(256)]

    monkeypatch.setattr(bands, "_LEAST_SAVED", 1024)
    found, _ = arranged(lengths)

    assert num_read(found) < 1.2 * sum(lengths)
    assert len(lengths) * max(lengths) > 2.5 * sum(lengths)
