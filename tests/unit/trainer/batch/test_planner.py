"""What is done next about the journal: nothing is thrown away for an accident, and nothing is waited for in vain."""

from typing import Literal

import msgspec
import pytest

from areal_async.config.live import settings_of_step
from areal_async.config.settings import RolloutSettings, Settings
from areal_async.errors import FencedError
from areal_async.protocol.journal import Journal
from areal_async.protocol.types import Cut, CutGroup, CutKind, Outcome, OutcomeKind, Slot, SlotStatus, StoredMessage
from areal_async.trainer.batch.cut import Decision, RetryLater, Settle, StreamRoom
from areal_async.trainer.batch.planner import OVER_AGE, BatchPlanner


def _message(
    index: int, *siblings: int, oldest: str = "1-0", newest: str = "", failed: bool = False, workflow: str = "w"
) -> StoredMessage:
    status = SlotStatus.FAILED if failed else SlotStatus.SCORED
    return StoredMessage(
        group_id=f"0-{index}-0",
        workflow=workflow,
        ticket_version=oldest,
        num_failed_attempts=0,
        group_size=2,
        slots=[
            Slot(
                sibling=one,
                sample_uid=f"{index}.{one}",
                status=status,
                reward=index % 2 * one,
                oldest=oldest,
                newest=newest or oldest,
            )
            for one in siblings
        ],
        sequence=10 * index + sum(siblings),
        num_bytes=1,
    )


class Bench:
    """A planner about to cut a step."""

    def __init__(
        self,
        *,
        lineage: int = 1,
        step: int = 1,
        when_stale: Literal["wait", "mask", "drop"] = "wait",
        filters_equal: bool = False,
        journal: Journal | None = None,
    ) -> None:
        rollout = {"batch_groups": 2, "min_group_size": 2, "max_staleness": 1, "when_stale": when_stale}
        other = {"workflow": "other.py", "dataset": {"seeds": [0, 1]}, "min_group_size": 1, "episode_deadline_s": 5.0}
        settings = Settings.model_validate(
            {
                "run": {"steps": 9},
                "tasks": [other],
                "rollout": {**rollout, "max_attempts": 2, "episode_deadline_s": 10.0},
                "algorithm": {"filter_equal_groups": filters_equal},
            }
        )
        self.planner: BatchPlanner[str] = BatchPlanner(settings, journal or Journal(), lineage=lineage)
        self.planner.step = step
        self.planner.allow(step)

    def add(self, *messages: StoredMessage) -> None:
        for message in messages:
            self.planner.receive(message, "delivery")

    def decide(self, *, now: float = 0.0) -> Decision:
        return self.planner.decide(now=now, room=StreamRoom.AMPLE)


def test_a_group_of_a_version_to_come_is_given_up_and_never_cut() -> None:
    bench = Bench(step=3)
    bench.add(_message(1, 0, 1, oldest="1-1", newest="1-3"), _message(2, 0, 1, oldest="1-2"))

    decision = bench.decide()

    reason = "its tokens are of a version that step 3 comes before"
    assert decision == Settle(["0-1-0"], OutcomeKind.ABANDONED, reason)


def test_a_full_batch_is_written_and_the_next_step_waits_to_be_allowed() -> None:
    bench = Bench()
    bench.add(_message(1, 0, 1), _message(2, 0, 1))

    decision = bench.decide()

    assert isinstance(decision, Cut)
    assert [group.group_id for group in decision.groups] == ["0-1-0", "0-2-0"]
    bench.planner.note_written(decision)
    assert bench.decide() == RetryLater("step 1 to be trained, before cutting step 2")


def test_a_group_that_cannot_train_is_settled_first() -> None:
    bench = Bench()
    bench.add(_message(1, 0, 1, failed=True), _message(2, 0, 1), _message(3, 0, 1))

    assert bench.decide() == Settle(["0-1-0"], OutcomeKind.FAILED, "")


