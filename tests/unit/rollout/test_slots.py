"""A leased ticket is owed a slot for every sibling of which none is stored."""

from areal_async.protocol.types import Slot, SlotStatus, StoredMessage, Ticket
from areal_async.rollout.slots import missing_siblings

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
