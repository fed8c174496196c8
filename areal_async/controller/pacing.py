"""When groups are admitted, within what their credit allows: as late as the trainer need not wait for them.

Pure: it is told what happens and at what time, and says how many groups are wanted now. It changes when, never which.
What is admitted later is sampled with newer weights. From the durations of recent groups, each task's its own, and of
recent steps it predicts how many groups will be whole when each of the next steps begins, and leaves out an admission
for as long as enough of them will be without it.

Held back is nothing

- while the trainer waits for a batch,
- while fewer than ``batch_groups`` groups can still train beyond the step that begins with the weights that the servers
  hold: until those of the step after it are held, what is admitted later is no younger,
- without observations: at the start, and after a restart of the controller.

So a wrong prediction costs waiting for one batch at most, and then all credit is spent.
"""

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable
from statistics import fmean, median
from typing import Any, NamedTuple

from areal_async.controller.accounts import Accounts
from areal_async.protocol.types import Cut, CutKind, Outcome, OutcomeKind

QUANTILE = 0.9
"""Of the durations: so long before a step begins its groups are admitted."""
LEAST_CHANCE = 0.5
"""That a group would be whole in time: with less it is too late to admit one for a step."""
NUM_BATCHES = 2
"""Whose groups' durations are remembered: where all credit was spent they are those of a crowd, and are to be forgotten
soon, for what is predicted from them admits a crowd again. Groups that are slow more seldom than every other batch are
not foreseen, and waited for."""
NUM_STEPS = 8
MIN_STEPS = 2
MIN_LOOK_S, MAX_LOOK_S = 0.01, 1.0


class _Admitted(NamedTuple):
    """Groups of one task that were admitted together."""

    task: str
    at_s: float


class Durations:
    """How long recent groups took, from the ticket to the last slot."""

    def __init__(self, most: int) -> None:
        self._recent: deque[float] = deque(maxlen=most)
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, duration_s: float) -> None:
        """Note one, in the place of the oldest."""
        self._recent.append(duration_s)
        self._sorted = []

    def share_within(self, duration_s: float) -> float:
        """Return which share of them took no longer than this."""
        return bisect_right(self._in_order, duration_s) / len(self._recent)

    def quantile(self, share: float) -> float:
        """Return what this share of them did not exceed."""
        return self._in_order[min(len(self._recent) - 1, int(share * len(self._recent)))]

    @property
    def _in_order(self) -> list[float]:
        if not self._sorted:
            self._sorted = sorted(self._recent)
        return self._sorted


