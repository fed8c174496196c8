"""A slot counts once, whatever is delivered again, and a settled group stays settled."""

import pickle
import random

import msgspec

from areal_async.config.settings import Settings
from areal_async.protocol.journal import Journal
from areal_async.protocol.types import Outcome, OutcomeKind, Slot, SlotStatus, StoredMessage, Ticket
from areal_async.trainer.batch.planner import BatchPlanner


def _slot(sibling: int, producer: str = "a", status: SlotStatus = SlotStatus.SCORED) -> Slot:
    return Slot(sibling=sibling, sample_uid=f"{sibling}.{producer}", status=status, oldest="1-0", newest="1-0")


def _message(*siblings: int, sequence: int, producer: str = "a") -> StoredMessage:
    return StoredMessage(
        group_id="0-0-0",
        workflow="w",
        ticket_version="1-0",
        num_failed_attempts=0,
        group_size=2,
        slots=[_slot(sibling, producer) for sibling in siblings],
        sequence=sequence,
        num_bytes=10,
    )


def _kinds(outcomes: list[Outcome]) -> list[OutcomeKind]:
    return [outcome.kind for outcome in outcomes]


TICKET = Ticket(group_id="0-0-0", workflow="w", row={}, group_size=2, version="1-0")


def test_a_ticket_opens_a_group_before_any_slot_is_stored() -> None:
    planner = _planner(is_caught_up=False)

    assert planner.add_ticket(TICKET)
    assert not planner.add_ticket(TICKET)
    assert not planner.open["0-0-0"].is_complete


def test_a_redelivery_replaces_its_delivery_and_counts_nothing_twice() -> None:
    planner = _planner(is_caught_up=False)
    planner.receive(_message(0, sequence=5), "first")

    assert planner.receive(_message(0, sequence=5), "again") == []

    assert planner.messages.num_bytes == 10
    assert _end(planner, "0-0-0") == ["again"]
    assert planner.messages.num_bytes == 0


def test_what_comes_for_a_group_that_ended_is_late_unless_it_was_there_before() -> None:
    planner = _planner()
    planner.receive(_message(0, sequence=5), "used")
    _end(planner, "0-0-0")

    assert planner.receive(_message(0, sequence=5), "used, again") == []
    assert _kinds(planner.receive(_message(0, 1, sequence=6, producer="b"), "late")) == [OutcomeKind.LATE] * 2
    assert planner.receive(_message(0, 1, sequence=6, producer="b"), "late, again") == []
    failed = msgspec.structs.replace(_message(sequence=7), slots=[_slot(1, status=SlotStatus.FAILED)])
    assert planner.receive(failed, "nothing that could be trained") == []


def test_slots_that_were_there_when_their_group_closed_are_not_late_when_delivered_again() -> None:
    planner = _planner()
    planner.receive(_message(0, 1, sequence=5), "first")
    _end(planner, "0-0-0")

    assert planner.receive(_message(0, 1, sequence=5), "again") == []
    assert not planner.add_ticket(TICKET)


def test_nothing_is_late_that_may_have_been_used_by_an_older_lineage() -> None:
    planner = _planner(is_caught_up=False)
    _end(planner, "0-0-0")

    assert planner.receive(_message(0, sequence=5), "stored before this one began") == []
    planner.is_caught_up = True
    assert _kinds(planner.receive(_message(0, sequence=6, producer="b"), "since")) == [OutcomeKind.LATE]


def test_a_sequence_that_the_broker_uses_again_loses_no_slot() -> None:
    planner = _planner()
    planner.receive(_message(0, sequence=5), "lost by the broker")
    _end(planner, "0-0-0")
    other = msgspec.structs.replace(_message(0, 1, sequence=5), group_id="0-1-0")

    assert planner.receive(other, "another group's") == []

    assert planner.open["0-1-0"].is_complete


def test_a_late_duplicate_of_a_group_that_ended_long_ago_is_late_and_nothing_else_is_kept_of_ten_thousand() -> None:
    planner, chance = _planner(), random.Random(1)
    sequence = 0
    for epoch in range(20):
        for index in chance.sample(range(500), 500):
            sequence += 1
            message = msgspec.structs.replace(_message(0, 1, sequence=sequence), group_id=f"{epoch}-{index}-0")
            planner.receive(message, "used")
            _end(planner, message.group_id)
    before = _size_of(planner)
    late = msgspec.structs.replace(_message(0, sequence=sequence + 1, producer="b"), group_id="3-17-0")

    outcomes = planner.receive(late, "late")

    assert [(one.kind, one.sample_uid) for one in outcomes] == [(OutcomeKind.LATE, "0.b")]
    assert planner.release_received(late, outcomes) == ["late"]
    assert _size_of(planner) <= before < 16 << 10


def _planner(*, is_caught_up: bool = True) -> BatchPlanner[str]:
    settings = Settings.model_validate(
        {"run": {"steps": 9}, "rollout": {"batch_groups": 2, "min_group_size": 2, "max_staleness": 1}}
    )
    planner: BatchPlanner[str] = BatchPlanner(settings, Journal(), lineage=1)
    planner.is_caught_up = is_caught_up
    return planner


def _end(planner: BatchPlanner[str], group_id: str) -> list[str]:
    """End a group; return the deliveries that may be acked then."""
    planner.note_recorded(planner.of_untrained([group_id], OutcomeKind.STALE, reason="", step=1))
    return planner.release([group_id])


def _size_of(planner: BatchPlanner[str]) -> int:
    """Bytes, as far as they are not shared."""
    return len(pickle.dumps(planner))
