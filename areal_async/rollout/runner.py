"""One ticket: every sibling of its group is sampled, scored and stored, or stored as what became of it.

Invariant: the ticket is acknowledged only after every slot is stored. Whoever gets it again runs only the
slots that are missing, with the sampling that holds then: an operator may have changed it since.
"""

import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from copy import deepcopy
from typing import cast

import anyio
import structlog

from areal_async.api import GroupWorkflow, Workflow, is_group_workflow
from areal_async.bus import Delivery
from areal_async.config.settings import MESSAGE_BYTES
from areal_async.errors import PipelineError, WireError
from areal_async.process.failpoints import failpoint
from areal_async.protocol.types import SlotStatus, StoredMessage, Ticket, Trajectory
from areal_async.protocol.wire import decode_headers
from areal_async.rollout.duties import missing_siblings
from areal_async.rollout.endpoint.policy import ServedPolicy, heeding
from areal_async.rollout.episode import run_episode
from areal_async.rollout.group import run_group_episode
from areal_async.rollout.node_context import Counts, NodeContext
from areal_async.rollout.publish import Outbox
from areal_async.rollout.slots import SlotSpec
from areal_async.rollout.user_code.loop_block_report import Work
from areal_async.rollout.user_code.task_scope import working_on
from areal_async.telemetry import spans, wait_graph

RETURN_DEADLINE_S = 1.0
RETURN_DELAY_S = 1.0
"""A ticket given back at once could come straight back to a node that is about to end, and wait out its lease there."""

log = structlog.get_logger()


async def run_heartbeats(delivery: Delivery, interval_s: float) -> None:
    """Keep the lease until cancelled."""
    while True:
        await anyio.sleep(interval_s)
        await delivery.in_progress()


@asynccontextmanager
async def returned_unless_done(*deliveries: Delivery) -> AsyncIterator[None]:
    """Give tickets back at once when the block is left by cancellation or an error."""
    is_done = False
    try:
        yield
        is_done = True
    finally:
        if not is_done:
            with anyio.move_on_after(RETURN_DEADLINE_S, shield=True):
                for delivery in deliveries:
                    await delivery.nak(RETURN_DELAY_S)


async def run_ticket(place: NodeContext, ticket: Ticket, delivery: Delivery) -> None:
    """Run the siblings that are missing and acknowledge the ticket.

    consumes:     a leased ticket whose group is not settled
    waits for:    the inference servers, then room in the stream
    produces:     a stored slot for every sibling, failures included
    unblocked by: the servers; the stream having room
    When cancelled, what is finished is stored and the ticket given back.
    """
    with (
        wait_graph.doing(wait_graph.group(ticket.group_id), waiter=wait_graph.node(place.node_id)),
        spans.leased(ticket, delivery, node_id=place.node_id),
    ):
        async with returned_unless_done(delivery):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run_heartbeats, delivery, place.settings.ticket_heartbeat_s)
                stored = await stored_messages(place, ticket) if delivery.num_delivered > 1 else []
                await _run_siblings(place, ticket, missing_siblings(ticket, stored))
                tasks.cancel_scope.cancel()
            failpoint("node.before_ack")
            await delivery.ack()
            failpoint("node.after_ack")


async def stored_messages(place: NodeContext, ticket: Ticket) -> list[StoredMessage]:
    """Return what is stored of a ticket's group."""
    names = place.bus.names
    subject = names.trajectories(ticket.workflow, ticket.group_id)
    stored: list[StoredMessage] = []
    async with place.reading:
        async for message in place.bus.find_messages(names.trajectories_stream, subject):
            try:
                found = decode_headers(message.headers, sequence=message.sequence, num_bytes=len(message.data))
            except WireError:
                continue  # the trainer makes it a dead letter
            stored.append(found)
    log.info("ticket.redelivered", group_id=ticket.group_id, num_stored=sum(len(message.slots) for message in stored))
    return stored


