"""A ticket is owed a slot for every sibling, unless its group has ended for every reader of the log."""

from areal_async.protocol.journal import Journal
from areal_async.protocol.types import Cut, CutKind, Outcome, OutcomeKind, Slot, SlotStatus, StoredMessage, Ticket
from areal_async.rollout.duties import is_settled, missing_siblings

TICKET = Ticket(group_id="0-0-0", workflow="w", row={}, group_size=3, version="1-0")


def _message(*siblings: int) -> StoredMessage:
    return StoredMessage(
        group_id="0-0-0",
        workflow="w",
        ticket_version="1-0",
        num_failed_attempts=0,
        group_size=3,
        slots=[
            Slot(sibling=sibling, sample_uid=f"u{sibling}", status=SlotStatus.SCORED, oldest="1-0", newest="1-0")
            for sibling in siblings
        ],
        sequence=1,
        num_bytes=1,
    )


def test_only_what_nobody_has_stored_is_run() -> None:
    assert missing_siblings(TICKET, []) == [0, 1, 2]
    assert missing_siblings(TICKET, [_message(2), _message(0, 2)]) == [1]


def test_a_settled_group_is_owed_nothing() -> None:
    journal = Journal()
    journal.add_outcome(Outcome(group_id="0-0-0", kind=OutcomeKind.ABANDONED, lineage=1))

    assert is_settled(journal, TICKET)


def test_what_an_older_trainer_records_after_a_newer_one_began_settles_nothing() -> None:
    journal = Journal()
    journal.add_cut(Cut(kind=CutKind.BEGIN, lineage=2, step=0), sequence=1)
    journal.add_outcome(Outcome(group_id="0-0-0", kind=OutcomeKind.FAILED, lineage=1))

    assert not is_settled(journal, TICKET)
