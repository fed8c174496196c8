"""Waiting for due groups leaves no length bias (P7): what is trained is what was admitted, however long it took.

The production rules (books, admission, planner) over a clock that is turned by hand: an episode takes as long
as its prompt is hard, and harder prompts earn less. Dropping what comes too late is biased, which shows that the
measure would tell.
"""

import heapq
import random
from collections.abc import Sequence
from typing import Literal

import pytest

from areal_async.config.settings import Settings
from areal_async.controller.accounts import Accounts
from areal_async.controller.admission import next_admission
from areal_async.controller.sampler import Sampler
from areal_async.protocol.journal import Journal
from areal_async.protocol.run_state import ServerState
from areal_async.protocol.staleness import max_groups_in_flight
from areal_async.protocol.types import (
    Cut,
    CutKind,
    GroupId,
    OutcomeKind,
    Slot,
    SlotStatus,
    StoredMessage,
    Ticket,
    Version,
    mean,
)
from areal_async.trainer.batch.cut import RetryLater, Settle, StreamRoom
from areal_async.trainer.batch.planner import BatchPlanner

NUM_PROMPTS = 5000
GROUP_SIZE = 2
BATCH_GROUPS = 4
MAX_STALENESS = 2
NUM_STEPS = 200
STEP_S = 1.0
WhenStale = Literal["wait", "mask", "drop"]


