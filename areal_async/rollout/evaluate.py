"""Evaluation tickets: one answer each, scored like training ones, never trained."""

import anyio
import structlog

from areal_async.bus import Delivery
from areal_async.errors import Reject, RolloutError
from areal_async.protocol.types import EvalResult, EvalTicket, Prompt
from areal_async.rollout.endpoint.policy import heeding
from areal_async.rollout.episode import call_workflow
from areal_async.rollout.group import for_one_sibling
from areal_async.rollout.node_context import NodeContext
from areal_async.rollout.runner import returned_unless_done, run_heartbeats
from areal_async.rollout.slots import version_range
from areal_async.rollout.user_code.boundary import text_of
from areal_async.rollout.user_code.loop_block_report import Work
from areal_async.rollout.user_code.task_scope import working_on
from areal_async.telemetry import spans, wait_graph

log = structlog.get_logger()


async def run_eval_ticket(place: NodeContext, ticket: EvalTicket, delivery: Delivery) -> None:
    """Answer one held-out prompt, store the result and acknowledge the ticket."""
    with spans.leased(ticket, delivery, node_id=place.node_id):
        await _run(place, ticket, delivery)


async def _run(place: NodeContext, ticket: EvalTicket, delivery: Delivery) -> None:
    async with returned_unless_done(delivery):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_heartbeats, delivery, place.settings.ticket_heartbeat_s)
            row, evaluation = wait_graph.row(ticket.answer), wait_graph.evaluation(ticket.eval_id)
            working_on.set(Work(workflow=ticket.workflow, name=row, eval_ticket=ticket))
            with wait_graph.doing(row, "the workflow of", waiter=evaluation), spans.answer(ticket) as span:
                result = await _answer(place, ticket)
                spans.note_result(span, result)
            msg_id = f"eval.{ticket.answer}.{ticket.attempt}"
            with spans.published_result(ticket), wait_graph.on(wait_graph.BROKER, "its result to be stored by"):
                await place.bus.publish_patiently(place.bus.names.eval_results(ticket.workflow), result, msg_id=msg_id)
            tasks.cancel_scope.cancel()
        await delivery.ack()


async def _answer(place: NodeContext, ticket: EvalTicket) -> EvalResult:
    rollout = place.settings.rollout_of(ticket.workflow)
    policy = place.policy(place.settings.eval_sampling_of(ticket.workflow), name=f"eval.{ticket.answer}")
    reward, error = 0.0, ""
    try:
        scores = await call_workflow(
            heeding(for_one_sibling(place.workflow(ticket.workflow, place.settings)), policy, name=ticket.workflow),
            Prompt(epoch=0, index=ticket.index, row=ticket.row),
            policy,
            name=ticket.workflow,
            deadline_s=rollout.episode_deadline_s,
        )
        reward = scores.reward
    except Reject as exc:
        error = f"rejected: {text_of(exc)}"
    except RolloutError as exc:
        error = text_of(exc) or type(exc).__name__  # empty would say that there is a reward
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
    )