def test_a_task_decides_how_many_scored_siblings_its_groups_need() -> None:
    bench = Bench()
    for index, workflow in ((1, "other"), (2, "w")):
        bench.add(_message(index, 0, workflow=workflow), _message(index, 1, workflow=workflow, failed=True))

    assert bench.decide() == Settle(["0-2-0"], OutcomeKind.FAILED, "")


def test_the_groups_of_a_task_are_waited_for_as_long_as_it_says() -> None:
    bench = Bench(step=2)
    bench.add(_message(1, 0), _message(2, 0, workflow="other"), _message(3, 0, workflow="other"))
    assert isinstance(bench.decide(now=0.0), RetryLater)

    reason = "still incomplete 65 s after the trainer began to wait for it"
    assert bench.decide(now=66.0) == Settle(["0-2-0", "0-3-0"], OutcomeKind.FAILED, reason)
    assert bench.decide(now=71.0) == Settle(["0-2-0", "0-3-0"], OutcomeKind.FAILED, reason)
    bench.planner.of_untrained(["0-2-0", "0-3-0"], OutcomeKind.FAILED, reason="", step=2)
    reason = "still incomplete 70 s after the trainer began to wait for it"
    assert bench.decide(now=71.0) == Settle(["0-1-0"], OutcomeKind.FAILED, reason)


def test_a_decision_makes_the_settings_of_a_task_once_however_many_of_its_groups_it_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    rollout_of = Settings.rollout_of

    def count(settings: Settings, workflow: str) -> RolloutSettings:
        made.append(workflow)
        return rollout_of(settings, workflow)

    bench = Bench(step=2)
    bench.add(*(_message(index, 0, workflow="other") for index in range(8)))
    monkeypatch.setattr(Settings, "rollout_of", count)

    decision = bench.decide()

    assert isinstance(decision, RetryLater)
    assert "8 groups" in decision.what_for
    assert made == ["other"]


@pytest.mark.parametrize("workflow", ["w", "other"])
def test_groups_of_equal_rewards_are_filtered_whatever_their_task(workflow: str) -> None:
    bench = Bench(filters_equal=True)
    bench.add(_message(1, 0, 1, workflow=workflow), _message(2, 0, 1, workflow=workflow))

    assert bench.decide() == Settle(["0-2-0"], OutcomeKind.FILTERED, "all rewards are 0")


def test_the_outcome_of_a_filtered_group_says_what_its_siblings_came_to() -> None:
    bench = Bench(filters_equal=True)
    bench.add(_message(1, 0, 1))

    (outcome,) = bench.planner.of_untrained(["0-1-0"], OutcomeKind.FILTERED, reason="", step=1)

    assert outcome.mean_reward == 0.5


def test_a_stop_ends_the_journal() -> None:
    bench = Bench()
    bench.add(_message(1, 0, 1), _message(2, 0, 1))
    bench.planner.is_stopping = True

    decision = bench.decide()

    assert isinstance(decision, Cut)
    assert decision.kind is CutKind.END


@pytest.mark.parametrize(("when_stale", "kind"), [("wait", OutcomeKind.ABANDONED), ("drop", OutcomeKind.STALE)])
def test_only_the_setting_that_drops_groups_over_the_bound_drops_them(
    when_stale: Literal["wait", "drop"], kind: OutcomeKind
) -> None:
    bench = Bench(step=3, when_stale=when_stale)
    bench.add(_message(1, 0, 1))

    assert bench.decide() == Settle(["0-1-0"], kind, OVER_AGE)


def test_what_only_a_branch_has_put_over_the_bound_is_tried_again() -> None:
    bench = Bench(lineage=2, step=2, when_stale="drop")
    bench.add(_message(1, 0, 1, oldest="1-1"))
    assert isinstance(bench.decide(), RetryLater)

    bench.planner.branch(after_step=0)

    assert bench.decide() == Settle(["0-1-0"], OutcomeKind.ABANDONED, OVER_AGE)


