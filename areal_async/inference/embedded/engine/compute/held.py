"""Which tokens the slots of the cache hold, also of sequences that ended: what a new prompt shares is not computed.

Siblings have the whole prompt of one another, the next turn of a conversation all that was said before, and all prompts
of a task their template. Searching is one comparison with a table: with some hundred slots a tree would not be faster.

Invariant: a row never claims a position that today's weights did not compute.

Letters: S slots, L positions.
"""

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

LEAST_SHARED = 16
"""A shorter beginning is computed again, which costs no more than to copy it."""
_NOTHING = -1
_UNLIKE = -2


class HeldTokens:
    """The rows of one cache."""

    def __init__(self, num_slots: int, slot_tokens: int) -> None:
        # One column more than positions, never filled, so that every row ends somewhere.
        self._ids_SL = np.full((num_slots, slot_tokens + 1), _NOTHING, dtype=np.int32)
        self._shown: list[Hashable] = [()] * num_slots
        self._used = np.zeros(num_slots, dtype=np.int64)
        """When each row was last of use, by a count of uses."""

    def resized(self, num_slots: int, slot_tokens: int) -> "HeldTokens":
        """Return the rows of a cache of another size that keeps what fits."""
        other = HeldTokens(num_slots, slot_tokens)
        slots, tokens = min(num_slots, len(self._used)), min(slot_tokens, self._ids_SL.shape[1] - 1)
        other._ids_SL[:slots, :tokens] = self._ids_SL[:slots, :tokens]
        other._shown[:slots], other._used[:slots] = self._shown[:slots], self._used[:slots]
        return other

    def clear(self) -> None:
        """Forget everything: other weights would compute other keys."""
        self._ids_SL[:] = _NOTHING

    def length(self, slot: int) -> int:
        """Return how many positions the slot holds."""
        return int((self._ids_SL[slot] == _NOTHING).argmax())

    def put(self, slot: int, ids: Sequence[int] | npt.NDArray[np.int32], shown: Hashable = ()) -> None:
        """Say what the slot holds now, and that it is of use."""
        self._ids_SL[slot, : len(ids)] = ids
        self._ids_SL[slot, len(ids) :] = _NOTHING
        self._shown[slot] = shown
        self._touch(slot)

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Follow a copy of the first positions."""
        self.put(target, self._ids_SL[source, : min(num_tokens, self.length(source))], self._shown[source])

    def exchange(self, one: int, other: int) -> None:
        """Follow an exchange of two slots."""
        self._ids_SL[[one, other]] = self._ids_SL[[other, one]]
        self._used[[one, other]] = self._used[[other, one]]
        self._shown[one], self._shown[other] = self._shown[other], self._shown[one]

    def find(self, ids: Sequence[int], shown: Hashable) -> tuple[int, int]:
        """Return the slot that holds most of the beginning of ``ids`` after the same images, and how much that is."""
        width = min(len(ids), self._ids_SL.shape[1] - 1)
        wanted = np.array([*ids[:width], _UNLIKE], dtype=np.int32)
        shared_S = (self._ids_SL[:, : width + 1] != wanted).argmax(axis=1)
        shared_S[[index for index, images in enumerate(self._shown) if images != shown]] = 0
        slot = int(shared_S.argmax())
        if shared_S[slot]:
            self._touch(slot)
        return slot, int(shared_S[slot])

    def oldest(self, start: int) -> int:
        """Return the slot from ``start`` on that was of use the longest ago."""
        return start + int(self._used[start:].argmin())

    def _touch(self, slot: int) -> None:
        self._used[slot] = self._used.max() + 1
