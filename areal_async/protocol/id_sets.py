"""Sets of numbers and of group ids that only grow, kept as intervals: a long run's nearly all follow one another.

What a run has admitted is every prompt of an epoch but the newest ones, so all that is settled takes a few numbers for
each epoch, however many prompts it has; what is missing in between takes 16 bytes.
"""

import re
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from operator import le

import msgspec

_INT64 = "q"
_PARTS = re.compile("(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,8})-(0|[1-9][0-9]{0,8})").fullmatch
_EPOCH = 10**9
"""More than any index that ``_PARTS`` takes, so that no two prompts have one number, and 10**18 is within 64 bits."""


class NumberSet(AbstractSet[int]):
    """A set of 64-bit numbers, iterated over in their order."""

    __slots__ = ("_first", "_last", "_num")

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._first = array(_INT64)
        """First number of each interval, ascending; no two intervals touch. Each takes 16 bytes, with its last one."""
        self._last = array(_INT64)
        self._num = 0
        for number in numbers:
            self.add(number)

    def add(self, number: int) -> None:
        """Take a number in; one that is there already changes nothing."""
        first, last = self._first, self._last
        after = bisect_right(first, number)
        if after and number <= last[after - 1]:
            return
        self._num += 1
        follows = after > 0 and last[after - 1] == number - 1
        precedes = after < len(first) and first[after] == number + 1
        if follows and precedes:
            last[after - 1] = last[after]
            del first[after], last[after]
        elif follows:
            last[after - 1] = number
        elif precedes:
            first[after] = number
        else:
            first.insert(after, number)
            last.insert(after, number)

    def ends(self) -> list[int]:
        """Return first and last number of each interval, ascending."""
        return [number for pair in zip(self._first, self._last, strict=True) for number in pair]

    @classmethod
    def of_ends(cls, ends: Sequence[int]) -> "NumberSet":
        """Undo ``ends``.

        Raises:
            ValueError: they are none.
        """
        made = cls()
        made._first, made._last = array(_INT64, ends[::2]), array(_INT64, ends[1::2])
        is_paired = len(made._first) == len(made._last) and all(map(le, made._first, made._last))
        if not is_paired or any(first - last < 2 for last, first in zip(made._last, made._first[1:], strict=False)):
            raise ValueError(f"intervals: got {len(ends)} ends that do not ascend")
        made._num = sum(made._last) - sum(made._first) + len(made._first)
        return made

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        after = bisect_right(self._first, number)
        return after > 0 and number <= self._last[after - 1]

    def __iter__(self) -> Iterator[int]:
        for first, last in zip(self._first, self._last, strict=True):
            yield from range(first, last + 1)

    def __len__(self) -> int:
        return self._num


class GroupIdsState(msgspec.Struct, array_like=True):
    """``GroupIds`` as plain values."""

    ends: dict[str, list[int]] = {}
    """Attempt -> ends of its intervals."""
    others: list[str] = []


class GroupIds(AbstractSet[str]):
    """A set of group ids; which came first is not kept."""

    __slots__ = ("_by_attempt", "_others")

    def __init__(self, group_ids: Iterable[str] = ()) -> None:
        self._by_attempt: defaultdict[str, NumberSet] = defaultdict(NumberSet)
        """Attempt -> epoch and index, as one number."""
        self._others: set[str] = set()
        """Texts that no numbers stand for."""
        self.update(group_ids)

    def add(self, group_id: str) -> None:
        """Take a group in; one that is there already changes nothing."""
        attempt, prompt = _numbered(group_id)
        if attempt:
            self._by_attempt[attempt].add(prompt)
        else:
            self._others.add(group_id)

    def state(self) -> "GroupIdsState":
        """Return it as plain values."""
        ends = {attempt: prompts.ends() for attempt, prompts in self._by_attempt.items()}
        return GroupIdsState(ends=ends, others=sorted(self._others))

    @classmethod
    def of_state(cls, state: "GroupIdsState") -> "GroupIds":
        """Undo ``state``.

        Raises:
            ValueError: it is none.
        """
        made = cls()
        made._by_attempt.update({attempt: NumberSet.of_ends(ends) for attempt, ends in state.ends.items()})
        made._others = set(state.others)
        return made

    def update(self, group_ids: Iterable[str]) -> None:
        """Take groups in."""
        for group_id in group_ids:
            self.add(group_id)

    def __contains__(self, group_id: object) -> bool:
        if not isinstance(group_id, str):
            return False
        attempt, prompt = _numbered(group_id)
        return prompt in self._by_attempt.get(attempt, ()) or group_id in self._others

    def __iter__(self) -> Iterator[str]:
        for attempt, prompts in self._by_attempt.items():
            for prompt in prompts:
                epoch, index = divmod(prompt, _EPOCH)
                yield f"{epoch}-{index}-{attempt}"
        yield from self._others

    def __len__(self) -> int:
        return sum(map(len, self._by_attempt.values())) + len(self._others)


def _numbered(group_id: str) -> tuple[str, int]:
    """Return a group's attempt, and its epoch and index as one number; no attempt where no numbers stand for it."""
    parts = _PARTS(group_id)
    if parts is None:
        return "", 0
    epoch, index, attempt = parts.groups()
    return attempt, int(epoch) * _EPOCH + int(index)
