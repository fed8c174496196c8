"""What a node owes the ticket that it leases: nothing when the group is settled, else a slot for every sibling.

Pure. The ticket is acknowledged when nothing is owed any more, and never before.
"""

from collections.abc import Iterable

from areal_async.protocol.journal import Journal
from areal_async.protocol.types import StoredMessage, Ticket


def is_settled(journal: Journal, ticket: Ticket) -> bool:
    """Say whether the ticket's group has ended, as the log says: it is owed nothing."""
    return ticket.group_id in journal.settled


def missing_siblings(ticket: Ticket, stored: Iterable[StoredMessage]) -> list[int]:
    """Return the siblings of which no slot is stored, whoever produced the others."""
    held = {slot.sibling for message in stored for slot in message.slots}
    return [sibling for sibling in range(ticket.group_size) if sibling not in held]
