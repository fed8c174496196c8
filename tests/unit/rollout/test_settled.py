"""A ticket needs no work once its group has ended for every reader of the log."""

from areal_async.protocol.journal import Journal
from areal_async.protocol.types import Cut, CutKind, Outcome, OutcomeKind, Ticket
from areal_async.rollout.settled import is_settled

TICKET = Ticket(group_id="0-0-0", workflow="w", row={}, group_size=3, version="1-0")


def test_a_settled_group_is_owed_nothing() -> None:
    journal = Journal()
    journal.add_outcome(Outcome(group_id="0-0-0", kind=OutcomeKind.ABANDONED, lineage=1))

    assert is_settled(journal, TICKET)


def test_what_an_older_trainer_records_after_a_newer_one_began_settles_nothing() -> None:
    journal = Journal()
    journal.add_cut(Cut(kind=CutKind.BEGIN, lineage=2, step=0), sequence=1)
    journal.add_outcome(Outcome(group_id="0-0-0", kind=OutcomeKind.FAILED, lineage=1))

    assert not is_settled(journal, TICKET)
