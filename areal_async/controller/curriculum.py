"""Which prompts are passed over for an epoch: most of those that are always solved, or never, as things stand.

Pure, and repeatable. What is known of a prompt is the running mean of its groups' mean rewards, in the order of the
log. What is known when a *stretch* of a pool begins (an epoch, or a few short ones) decides for the whole stretch, and
how many visits that takes in stands in the ``admitted`` record before any ticket of the stretch is published. The rest
is a hash. So a controller that is killed between its tickets and the record decides the same again when it returns,
and anybody can tell afterwards what was passed over.
"""

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass, field
from hashlib import blake2b

from areal_async.config.settings import CurriculumSettings, Settings
from areal_async.controller.sampler import RowPool, Sampler
from areal_async.protocol.types import Admitted, Cut, CutKind, GroupId, Mix, Outcome, mean

MIN_STRETCH = 64
"""Rows of a pool, at least, between two looks at what is known: keeps the record short where epochs are."""
MAX_LOOKED_AT = 1024
"""Positions that one admission looks at, at the most: then others have their turn."""


class Visits:
    """What prompts came to, in the order of the log."""

    def __init__(self, visits: Iterable[tuple[int, float]] = ()) -> None:
        self._indices = array("q")
        self._means = array("d")
        self.extend(visits)

    def extend(self, visits: Iterable[tuple[int, float]]) -> None:
        """Add visits: of each, the row and the group's mean reward."""
        for index, reward in visits:
            self._indices.append(index)
            self._means.append(reward)

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self._indices, self._means, strict=True)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: int) -> tuple[int, float]:
        """Return a visit's row and its group's mean reward."""
        return self._indices[number], self._means[number]

    def read(self, entry: Cut | Outcome) -> None:
        """Read an entry of the log: groups that were cut, and those whose rewards taught nothing."""
        if isinstance(entry, Outcome):
            if entry.mean_reward is not None:
                self._add(entry.group_id, entry.mean_reward)
        elif entry.kind is CutKind.CUT:
            for group in entry.groups:
                if group.slots:
                    self._add(group.group_id, mean([item.slot.reward for item in group.slots]))

    def _add(self, group_id: str, reward: float) -> None:
        self.extend([(GroupId.parse(group_id).index, reward)])


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptChoice:
    """Prompts to be admitted next."""

    groups: list[GroupId]
    num_looked_at: int
    """Positions that are behind them, passed over or not."""
    known: Mapping[str, int]
    """What ``Admitted.known`` becomes."""


@dataclass(eq=False)
class Curriculum:
    """Decides position by position, given what the record says was known."""

    settings: CurriculumSettings
    sampler: Sampler
    visits: Visits
    """Others may go on adding to them."""
    _: KW_ONLY
    seed: int
    min_stretch: int = MIN_STRETCH
    _dull: dict[int, tuple[str, Set[int]]] = field(default_factory=dict)
    """Pool -> its stretch that was asked for last, and the rows that teach nothing in it."""
    _rates: dict[int, float] = field(default_factory=dict)
    _num_read: int = 0
    """Visits that ``_rates`` takes in."""

    def choose(self, admitted: Admitted, count: int) -> PromptChoice:
        """Return up to ``count`` prompts from where the record stands.

        A stretch that begins ends the choice, as what is known by now must be on record before it decides anything.
        """
        groups: list[GroupId] = []
        known, position = dict(admitted.known), admitted.num_fresh
        while len(groups) < count and position - admitted.num_fresh < MAX_LOOKED_AT:
            group = self.sampler.group_at(position, admitted.mixes)
            number, pool, stretch = self._stretch_of(group)
            if stretch and stretch not in known:
                known[stretch] = len(self.visits)
                break
            if self._admits(group, number, pool, stretch, known):
                groups.append(group)
            position += 1
        return PromptChoice(groups=groups, num_looked_at=position - admitted.num_fresh, known=known)

    def first_groups(
        self, num_positions: int, known: Mapping[str, int], mixes: Sequence[Mix] = ()
    ) -> Iterator[GroupId]:
        """Yield the prompts that are admitted at the first positions, as far as ``known`` decides."""
        for group in self.sampler.first_groups(num_positions, mixes):
            number, pool, stretch = self._stretch_of(group)
            if stretch and stretch not in known:
                return
            if self._admits(group, number, pool, stretch, known):
                yield group

    def _stretch_of(self, group: GroupId) -> tuple[int, RowPool, str]:
        """Return a prompt's pool and stretch; the first stretch, of which nothing is known, has no name."""
        number, pool = self.sampler.pool_of(group)
        stretch = group.epoch // math.ceil(self.min_stretch / pool.num_rows)
        return number, pool, f"{number}-{stretch}" if stretch else ""

    def _admits(self, group: GroupId, number: int, pool: RowPool, stretch: str, known: Mapping[str, int]) -> bool:
        if not stretch:
            return True
        if self._dull.get(number, ("",))[0] != stretch:
            self._dull[number] = stretch, self._dull_rows(pool, known[stretch])
        return group.index not in self._dull[number][1] or self._is_kept(group)

    def _is_kept(self, group: GroupId) -> bool:
        digest = blake2b(f"{self.seed}.{group.epoch}.{group.index}".encode(), digest_size=7).digest()
        return int.from_bytes(digest) < self.settings.keep * 2**56

    def _dull_rows(self, pool: RowPool, num_visits: int) -> Set[int]:
        self._read_visits(num_visits)
        low, high = self.settings.unsolved, self.settings.solved
        return {index for index, rate in self._rates.items() if pool.holds(index) and not low < rate < high}

    def _read_visits(self, num_visits: int) -> None:
        if num_visits < self._num_read:
            self._rates.clear()
            self._num_read = 0
        weight = self.settings.newest_weight
        for number in range(self._num_read, min(num_visits, len(self.visits))):
            index, reward = self.visits[number]
            before = self._rates.get(index, reward)
            self._rates[index] = before + weight * (reward - before)
        self._num_read = num_visits


def curriculum_of(settings: Settings, sampler: Sampler, visits: Visits) -> Curriculum | None:
    """Return what the settings ask for; None where every prompt is admitted."""
    own = settings.rollout.curriculum
    return None if own.name == "none" else Curriculum(own, sampler, visits, seed=settings.run.seed)
