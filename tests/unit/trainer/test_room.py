"""A full stream cannot stop the run (P8): room is made at the least cost, and finished work is given up last."""

import pytest

from areal_async.config.settings import RolloutSettings, Settings
from areal_async.protocol.journal import Journal
from areal_async.protocol.types import Cut, CutKind, OutcomeKind, Slot, SlotStatus, StoredMessage, Ticket
from areal_async.trainer.batch.cut import RetryLater, Settle, StreamRoom
from areal_async.trainer.batch.planner import BatchPlanner

SETTINGS = Settings.model_validate(
    {"run": {"steps": 9}, "rollout": {"batch_groups": 2, "min_group_size": 1, "max_staleness": 1}}
)


class Desk:
    """A planner and a clock that stands still."""

    def __init__(self) -> None:
        self.planner: BatchPlanner[int] = BatchPlanner(SETTINGS, Journal(), lineage=1)
        self.planner.allow(SETTINGS.run.steps)
        self._sequence = 0

    def admit(self, group_id: str, *, version: str = "1-0") -> None:
        self.planner.add_ticket(Ticket(group_id=group_id, workflow="w", row={}, group_size=2, version=version))

    def store(self, group_id: str, *siblings: int, version: str = "1-0") -> None:
        self._sequence += 1
        slots = [
            Slot(
                sibling=sibling,
                sample_uid=f"{group_id}.{sibling}",
                status=SlotStatus.SCORED,
                oldest=version,
                newest=version,
            )
            for sibling in siblings
        ]
        message = StoredMessage(
            group_id=group_id, workflow="w", ticket_version=version, num_failed_attempts=0, group_size=2,
            slots=slots, sequence=self._sequence, num_bytes=10,
        )  # fmt: skip
        self.planner.receive(message, self._sequence)

    def decide(self, room: StreamRoom) -> Settle | Cut | RetryLater:
        return self.planner.decide(now=0.0, room=room)

    def write(self, room: StreamRoom) -> Cut:
        decision = self.decide(room)
        assert isinstance(decision, Cut)
        self.planner.note_written(decision)
        return decision

    def checkpoint(self, step: int) -> None:
        self.planner.note_recorded(self.planner.of_checkpoint(step))
        self.planner.release_cuts(step)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def train_a_step(desk: Desk) -> None:
    for group_id in ("0-0-0", "0-1-0"):
        desk.store(group_id, 0, 1)
    assert desk.write(StreamRoom.AMPLE).kind is CutKind.CUT


@pytest.mark.parametrize("room", [StreamRoom.SCARCE, StreamRoom.NONE])
def test_what_is_trained_is_checkpointed_first_and_once(desk: Desk, room: StreamRoom) -> None:
    train_a_step(desk)
    desk.store("0-2-0", 0)

    entry = desk.write(room)

    assert (entry.kind, entry.step) == (CutKind.CHECKPOINT, 1)
    assert desk.decide(room) == RetryLater("the checkpoint of step 1, which makes room in the stream")
    desk.checkpoint(1)
    assert desk.planner.messages.num_bytes == 10


def test_a_whole_batch_does_not_wait_for_the_checkpoint_that_is_asked_for(desk: Desk) -> None:
    train_a_step(desk)
    for group_id in ("0-2-0", "0-3-0"):
        desk.store(group_id, 0, 1, version="1-1")

    assert [desk.write(StreamRoom.NONE).kind for _ in range(2)] == [CutKind.CHECKPOINT, CutKind.CUT]


def test_with_some_room_left_nothing_is_given_up(desk: Desk) -> None:
    desk.store("0-0-0", 0)

    assert isinstance(desk.decide(StreamRoom.SCARCE), RetryLater)


def test_the_youngest_incomplete_group_is_given_up_to_be_tried_again(desk: Desk) -> None:
    for index in range(3):
        desk.store(f"0-{index}-0", 0)

    decision = desk.decide(StreamRoom.NONE)

    assert isinstance(decision, Settle)
    assert (decision.group_ids, decision.kind) == (["0-2-0"], OutcomeKind.ABANDONED)
    assert decision.kind.readmits


def test_a_due_group_without_room_for_its_first_slot_is_not_waited_for_until_it_fails(desk: Desk) -> None:
    train_a_step(desk)
    desk.checkpoint(1)
    desk.admit("0-9-0")
    for index in (2, 3):
        desk.store(f"0-{index}-0", 0, 1, version="1-1")
    assert isinstance(desk.decide(StreamRoom.AMPLE), RetryLater), "it is due in step 2"

    decision = desk.decide(StreamRoom.NONE)

    assert isinstance(decision, Settle)
    assert decision.group_ids == ["0-3-0"]
    assert decision.reason == "the stream was full, and this was its youngest complete group"


def test_with_nothing_stored_there_is_nothing_to_give_up(desk: Desk) -> None:
    desk.admit("0-0-0")

    assert isinstance(desk.decide(StreamRoom.NONE), RetryLater)


def test_a_stream_in_which_no_group_of_the_largest_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="room for a group of 8 trajectories"):
        RolloutSettings(max_stream_bytes=32 << 20)

    assert RolloutSettings(max_stream_bytes=32 << 20, max_trajectory_bytes=1 << 20).max_message_bytes > 1 << 20
