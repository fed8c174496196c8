"""The order in which prompts are visited: an endless sequence of seeded permutations, one per epoch.

Pure: position in the sequence is all the state there is, so a restarted controller goes on exactly where
the ``admitted`` record says. Each prompt has one admission per epoch, and epochs follow without a barrier.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from areal_async.types import GroupId


class Sampler:
    """Permutations of ``num_rows`` rows under a seed."""

    def __init__(self, num_rows: int, *, seed: int) -> None:
        self._num_rows = num_rows
        self._seed = seed

    def group_at(self, position: int) -> GroupId:
        """Return the first attempt at the prompt that is visited at ``position`` (from 0)."""
        epoch, offset = divmod(position, self._num_rows)
        index = int(_permutation(self._num_rows, self._seed, epoch)[offset])
        return GroupId(epoch=epoch, index=index, attempt=0)


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)
