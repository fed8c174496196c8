"""What a node owes for the one before it that ended itself: the slot that held up its event loop is stored as failed.

Before any ticket is leased, so that nobody runs that slot again. Where a sibling of its group held up a loop before, it
is the prompt: then the others that are missing are stored as failed as well, instead of ending a node for each.
"""

import secrets

import structlog

from areal_async.protocol.evaluations import EvalResult, EvalTicket
from areal_async.protocol.types import Slot, SlotStatus, StoredMessage, Ticket
from areal_async.rollout.arm_answers import publish_failure
from areal_async.rollout.evaluate import publish_result
from areal_async.rollout.group import stored_messages
from areal_async.rollout.node_context import NodeContext
from areal_async.rollout.publish import Outbox
from areal_async.rollout.settled import SettledGroups
from areal_async.rollout.slots import failed_trajectory, missing_siblings
from areal_async.rollout.user_code.loop_block_report import HELD_UP, LoopBlockFile, Work
from areal_async.telemetry import wait_graph

log = structlog.get_logger()

RowKey = tuple[str, int]
"""An answer that an evaluation asks for, and the number of the attempt at that."""


def row_key(ticket: EvalTicket) -> RowKey:
    return ticket.answer, ticket.attempt


async def recover(node: NodeContext, file: LoopBlockFile) -> set[RowKey]:
    """Store what became of the work that held up this node's loop in its earlier life.

    consumes:     the file that it left
    waits for:    room in the stream
    produces:     a failed slot for that work, or the result of a held-out row or of an arm's prompt
    unblocked by: the stream having room

    Returns:
        Rows of evaluations, and prompts of arms, that have their result and need only be acknowledged.
    """
    block = file.read()
    ended: set[RowKey] = set()
    if block is not None and (work := block.work) is not None:
        if work.ticket is not None:
            await _store_slots(node, work.ticket, work, block.reason)
        if (row := work.eval_ticket) is not None:
            result = EvalResult(eval_id=row.eval_id, index=row.index, error=block.reason, sample=row.sample)
            await publish_result(node, row, result)
            ended.add(row_key(row))
        if (asked := work.arm_ticket) is not None:
            await publish_failure(node, asked, block.reason)
            ended.add(row_key(asked))
        log.warning("blockage.recorded", workflow=work.workflow, slot=work.name, at=block.place)
    file.remove()
    return ended


async def _store_slots(node: NodeContext, ticket: Ticket, culprit: Work, reason: str) -> None:
    if await SettledGroups(node.bus).among([ticket]):
        return
    reasons = _reasons(ticket, await stored_messages(node, ticket), culprit, reason)
    outbox = Outbox(
        node.bus,
        ticket,
        producer=f"{node.node_id}.{secrets.token_hex(4)}",
        num_expected=len(reasons),
        linger_s=0.0,
        backpressure=node.backpressure,
        publish_log=node.publish_log,
    )
    for sibling, why in reasons.items():
        is_culprit = sibling == culprit.sibling
        uid = culprit.sample_uid if is_culprit else f"{ticket.group_id}.{sibling}.{node.node_id}.not_run"
        slot = Slot(
            sibling=sibling, sample_uid=uid, status=SlotStatus.FAILED, oldest=ticket.version, newest=ticket.version
        )
        outbox.put(failed_trajectory(slot, why))
    with wait_graph.on(wait_graph.BROKER, "slots to be stored by", waiter=wait_graph.node(node.node_id)):
        await outbox.run()


def _reasons(ticket: Ticket, stored: list[StoredMessage], culprit: Work, reason: str) -> dict[int, str]:
    """Return the siblings to store as failed, each with its reason; none where that was done before."""
    slots = [slot for message in stored for slot in message.slots]
    if any(slot.sample_uid == culprit.sample_uid for slot in slots):
        return {}
    missing = missing_siblings(ticket, stored)
    if culprit.is_whole_group:
        return dict.fromkeys(missing, reason)
    reasons = {culprit.sibling: reason} if culprit.sibling in missing else {}
    if any(HELD_UP in slot.reason for slot in slots):
        others = f"workflow {ticket.workflow}: not run, as two siblings {HELD_UP} of a node; the last, {reason}"
        reasons |= {sibling: others for sibling in missing if sibling != culprit.sibling}
    return reasons