async def _run_siblings(place: NodeContext, ticket: Ticket, siblings: list[int]) -> None:
    settings = place.now  # of one moment for all siblings: what is compared is sampled alike
    rollout = settings.rollout_of(ticket.workflow)
    workflow = place.workflow(ticket.workflow, settings)
    producer = f"{place.node_id}.{secrets.token_hex(4)}"
    outbox = Outbox(
        place.bus,
        place.bus.names,
        ticket,
        producer=producer,
        num_expected=len(siblings),
        linger_s=settings.rollout.linger_ms / 1000,
        backpressure=place.backpressure,
        receipts=place.receipts,
        max_bytes=rollout.max_payload_bytes if is_group_workflow(workflow) else MESSAGE_BYTES,
    )

    def slot(sibling: int) -> SlotSpec:
        return SlotSpec(
            workflow=ticket.workflow,
            sibling=sibling,
            sample_uid=f"{ticket.group_id}.{sibling}.{producer}",
            ticket_version=ticket.version,
            max_bytes=rollout.max_trajectory_bytes,
            max_sequence_tokens=settings.trainer.token_budget,
            max_credit_bytes=rollout.max_credit_bytes,
            one_reward_for=settings.algorithm.one_reward_for,
        )

    @contextmanager
    def running(slots: Sequence[SlotSpec]) -> Iterator[list[ServedPolicy]]:
        """Make a policy for each of these siblings, which one call of the workflow fills."""
        first = slots[0]
        name = wait_graph.slot(ticket.group_id, first.sibling)
        working_on.set(
            Work(
                workflow=ticket.workflow,
                name=name,
                ticket=ticket,
                sibling=first.sibling,
                is_whole_group=is_group_workflow(workflow),
                sample_uid=first.sample_uid,
            )
        )
        place.counts.num_trajectories_running += len(slots)
        try:
            with (
                wait_graph.doing(name, "the workflow of"),
                structlog.contextvars.bound_contextvars(sample_uid=first.sample_uid),
            ):
                policies = [place.policy(rollout.sampling, name=one.sample_uid) for one in slots]
                for policy in policies:
                    policy.max_sequence_tokens = first.max_sequence_tokens
                yield policies
        finally:
            place.counts.num_trajectories_running -= len(slots)

    def put(trajectory: Trajectory) -> None:
        _count(place.counts, trajectory.slot.status, trajectory.slot.reason, trajectory.slot.sample_uid)
        outbox.put(trajectory)

    async def run_sibling(workflow: Workflow, sibling: int) -> None:
        one = slot(sibling)
        with running([one]) as (policy,), spans.episode(ticket, [one.sibling]) as span:
            heeded = heeding(workflow, policy, name=ticket.workflow)
            prompt = deepcopy(ticket.prompt)  # of its own: what it does to its row is nothing to its siblings
            trajectory = await run_episode(heeded, prompt, policy, one, deadline_s=rollout.episode_deadline_s)
            spans.note_trajectories(span, [trajectory])
        put(trajectory)

    async def run_together(workflow: GroupWorkflow) -> None:
        every = [slot(sibling) for sibling in range(ticket.group_size)]
        with running(every) as policies, spans.episode(ticket, range(ticket.group_size)) as span:
            trajectories = await run_group_episode(
                workflow,
                deepcopy(ticket.prompt),
                policies,
                every,
                deadline_s=rollout.episode_deadline_s,
                max_bytes=rollout.max_payload_bytes,
            )
            spans.note_trajectories(span, trajectories)
        for trajectory in trajectories:
            if trajectory.slot.sibling in siblings:
                put(trajectory)

    place.counts.num_groups_running += 1
    try:
        with ExitStack() as storing:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(outbox.run)
                async with anyio.create_task_group() as episodes:
                    if not is_group_workflow(workflow):
                        for sibling in siblings:
                            episodes.start_soon(run_sibling, cast(Workflow, workflow), sibling)
                    elif siblings:
                        episodes.start_soon(run_together, workflow)
                storing.enter_context(wait_graph.on(wait_graph.BROKER, "its slots to be stored by"))
    finally:
        place.counts.num_groups_running -= 1
    if outbox.num_left:
        raise PipelineError(f"group {ticket.group_id}: {outbox.num_left} of its slots were never stored")


def _count(counts: Counts, status: SlotStatus, reason: str, sample_uid: str) -> None:
    match status:
        case SlotStatus.SCORED:
            counts.num_scored += 1
        case SlotStatus.REJECTED:
            counts.num_rejected += 1
        case SlotStatus.FAILED:
            counts.num_failed += 1
            counts.last_failure = reason
            log.warning("trajectory.failed", sample_uid=sample_uid, reason=reason)