class Pacer:
    """Holds admissions back that are not needed yet, from when a controller begins."""

    def __init__(self, *, batch_groups: int, min_durations: int | None = None, min_steps: int = MIN_STEPS) -> None:
        """Predict nothing yet.

        Args:
            min_durations: of groups, before anything is predicted; ``None`` for those of a batch.
            min_steps: the same of steps.
        """
        self._batch_groups = batch_groups
        self._min_steps = min_steps
        self._min_durations = batch_groups if min_durations is None else min_durations
        self._all = Durations(NUM_BATCHES * batch_groups)
        self._of_task: dict[str, Durations] = {}
        self._trains: deque[bool] = deque(maxlen=NUM_BATCHES * batch_groups)
        """Of the groups that ended last: whether they were trained."""
        self._open: dict[str, _Admitted] = {}
        """Groups that were admitted since it began, and are neither in a cut nor settled."""
        self._newest_step = -1
        """The step of the newest weights: the trainer is in the next one, or waits for its batch."""
        self._begun_at_s: float | None = None
        """When that step began; None while it waits."""
        self._last_cut_step = 0
        self._steps_s: deque[float] = deque(maxlen=NUM_STEPS)
        """How long recent steps took, without waiting for their batch, from weights to weights."""
        self._error_s = self._late_share = 0.0
        self.look_in_s = MAX_LOOK_S
        """When to ask again where nothing has changed."""

    # what it is told

    def note_admitted(self, groups: Iterable[tuple[str, str]], *, now: float) -> None:
        """Note groups that have tickets now: of each its id and its task."""
        self._open.update({group_id: _Admitted(task, now) for group_id, task in groups})

    def note_cut(self, cut: Cut, *, now: float) -> None:
        """Note an entry of the journal."""
        if cut.kind in (CutKind.BEGIN, CutKind.BRANCH):
            self._last_cut_step, self._begun_at_s = min(self._last_cut_step, cut.step), None
        if cut.kind is not CutKind.CUT:
            return
        durations = [group.duration_s for group in cut.groups if group.duration_s]
        if durations and self._can_predict:
            lead_s = self._all.quantile(QUANTILE)
            self._late_share = fmean(duration_s > lead_s for duration_s in durations)
        for group in cut.groups:
            self._open.pop(group.group_id, None)
            self._trains.append(True)
            if group.duration_s:
                self._all.add(group.duration_s)
                most = NUM_BATCHES * self._batch_groups
                self._of_task.setdefault(group.workflow, Durations(most)).add(group.duration_s)
        self._last_cut_step = cut.step
        if self._begun_at_s is None and cut.step == self._newest_step + 1:
            self._begun_at_s = now

    def note_outcome(self, outcome: Outcome) -> None:
        """Note the end of a group that is not trained."""
        if outcome.kind.settles and outcome.kind is not OutcomeKind.TRAINED:
            self._open.pop(outcome.group_id, None)
            self._trains.append(False)

    def note_newest(self, step: int, *, now: float) -> None:
        """Note the newest weights, by the step that made them."""
        if step == self._newest_step:
            return
        if step == self._newest_step + 1 and self._begun_at_s is not None:
            took_s = now - self._begun_at_s
            self._error_s = took_s - median(self._steps_s) if self._steps_s else 0.0
            self._steps_s.append(took_s)
        self._newest_step = step
        self._begun_at_s = now if self._last_cut_step > step else None

    # what it is asked

    def num_wanted(self, accounts: Accounts, *, now: float) -> int:
        """Return how many groups are to be admitted now; set when to ask again."""
        self.look_in_s = MAX_LOOK_S
        if not self._can_predict or self.must_not_hold(accounts):
            return accounts.num_credits
        beyond = accounts.num_beyond(accounts.held_step + 1)
        return min(accounts.num_credits, max(self._batch_groups - beyond, self._num_short(accounts, now)))

    def must_not_hold(self, accounts: Accounts) -> bool:
        """Say whether the trainer waits for a batch, as far as the journal and the newest weights tell."""
        return self._begun_at_s is None or not accounts.journal.is_cut(self._newest_step + 1)

    def report(self, accounts: Accounts, *, now: float) -> dict[str, Any]:
        """Say what is predicted, and how well that was: what ``Controller.report`` has of it."""
        if not self._can_predict:
            return {"num_held_back": 0}
        return {
            "num_held_back": accounts.num_credits - self.num_wanted(accounts, now=now),
            "predicted_step_s": round(median(self._steps_s), 3),
            "step_error_s": round(self._error_s, 3),
            "predicted_duration_s": round(self._all.quantile(QUANTILE), 3),
            "late_share": round(self._late_share, 3),
        }

    # inside

    @property
    def _can_predict(self) -> bool:
        return len(self._all) >= max(1, self._min_durations) and len(self._steps_s) >= self._min_steps

    def _num_short(self, accounts: Accounts, now: float) -> int:
        """Return how many more groups it takes for the batches that must be begun now."""
        step_s, lead_s = median(self._steps_s), self._all.quantile(QUANTILE)
        begun_at_s = now if self._begun_at_s is None else self._begun_at_s
        starts_at_s = max(begun_at_s + step_s, now)
        trains = (self._trains.count(True) + 1) / (len(self._trains) + 1)
        num_beyond = accounts.num_beyond(self._newest_step + 1)
        num_known = Counter(self._open.values())
        num_sure = max(0, num_beyond - num_known.total())  # in later cuts, or admitted before this controller began
        num_wanted = 0
        for batch in range(1, math.ceil((num_beyond + accounts.num_credits) / self._batch_groups) + 1):
            if now < starts_at_s - lead_s:
                self.look_in_s = min(self.look_in_s, max(starts_at_s - lead_s - now, MIN_LOOK_S))
                break
            chance = self._all.share_within(starts_at_s - now)
            # Where it is too late for any other group, those that are there are waited for: they are to be enough.
            until_s = starts_at_s if chance >= LEAST_CHANCE else math.inf
            expected, variance = float(num_sure), 0.0
            for (task, at_s), count in num_known.items():
                share = trains * self._of_task.get(task, self._all).share_within(until_s - at_s)
                expected += count * share
                variance += count * share * (1 - share)
            short = batch * self._batch_groups - 0.5 - (expected - math.sqrt(variance))
            num_wanted = max(num_wanted, math.ceil(short / (trains * max(chance, LEAST_CHANCE))))
            starts_at_s += step_s
        return num_wanted
