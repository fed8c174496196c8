"""Evaluation tickets: one answer each, scored like training ones, never trained."""

from typing import Any

import structlog

from areal_async.bus import Delivery
from areal_async.config.settings import Settings
from areal_async.errors import Reject
from areal_async.protocol.evaluations import EvalResult, EvalTicket
from areal_async.protocol.types import Prompt
from areal_async.rollout.endpoint.policy import ServedPolicy
from areal_async.rollout.lease import KeptLease, returned_unless_done
from areal_async.rollout.node_context import NodeContext
from areal_async.rollout.rewards.reply_rewards import Scores
from areal_async.rollout.row_images import read_row
from areal_async.rollout.slots import version_range
from areal_async.rollout.user_code.boundary import text_of
from areal_async.rollout.user_code.loop_block_report import Work
from areal_async.rollout.workflow_call import WorkflowCall
from areal_async.telemetry import spans, wait_graph

log = structlog.get_logger()


async def run_eval_ticket(node: NodeContext, ticket: EvalTicket, delivery: Delivery) -> None:
    """Answer one held-out prompt, store the result and acknowledge the ticket.

    One whose images are gone is acknowledged alone.
    """
    with spans.leased(ticket, delivery, node_id=node.node_id):
        async with returned_unless_done(delivery):
            async with KeptLease(delivery, node.settings.ticket_heartbeat_s):
                row = await read_row(node, ticket, node.bus.names.eval_group(ticket.eval_id, ticket.index))
                if row.num_missing:  # its answers have come, or it is asked again
                    log.info("evaluation.row_over", eval_id=ticket.eval_id, index=ticket.index)
                else:
                    await _run(node, ticket, row.cells)
            await delivery.ack()


async def _run(node: NodeContext, ticket: EvalTicket, cells: dict[str, Any]) -> None:
    row, evaluation = wait_graph.row(ticket.answer), wait_graph.evaluation(ticket.eval_id)
    with wait_graph.doing(row, "the workflow of", waiter=evaluation), spans.answer(ticket) as span:
        work = Work(workflow=ticket.workflow, name=row, eval_ticket=ticket)
        policy = node.policy(node.settings.eval_sampling_of(ticket.workflow), f"eval.{ticket.answer}")
        prompt = Prompt(epoch=0, index=ticket.index, row=cells)
        result = await answer_row(node, policy, ticket, prompt, work, settings=node.settings)
        spans.note_result(span, result)
    with spans.published_result(ticket), wait_graph.on(wait_graph.BROKER, "its result to be stored by"):
        await publish_result(node, ticket, result)


async def publish_result(node: NodeContext, ticket: EvalTicket, result: EvalResult) -> None:
    """Store a result, once for each attempt at its answer."""
    msg_id = f"eval.{ticket.answer}.{ticket.attempt}"
    await node.bus.publish_patiently(node.bus.names.eval_results(ticket.workflow), result, msg_id=msg_id)


async def answer_row(
    node: NodeContext, policy: ServedPolicy, ticket: EvalTicket, prompt: Prompt, work: Work, *, settings: Settings
) -> EvalResult:
    """Have the workflow, as it is called with these settings, answer a row, and return what it came to."""
    call = WorkflowCall(node.workflow(ticket.workflow, settings), [policy], work=work, clock=node.clock)
    (ending,) = await call.endings(prompt)
    reward, error = 0.0, ""
    if isinstance(ending, Scores):
        reward = ending.reward
    elif isinstance(ending, Reject):
        error = f"rejected: {text_of(ending)}"
    else:
        error = text_of(ending) or type(ending).__name__  # empty would say that there is a reward
        log.warning("evaluation.failed", eval_id=ticket.eval_id, index=ticket.index, reason=error)
    oldest, newest = version_range(policy.turns, "")
    return EvalResult(
        eval_id=ticket.eval_id,
        index=ticket.index,
        reward=reward,
        error=error,
        oldest=oldest,
        newest=newest,
        sample=ticket.sample,
        num_tokens=sum(len(turn.output_ids) for turn in policy.turns),
    )
