"""A slot counts once, whatever is delivered again, and a settled group stays settled."""

import msgspec

from areal_async.trainer.inventory import Inventory
from areal_async.types import CutGroup, CutSlot, Outcome, OutcomeKind, Slot, SlotStatus, StoredMessage, Ticket


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
    inventory: Inventory[str] = Inventory()

    assert inventory.add_ticket(TICKET)
    assert not inventory.add_ticket(TICKET)
    assert not inventory.open["0-0-0"].is_complete


def test_a_redelivery_replaces_its_delivery_and_counts_nothing_twice() -> None:
    inventory: Inventory[str] = Inventory()
    inventory.add_message(_message(0, sequence=5), "first")

    assert inventory.add_message(_message(0, sequence=5), "again") == []

    assert inventory.stored_bytes == 10
    assert inventory.release(["0-0-0"]) == ["again"]
    assert inventory.stored_bytes == 0


def test_what_comes_for_a_cut_group_is_late_unless_the_cut_holds_it() -> None:
    inventory: Inventory[str] = Inventory()
    cut = CutGroup(group_id="0-0-0", workflow="w", slots=[CutSlot(slot=_slot(0), sequence=5)])
    inventory.close_cut([cut])

    assert inventory.add_message(_message(0, sequence=5), "held by the cut") == []
    assert _kinds(inventory.add_message(_message(0, 1, sequence=6, producer="b"), "late")) == [OutcomeKind.LATE] * 2
    failed = msgspec.structs.replace(_message(sequence=7), slots=[_slot(1, status=SlotStatus.FAILED)])
    assert inventory.add_message(failed, "the cut never named failed siblings") == []


def test_slots_that_were_there_when_their_group_closed_are_not_late_when_delivered_again() -> None:
    inventory: Inventory[str] = Inventory()
    inventory.add_message(_message(0, 1, sequence=5), "first")
    inventory.close(["0-0-0"])
    inventory.release(["0-0-0"])

    assert inventory.add_message(_message(0, 1, sequence=5), "again") == []
    assert not inventory.add_ticket(TICKET)
