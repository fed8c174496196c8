"""Which slots attend together, so that a short sequence does not read as many positions as the longest has.

A decoding step attends to a view of the cache: so many slots, so many positions. Answers are heavy-tailed, and one view
for all would read for most of them a multiple of what they hold. Hence a few views, each of neighbouring slots, with
the long sequences in the first ones. New sequences come last and are short, so few have to be moved.

Letters: N running sequences.
"""

from bisect import bisect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

_MOST_BANDS = 4
_LEAST_SAVED = 1024
"""Positions of slots: what another view in each layer costs, of a model so small that calling counts."""


class Band(NamedTuple):
    """Neighbouring slots that attend to equally many positions."""

    end: int
    """Past its last slot; its first is the end of the band before."""
    num_positions: int


def cut(lengths: Sequence[int]) -> tuple[list[Band], list[tuple[int, int]]]:
    """Return the bands for sequences of these lengths [N], and which pairs of slots are to be exchanged for them."""
    lengths_N = np.asarray(lengths)
    by_length_N = np.argsort(-lengths_N, kind="stable")
    sorted_N = lengths_N[by_length_N]
    indices_N, starts, ends = np.arange(len(lengths)), [0], [len(lengths)]
    head_N, end_N = np.full_like(sorted_N, sorted_N[0]), np.full_like(sorted_N, len(lengths))
    while len(starts) < _MOST_BANDS:
        saved_N = (end_N - indices_N) * (head_N - sorted_N)
        best = int(saved_N.argmax())
        if saved_N[best] < _LEAST_SAVED:
            break
        at = bisect(starts, best)
        head_N[best : ends[at - 1]], end_N[starts[at - 1] : best] = sorted_N[best], best
        starts.insert(at, best)
        ends.insert(at - 1, best)
    bands = [Band(end, int(sorted_N[start])) for start, end in zip(starts, ends, strict=True)]
    band_N = np.empty(len(lengths), dtype=np.int64)
    band_N[by_length_N] = np.repeat(np.arange(len(bands)), np.subtract(ends, starts))
    return bands, list(_exchanges(band_N, ends))


def _exchanges(band_N: np.ndarray[tuple[int], np.dtype[np.int64]], ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield pairs of slots until every slot is in its band; changes ``band_N`` along."""
    start = 0
    for index, end in enumerate(ends):
        wrong = start + np.flatnonzero(band_N[start:end] != index)
        missing = end + np.flatnonzero(band_N[end:] == index)
        for one, other in zip(wrong.tolist(), missing.tolist(), strict=True):
            band_N[other], band_N[one] = band_N[one], index
            yield one, other
        start = end