class World:
    """A run whose nodes, trainer and servers are events in one queue."""

    def __init__(self, when_stale: WhenStale, *, seed: int) -> None:
        self._random = random.Random(seed)
        self.difficulty = [self._random.lognormvariate(0.0, 1.0) for _ in range(NUM_PROMPTS)]
        """Of each prompt; also the seconds that an episode takes, about."""
        in_flight = max_groups_in_flight(max_staleness=MAX_STALENESS, batch_groups=BATCH_GROUPS)
        self._accounts = Accounts(max_groups_in_flight=in_flight)
        self._accounts.add_cut(Cut(kind=CutKind.BEGIN, lineage=1, step=0), sequence=1)
        self._sampler = Sampler(NUM_PROMPTS, seed=seed)
        rollout = {
            "batch_groups": BATCH_GROUPS, "min_group_size": 1, "max_staleness": MAX_STALENESS,
            "when_stale": when_stale, "episode_deadline_s": 1e9,
        }  # fmt: skip
        settings = Settings.model_validate({"run": {"steps": NUM_STEPS, "seed": seed}, "rollout": rollout})
        self._planner: BatchPlanner[int] = BatchPlanner(settings, Journal(), lineage=1)
        self._events: list[tuple[float, int, str, Ticket | None, int]] = []
        self._num_events = 0
        self._now = 0.0
        self._held = Version(1, 0)
        self._cuts: dict[int, Cut] = {}
        self._is_training = False
        self.admitted: list[GroupId] = []
        self.trained: list[GroupId] = []

    def run(self) -> None:
        """Turn the clock until the last step is trained."""
        self._hold(0)
        self._planner.allow(1)
        self._act()
        while self._held.step < NUM_STEPS:
            self._now, _, what, ticket, sibling = heapq.heappop(self._events)
            if what == "trained":
                self._is_training = False
                self._hold(self._held.step + 1)
                self._planner.allow(self._held.step + 1)
            else:
                assert ticket is not None
                self._store(ticket, sibling)
            self._act()

    def _push(self, after_s: float, what: str, ticket: Ticket | None = None, sibling: int = 0) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self._now + after_s, self._num_events, what, ticket, sibling))

    def _hold(self, step: int) -> None:
        self._held = Version(1, step)
        server = ServerState(server_id="s", node_id="n", url="", version=str(self._held))
        self._accounts.hold([server], newest=self._held)

    def _store(self, ticket: Ticket, sibling: int) -> None:
        self._num_events += 1
        slot = Slot(
            sibling=sibling,
            sample_uid=f"{ticket.group_id}.{sibling}",
            status=SlotStatus.SCORED,
            oldest=ticket.version,
            newest=str(self._held),
        )
        message = StoredMessage(
            group_id=ticket.group_id, workflow="w", ticket_version=ticket.version, num_failed_attempts=0,
            group_size=GROUP_SIZE, slots=[slot], sequence=self._num_events, num_bytes=1,
        )  # fmt: skip
        self._planner.receive(message, self._num_events)

    def _act(self) -> None:
        self._admit()
        self._decide()
        self._admit()
        step = self._held.step + 1
        if not self._is_training and step in self._cuts:
            self._is_training = True
            self._planner.allow(step + 1)
            self._decide()
            self.trained += [GroupId.parse(group.group_id) for group in self._cuts[step].groups]
            self._push(STEP_S, "trained")

    def _admit(self) -> None:
        while admission := next_admission(self._accounts, self._sampler, last_step=NUM_STEPS):
            for item in admission.items:
                self.admitted.append(item.group_id)
                ticket = Ticket(
                    group_id=str(item.group_id), workflow="w", row={}, group_size=GROUP_SIZE,
                    version=str(admission.version),
                )  # fmt: skip
                self._planner.add_ticket(ticket)
                for sibling in range(GROUP_SIZE):
                    duration_s = self.difficulty[item.group_id.index] * self._random.uniform(0.8, 1.2)
                    self._push(duration_s, "stored", ticket, sibling)
            self._accounts.admitted = admission.record

    def _decide(self) -> None:
        while not isinstance(decision := self._planner.decide(now=self._now, room=StreamRoom.AMPLE), RetryLater):
            match decision:
                case Settle(group_ids, kind, reason):
                    outcomes = self._planner.of_untrained(group_ids, kind, reason=reason, step=self._planner.step)
                    self._planner.note_recorded(outcomes)
                    self._planner.release(group_ids)
                    for outcome in outcomes:
                        assert outcome.kind is OutcomeKind.STALE
                        self._accounts.add_outcome(outcome)
                case Cut() as entry:
                    self._accounts.add_cut(entry, sequence=entry.step + 1)
                    self._planner.note_written(entry)
                    if entry.kind is CutKind.END:
                        return
                    self._cuts[entry.step] = entry

    def mean_difficulty(self, groups: Sequence[GroupId]) -> float:
        return mean([self.difficulty[group.index] for group in groups])

    def mean_reward(self, groups: Sequence[GroupId]) -> float:
        return mean([1 / (1 + self.difficulty[group.index]) for group in groups])


def ran(when_stale: WhenStale, *, seed: int) -> World:
    world = World(when_stale, seed=seed)
    world.run()
    assert len(set(world.trained)) == len(world.trained), "no group twice"
    return world


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("when_stale", ["wait", "mask"])
def test_what_is_trained_is_as_hard_and_as_long_as_what_was_admitted(when_stale: WhenStale, seed: int) -> None:
    world = ran(when_stale, seed=seed)

    assert world.mean_difficulty(world.trained) == pytest.approx(world.mean_difficulty(world.admitted), rel=0.06)
    assert world.mean_reward(world.trained) == pytest.approx(world.mean_reward(world.admitted), rel=0.06)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_waiting_trains_every_group_that_was_admitted_early_enough(seed: int) -> None:
    world = ran("wait", seed=seed)

    in_flight = max_groups_in_flight(max_staleness=MAX_STALENESS, batch_groups=BATCH_GROUPS)
    assert set(world.admitted[: -2 * in_flight]) <= set(world.trained)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_dropping_what_comes_too_late_favours_the_short_and_easy(seed: int) -> None:
    world = ran("drop", seed=seed)

    assert world.mean_difficulty(world.trained) < 0.75 * world.mean_difficulty(world.admitted)
    assert world.mean_reward(world.trained) > 1.05 * world.mean_reward(world.admitted)
