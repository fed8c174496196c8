"""Groups are admitted as late as the trainer need not wait for them, and never held back where it might."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from areal_async.controller.accounts import Accounts
from areal_async.controller.pacing import Durations, Pacer
from areal_async.protocol.types import Admitted, Cut, CutGroup, CutKind, Outcome, OutcomeKind, Version

BATCH = 4
MAX_STALENESS = 3


@dataclass
class Scene:
    """A run whose steps take as long as it is told, and whose groups do; the clock is in its hands."""

    step_s: float = 10.0
    duration_s: float = 2.0
    now: float = 0.0
    step: int = 0
    """The newest one whose weights are announced and held."""
    num_admitted: int = 0
    ready_at: dict[str, float] = field(default_factory=dict)
    ages: list[int] = field(default_factory=list)
    """Of each trained group: by how many versions it was older, at its admission, than those its step began with."""
    waited_s: float = 0.0
    admitted_at: dict[str, tuple[float, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.accounts = Accounts(max_groups_in_flight=(MAX_STALENESS + 1) * BATCH)
        self.accounts.held = Version(1, 0)
        self.pacer = Pacer(batch_groups=BATCH)
        self.pacer.note_newest(0, now=0.0)

    def durations(self) -> Iterator[float]:
        while True:
            yield self.duration_s

    def admit(self) -> int:
        count = self.pacer.num_wanted(self.accounts, now=self.now)
        groups = [f"0-{self.num_admitted + number}-0" for number in range(count)]
        for group in groups:
            self.admitted_at[group] = self.now, self.step
            self.ready_at[group] = self.now + self.duration_s
        self.num_admitted += count
        self.accounts.admitted = Admitted(total=self.num_admitted)
        self.pacer.note_admitted([(group, "w") for group in groups], now=self.now)
        return count

    def cut_when_ready(self) -> bool:
        """Cut the next batch as soon as there is one, as the trainer does beside its step."""
        ready = [group for group, at_s in self.ready_at.items() if at_s <= self.now][:BATCH]
        if len(ready) < BATCH or self.accounts.journal.is_cut(self.step + 2):
            return False
        step = self.step + 2 if self.accounts.journal.is_cut(self.step + 1) else self.step + 1
        groups = [
            CutGroup(group_id=one, workflow="w", slots=[], duration_s=self.ready_at.pop(one) - self.admitted_at[one][0])
            for one in ready
        ]
        self.ages += [step - 1 - self.admitted_at[one][1] for one in ready]
        cut = Cut(lineage=1, step=step, groups=groups)
        self.accounts.add_cut(cut, sequence=step)
        self.pacer.note_cut(cut, now=self.now)
        return True

    def run(self, num_steps: int) -> None:
        last = self.step + num_steps
        begun_at: float | None = None
        while self.step < last:
            self.admit()
            while self.cut_when_ready():
                self.admit()
            is_there = self.accounts.journal.is_cut(self.step + 1)
            if begun_at is None:
                begun_at = self.now if is_there else None
                self.waited_s += 0.0 if is_there else 0.25
            if begun_at is not None and self.now - begun_at >= self.step_s:
                self.step, begun_at = self.step + 1, None
                self.accounts.held = Version(1, self.step)
                self.pacer.note_newest(self.step, now=self.now)
            else:
                self.now += 0.25


@dataclass
class SharedScene(Scene):
    """One whose servers compute a batch in ``duration_s``, and share their time among all that is in flight."""

    left: dict[str, float] = field(default_factory=dict)
    """Share of each group in flight that is to be computed still."""
    worked_until_s: float = 0.0

    def admit(self) -> int:
        took_s, self.worked_until_s = self.now - self.worked_until_s, self.now
        share = took_s / self.duration_s * min(1.0, BATCH / max(1, len(self.left)))
        for group in list(self.left):
            self.left[group] -= share
            if self.left[group] < 1e-9:
                del self.left[group]
                self.ready_at[group] = self.now
        before = self.num_admitted
        count = super().admit()
        for group in (f"0-{number}-0" for number in range(before, self.num_admitted)):
            self.left[group], self.ready_at[group] = 1.0, math.inf
        return count


def test_before_anything_is_observed_all_credit_is_spent() -> None:
    assert Scene().admit() == (MAX_STALENESS + 1) * BATCH


@pytest.mark.parametrize(("duration_s", "age"), [(2.0, 1), (9.0, 1), (12.0, 2), (22.0, 3)])
def test_tokens_are_as_young_as_the_durations_allow_and_the_trainer_does_not_wait(duration_s: float, age: int) -> None:
    scene = Scene(duration_s=duration_s)
    scene.run(8)
    scene.ages.clear()
    scene.waited_s = 0.0

    scene.run(20)

    assert max(scene.ages) == age
    assert scene.waited_s == 0.0


def test_a_jump_of_the_durations_costs_waiting_once() -> None:
    scene = Scene(duration_s=2.0)
    scene.run(8)
    scene.waited_s, scene.duration_s = 0.0, 20.0
    scene.run(6)
    jump_s = scene.waited_s
    scene.run(20)

    assert 0.0 < jump_s <= MAX_STALENESS * scene.step_s
    assert scene.waited_s == jump_s, "once"


def test_the_crowd_of_the_start_is_forgotten_with_two_batches() -> None:
    scene = SharedScene(duration_s=9.0)

    scene.run(20)

    assert set(scene.ages[: 4 * BATCH]) == {0, 1, 2, 3}, "all credit is spent before anything is observed"
    assert set(scene.ages[8 * BATCH :]) == {1}


def test_where_generation_is_the_limit_all_credit_is_spent() -> None:
    scene = Scene(duration_s=60.0)
    scene.run(10)
    scene.admit()

    assert scene.accounts.num_in_flight == (MAX_STALENESS + 1) * BATCH


def test_groups_that_are_not_trained_are_made_up_for() -> None:
    scene = Scene()
    scene.run(8)
    scene.admit()
    full = scene.pacer.num_wanted(scene.accounts, now=scene.now + 9.0)
    for number in range(2 * BATCH):
        scene.pacer.note_outcome(Outcome(group_id=f"9-{number}-0", kind=OutcomeKind.FILTERED, lineage=1))

    assert scene.pacer.num_wanted(scene.accounts, now=scene.now + 9.0) > full


def test_nothing_is_held_back_while_the_trainer_waits() -> None:
    scene = Scene()
    scene.run(8)
    scene.admit()
    assert scene.pacer.num_wanted(scene.accounts, now=scene.now) == 0 < scene.accounts.num_credits

    while scene.accounts.journal.is_cut(scene.step + 1):
        scene.step += 1
        scene.pacer.note_newest(scene.step, now=scene.now)

    assert scene.pacer.num_wanted(scene.accounts, now=scene.now) == scene.accounts.num_credits


def test_weights_that_are_announced_and_not_held_yet_are_waited_for() -> None:
    """What would be admitted in between, for the batch after the next one, would be a version older."""
    scene = Scene()
    scene.run(8)
    scene.admit()
    scene.now += scene.step_s / 2
    assert scene.cut_when_ready()
    scene.pacer.note_newest(scene.step + 1, now=scene.now)
    before = scene.pacer.num_wanted(scene.accounts, now=scene.now)
    scene.accounts.held = Version(1, scene.step + 1)

    assert before == 0
    assert scene.pacer.num_wanted(scene.accounts, now=scene.now) == BATCH


def test_a_new_lineage_begins_without_a_step_that_runs() -> None:
    scene = Scene()
    scene.run(8)

    begin = Cut(kind=CutKind.BEGIN, lineage=2, step=scene.step - 2)
    scene.accounts.add_cut(begin, sequence=1000)
    scene.pacer.note_cut(begin, now=scene.now)

    assert scene.pacer.num_wanted(scene.accounts, now=scene.now) == scene.accounts.num_credits


def test_it_says_what_it_predicts_and_how_good_that_was() -> None:
    scene = Scene()
    assert scene.pacer.report(scene.accounts, now=0.0) == {"num_held_back": 0}
    scene.run(8)
    report = scene.pacer.report(scene.accounts, now=scene.now)

    assert report["predicted_step_s"] == scene.step_s
    assert report["step_error_s"] == 0.0
    assert report["predicted_duration_s"] == scene.duration_s
    assert report["late_share"] == 0.0
    assert report["num_held_back"] == scene.accounts.num_credits - BATCH > 0


def test_recent_durations_are_a_distribution() -> None:
    durations = Durations(4)
    for duration_s in (9.0, 1.0, 2.0, 3.0, 4.0):
        durations.add(duration_s)

    assert len(durations) == 4
    assert durations.share_within(0.5) == 0.0
    assert durations.share_within(2.0) == 2 / 4
    assert durations.share_within(100.0) == 1.0
    assert durations.quantile(0.5) == 3.0
    assert durations.quantile(1.0) == 4.0