def test_the_newest_token_counts_where_it_lies_beyond_a_branch() -> None:
    bench = Bench(lineage=2, step=2)
    bench.planner.branch(after_step=0)
    bench.add(_message(1, 0, 1, oldest="1-0", newest="1-1"))

    assert bench.decide() == Settle(["0-1-0"], OutcomeKind.ABANDONED, OVER_AGE)


def test_a_due_group_is_waited_for_until_its_deadline() -> None:
    bench = Bench(step=2)
    bench.add(_message(1, 0), _message(2, 0, 1), _message(3, 0, 1))
    assert isinstance(bench.decide(now=0.0), RetryLater)
    assert isinstance(bench.decide(now=70.0), RetryLater)

    decision = bench.decide(now=70.5)

    assert isinstance(decision, Settle)
    assert (decision.group_ids, decision.kind) == (["0-1-0"], OutcomeKind.FAILED)


def test_tokens_of_a_newer_lineage_tell_a_zombie_what_it_is() -> None:
    bench = Bench()
    bench.add(_message(1, 0, 1, oldest="2-0"))

    with pytest.raises(FencedError, match="2-0"):
        bench.decide()


def test_nothing_is_released_before_its_outcome_is_stored() -> None:
    bench = Bench()
    bench.add(_message(1, 0, 1))
    outcomes: list[Outcome] = bench.planner.of_untrained(["0-1-0"], OutcomeKind.FAILED, reason="why", step=1)
    assert bench.planner.release(["0-1-0"]) == []

    bench.planner.note_recorded(outcomes)

    assert bench.planner.release(["0-1-0"]) == ["delivery"]


def test_groups_of_a_given_up_cut_keep_count_of_their_failures() -> None:
    group = CutGroup(group_id="0-1-0", workflow="w", slots=[], num_failed_attempts=1)
    bench = Bench(journal=Journal(given_up={"0-1-0": group}))

    outcome = bench.planner.of_untrained(["0-1-0"], OutcomeKind.FAILED, reason="why", step=1)[0]

    assert (outcome.kind, outcome.num_failed_attempts) == (OutcomeKind.DEAD, 2)


def test_a_message_whose_every_slot_lost_is_not_kept_for_a_checkpoint() -> None:
    bench = Bench()
    bench.add(_message(1, 0))
    again = _message(1, 0)
    again = msgspec.structs.replace(
        again, sequence=99, slots=[msgspec.structs.replace(again.slots[0], sample_uid="another producer's")]
    )

    unusable = bench.planner.receive(again, "loser")

    assert [outcome.kind for outcome in unusable] == [OutcomeKind.DUPLICATE]
    assert bench.planner.release_received(again, unusable) == ["loser"]
    assert bench.planner.messages.num_bytes == 1
    assert bench.planner.release_received(_message(1, 1), bench.planner.receive(_message(1, 1), "kept")) == []


def test_a_lower_bound_and_another_rate_stand_in_the_next_cut_and_no_group_beyond_it() -> None:
    bench = Bench(step=2)
    for index, version in ((1, "1-0"), (2, "1-1"), (3, "1-1")):
        bench.add(_message(index, 0, 1, oldest=version))
    assert isinstance(bench.decide(), Cut), "it was fresh enough before"

    changed = {"rollout.max_staleness": 0, "algorithm.eps_clip": 0.1}
    bench.planner.settings = settings_of_step(bench.planner.settings, lr=1e-6, numbers=changed)
    tried_again = bench.decide()
    assert tried_again == Settle(["0-1-0"], OutcomeKind.ABANDONED, "older than max_staleness")
    bench.planner.release(["0-1-0"])
    bench.planner.open.pop("0-1-0", None)
    decision = bench.decide()

    assert isinstance(decision, Cut)
    assert (decision.max_staleness, decision.lr) == (0, 1e-6)
    assert decision.numbers["algorithm.eps_clip"] == 0.1
    assert [group.group_id for group in decision.groups] == ["0-2-0", "0-3-0"]


