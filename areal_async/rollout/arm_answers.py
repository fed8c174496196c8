"""Prompts of arms: answered by both sides at once, scored like training ones, never stored as trajectories."""

from copy import deepcopy

import anyio

from areal_async.bus import Delivery
from areal_async.protocol.arms import ArmResult, ArmTicket
from areal_async.protocol.evaluations import EvalResult
from areal_async.protocol.types import Prompt
from areal_async.rollout.arms import ServedArm
from areal_async.rollout.endpoint.policy import PolicyMaker
from areal_async.rollout.evaluate import answer_row
from areal_async.rollout.lease import RETURN_DELAY_S, returned_unless_done, run_heartbeats
from areal_async.rollout.node_context import NodeContext
from areal_async.rollout.user_code.loop_block_report import Work
from areal_async.telemetry import spans, wait_graph


async def run_arm_ticket(node: NodeContext, served: ServedArm, ticket: ArmTicket, delivery: Delivery) -> None:
    """Answer one prompt by both sides, store the pair and acknowledge the ticket; give it back if the arm ends here."""
    with spans.leased(ticket, delivery, node_id=node.node_id):
        async with returned_unless_done(delivery):
            async with anyio.create_task_group() as tasks:

                async def end_with_arm() -> None:
                    await served.has_ended.wait()
                    tasks.cancel_scope.cancel()

                tasks.start_soon(run_heartbeats, delivery, node.settings.ticket_heartbeat_s)
                tasks.start_soon(end_with_arm)
                await _run(node, served, ticket)
                tasks.cancel_scope.cancel()
            if served.has_ended.is_set():
                await delivery.nak(RETURN_DELAY_S)
            else:
                await delivery.ack()


async def _run(node: NodeContext, served: ServedArm, ticket: ArmTicket) -> None:
    model, settings = served.model, node.now
    pinned = PolicyMaker(
        generator=model.generator, codec=model.codec, endpoint=node.endpoint, call_parser=model.call_parser
    )
    results: dict[str, EvalResult] = {}

    async def answer(side: str, maker: PolicyMaker) -> None:
        row = wait_graph.row(f"{ticket.answer}.{side}")
        with wait_graph.doing(row, "the workflow of", waiter=wait_graph.arm(ticket.arm)), spans.answer(ticket) as span:
            policy = maker.policy(settings.rollout_of(ticket.workflow).sampling, f"arm.{ticket.answer}.{side}")
            work = Work(workflow=ticket.workflow, name=row, arm_ticket=ticket)
            prompt = Prompt(epoch=0, index=ticket.index, row=deepcopy(ticket.row))
            results[side] = await answer_row(node, policy, ticket, prompt, work, settings=settings)
            spans.note_result(span, results[side])

    async with anyio.create_task_group() as sides:
        sides.start_soon(answer, "pinned", pinned)
        sides.start_soon(answer, "newest", node)
    if not served.has_ended.is_set():
        await publish_pair(node, ticket, pinned=results["pinned"], newest=results["newest"])


async def publish_pair(node: NodeContext, ticket: ArmTicket, *, pinned: EvalResult, newest: EvalResult) -> None:
    """Store what both sides made of a prompt, once for each attempt at it."""
    result = ArmResult(arm_id=ticket.arm_id, number=ticket.number, pinned=pinned, newest=newest)
    msg_id = f"arm.{ticket.answer}.{ticket.attempt}"
    with wait_graph.on(wait_graph.BROKER, "its result to be stored by", waiter=wait_graph.arm(ticket.arm)):
        await node.bus.publish_patiently(node.bus.names.arm_results(ticket.arm_id), result, msg_id=msg_id)
