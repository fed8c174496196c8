"""One ticket: every missing sibling of its group is sampled, scored and stored, or stored as what became of it.

Invariant: the ticket is acknowledged only after every slot is stored. A node that gets it again runs only the
slots that are missing, with the sampling that holds then: an operator may have changed it since.
"""

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import anyio
import msgspec
import structlog

from areal_async.bus import Delivery
from areal_async.config.settings import MESSAGE_BYTES
from areal_async.errors import PipelineError, WireError
from areal_async.inference.pool import SiblingGroup
from areal_async.process.failpoints import failpoint
from areal_async.protocol.types import StoredMessage, Ticket
from areal_async.protocol.wire import decode_headers
from areal_async.rollout.lease import KeptLease, returned_unless_done
from areal_async.rollout.node_context import NodeContext
from areal_async.rollout.publish import Outbox
from areal_async.rollout.row_images import read_row
from areal_async.rollout.settled import SettledGroups
from areal_async.rollout.slots import SlotSpec, missing_siblings
from areal_async.rollout.user_code.loop_block_report import Work
from areal_async.rollout.workflow_call import WorkflowCall
from areal_async.telemetry import spans, wait_graph

log = structlog.get_logger()


async def run_ticket(node: NodeContext, ticket: Ticket, delivery: Delivery) -> None:
    """Run the siblings that are missing and acknowledge the ticket.

    consumes:     a leased ticket whose group is not settled
    waits for:    the inference servers, then room in the stream
    produces:     a stored slot for every sibling, failures included
    unblocked by: the servers; the stream having room
    When cancelled, what is finished is stored and the ticket given back.
    """
    with (
        wait_graph.doing(wait_graph.group(ticket.group_id), waiter=wait_graph.node(node.node_id)),
        spans.leased(ticket, delivery, node_id=node.node_id),
    ):
        async with returned_unless_done(delivery):
            async with KeptLease(delivery, node.settings.ticket_heartbeat_s):
                stored = await stored_messages(node, ticket) if delivery.num_delivered > 1 else []
                row = await read_row(node, ticket, ticket.group_id)
                if row.num_missing and await SettledGroups(node.bus).among([ticket]):
                    log.info("ticket.over", group_id=ticket.group_id)
                else:
                    await GroupRun(node, ticket, row.cells, missing_siblings(ticket, stored)).run()
            failpoint("node.before_ack")
            await delivery.ack()
            failpoint("node.after_ack")


async def stored_messages(node: NodeContext, ticket: Ticket) -> list[StoredMessage]:
    """Return what is stored of a ticket's group."""
    names = node.bus.names
    subject = names.trajectories(ticket.workflow, ticket.group_id)
    stored: list[StoredMessage] = []
    async with node.reading:
        async for message in node.bus.find_messages(names.trajectories_stream, subject):
            try:
                found = decode_headers(message.headers, sequence=message.sequence, num_bytes=len(message.data))
            except WireError:
                continue  # the trainer makes it a dead letter
            stored.append(found)
    log.info("ticket.redelivered", group_id=ticket.group_id, num_stored=sum(len(message.slots) for message in stored))
    return stored


class GroupRun:
    """One group on its way from a ticket to the stream.

    Invariant: when ``run`` returns, every one of its siblings is stored, or stored as what became of it.
    """

    def __init__(self, node: NodeContext, ticket: Ticket, row: dict[str, Any], siblings: Sequence[int]) -> None:
        """Take the siblings that are to be run, with the settings of this moment: what is compared is sampled alike.

        Args:
            row: the ticket's, with its images.
        """
        self._node = node
        self._ticket = ticket
        self._prompt = msgspec.structs.replace(ticket.prompt, row=row)
        self._siblings = siblings
        self._requests = SiblingGroup(number=ticket.number)
        self._workflow = node.workflow(ticket.workflow, node.now)
        self._producer = f"{node.node_id}.{secrets.token_hex(4)}"
        self._outbox = Outbox(
            node.bus,
            ticket,
            producer=self._producer,
            num_expected=len(siblings),
            linger_s=node.now.rollout.linger_ms / 1000,
            backpressure=node.backpressure,
            publish_log=node.publish_log,
            max_bytes=self._workflow.rollout.max_payload_bytes if self._workflow.sees_group else MESSAGE_BYTES,
        )

    async def run(self) -> None:
        """Store every sibling.

        Raises:
            PipelineError: one was never stored.
        """
        self._node.counts.num_groups_running += 1
        try:
            with ExitStack() as storing:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._outbox.run)
                    await self._run_calls()
                    storing.enter_context(wait_graph.on(wait_graph.BROKER, "its slots to be stored by"))
        finally:
            self._node.counts.num_groups_running -= 1
        if self._outbox.num_left:
            raise PipelineError(
                f"group {self._ticket.group_id}: {self._outbox.num_left} of its slots were never stored"
            )

    async def _run_calls(self) -> None:
        """Call the workflow for each sibling, side by side; one that sees the group once, for all of them."""
        async with anyio.create_task_group() as calls:
            if not self._workflow.sees_group:
                for sibling in self._siblings:
                    calls.start_soon(self._run_call, [sibling])
            elif self._siblings:
                calls.start_soon(self._run_call, range(self._ticket.group_size))

    async def _run_call(self, siblings: Sequence[int]) -> None:
        """Run the one call of the workflow that fills the slots of these siblings."""
        ticket, workflow = self._ticket, self._workflow
        slots = [
            workflow.slot(ticket.group_id, sibling, producer=self._producer, version=ticket.version)
            for sibling in siblings
        ]
        name = wait_graph.slot(ticket.group_id, siblings[0])
        counts = self._node.counts
        counts.num_trajectories_running += len(slots)
        try:
            with (
                wait_graph.doing(name, "the workflow of"),
                structlog.contextvars.bound_contextvars(sample_uid=slots[0].sample_uid),
                spans.episode(ticket, siblings) as span,
            ):
                policies = [
                    self._node.policy(workflow.rollout.sampling, slot.sample_uid, slot.max_sequence_tokens)
                    for slot in slots
                ]
                for policy in policies:
                    policy.record.siblings = self._requests
                    policy.record.refuses_truncation = not workflow.rollout.accept_truncation_bias
                call = WorkflowCall(workflow, policies, work=self._work(slots[0], name), clock=self._node.clock)
                trajectories = await call.fill(self._prompt, slots)
                spans.note_trajectories(span, trajectories)
        finally:
            counts.num_trajectories_running -= len(slots)
        for trajectory, policy in zip(trajectories, policies, strict=True):
            if trajectory.slot.sibling in self._siblings:
                counts.add(trajectory.slot)
                self._outbox.put(trajectory, policy.record.images)

    def _work(self, first: SlotSpec, name: str) -> Work:
        return Work(
            workflow=self._workflow.name,
            name=name,
            ticket=self._ticket,
            sibling=first.sibling,
            is_whole_group=self._workflow.sees_group,
            sample_uid=first.sample_uid,
        )