def test_groups_whose_cut_was_given_up_end_before_anything_is_cut_anew() -> None:
    given_up = CutGroup(group_id="0-1-0", workflow="w", slots=[], num_failed_attempts=1)
    bench = Bench(journal=Journal(given_up={"0-1-0": given_up}))
    bench.add(_message(2, 0, 1), _message(3, 0, 1))

    assert bench.decide() == Settle(["0-1-0"], OutcomeKind.ABANDONED, "its cut was given up")
    bench.planner.note_recorded(bench.planner.of_untrained(["0-1-0"], OutcomeKind.ABANDONED, reason="", step=1))

    decision = bench.decide()
    assert isinstance(decision, Cut)
    assert [group.group_id for group in decision.groups] == ["0-2-0", "0-3-0"]


def test_the_groups_of_an_inherited_cut_are_not_cut_again_and_wait_for_its_checkpoint() -> None:
    inherited = Cut(lineage=1, step=1, groups=[CutGroup(group_id="0-1-0", workflow="w", slots=[])])
    bench = Bench(lineage=2, step=2, journal=Journal(cuts={1: inherited}))
    bench.add(_message(1, 0, 1), _message(2, 0, 1), _message(3, 0, 1))

    decision = bench.decide()

    assert isinstance(decision, Cut)
    assert [group.group_id for group in decision.groups] == ["0-2-0", "0-3-0"]
    outcomes = bench.planner.of_checkpoint(1)
    assert [(one.group_id, one.kind) for one in outcomes] == [("0-1-0", OutcomeKind.TRAINED)]
    bench.planner.note_recorded(outcomes)
    assert bench.planner.release_cuts(1) == ["delivery"]


def test_what_was_recorded_trained_in_a_given_up_cut_is_rolled_back_and_counts_as_no_failure() -> None:
    journal = Journal(own_lineage=2, own_step=1)
    cuts = [
        Cut(lineage=1, step=step, groups=[CutGroup(group_id=name, workflow="w", slots=[], num_failed_attempts=1)])
        for step, name in ((1, "0-1-0"), (2, "0-2-0"), (3, "0-3-0"))
    ]
    branch = Cut(kind=CutKind.BRANCH, lineage=2, step=1, branches={"2": 1})
    for entry in (*cuts, Cut(kind=CutKind.BEGIN, lineage=2, step=1), branch):
        journal.add_cut(entry, sequence=1)
        if entry.step == 3:
            for name in ("0-1-0", "0-2-0"):
                journal.add_outcome(Outcome(group_id=name, kind=OutcomeKind.TRAINED, lineage=1, step=2))
    bench = Bench(lineage=2, step=2, journal=journal)

    settled = bench.decide()

    assert isinstance(settled, Settle)
    assert list(settled.group_ids) == ["0-2-0", "0-3-0"]
    outcomes = bench.planner.of_untrained(settled.group_ids, settled.kind, reason=settled.reason, step=2)
    assert [(one.kind, one.num_failed_attempts) for one in outcomes] == [
        (OutcomeKind.ROLLED_BACK, 1), (OutcomeKind.ABANDONED, 1),
    ]  # fmt: skip
    bench.planner.note_recorded(outcomes)
    assert isinstance(bench.decide(), RetryLater)


def test_cuts_that_a_damaged_checkpoint_held_end_rolled_back_where_they_cannot_be_replayed() -> None:
    journal = Journal(own_lineage=2, own_step=0)
    journal.add_cut(Cut(lineage=1, step=1, groups=[CutGroup(group_id="0-1-0", workflow="w", slots=[])]), sequence=1)
    journal.add_outcome(Outcome(group_id="0-1-0", kind=OutcomeKind.TRAINED, lineage=1, step=1))
    bench = Bench(lineage=2, journal=journal)
    assert bench.planner.of_untrained(["0-1-0"], OutcomeKind.FAILED, reason="", step=1) == []

    given_up = bench.planner.give_up_cuts(after_step=0)

    (outcome,) = bench.planner.of_untrained(given_up[1], OutcomeKind.ABANDONED, reason="", step=1)
    assert outcome.kind is OutcomeKind.ROLLED_BACK
