"""Prompts of arms: answered by both sides at once, scored like training ones, never stored as trajectories.

Rows of comparisons beside them: answered by one side alone, as an evaluation answers them, with what it said.
"""

from copy import deepcopy
from dataclasses import replace

import anyio

from areal_async.bus import Delivery
from areal_async.config.settings import Settings
from areal_async.inference.commands import draws_by_seed
from areal_async.protocol.arms import MAX_TEXT_CHARACTERS, ArmAnswer, ArmResult, ArmTicket
from areal_async.protocol.evaluations import EvalResult
from areal_async.protocol.types import Prompt
from areal_async.rollout.arms import ServedArm
from areal_async.rollout.endpoint.policy import PolicyMaker, ServedPolicy
from areal_async.rollout.evaluate import answer_row
from areal_async.rollout.lease import RETURN_DELAY_S, KeptLease, returned_unless_done
from areal_async.rollout.node_context import NodeContext
from areal_async.rollout.policy.generation import SeededGenerator
from areal_async.rollout.user_code.loop_block_report import Work
from areal_async.telemetry import spans, wait_graph


async def run_arm_ticket(node: NodeContext, served: ServedArm, ticket: ArmTicket, delivery: Delivery) -> None:
    """Answer one ticket, store what came of it and acknowledge it; give it back if the arm ends here."""
    with spans.leased(ticket, delivery, node_id=node.node_id):
        async with returned_unless_done(delivery):
            async with KeptLease(delivery, node.settings.ticket_heartbeat_s) as tasks:

                async def end_with_arm() -> None:
                    await served.has_ended.wait()
                    tasks.cancel_scope.cancel()

                tasks.start_soon(end_with_arm)
                await (_answer_alone if ticket.num_samples else _answer_both)(node, served, ticket)
                tasks.cancel_scope.cancel()
            if served.has_ended.is_set():
                await delivery.nak(RETURN_DELAY_S)
            else:
                await delivery.ack()


async def _answer_both(node: NodeContext, served: ServedArm, ticket: ArmTicket) -> None:
    settings = node.now
    sampling = settings.rollout_of(ticket.workflow).sampling
    results: dict[str, EvalResult] = {}

    async def answer(side: str, maker: PolicyMaker) -> None:
        policy = maker.policy(sampling, f"arm.{ticket.answer}.{side}")
        results[side] = await _answer(node, policy, ticket, f"{ticket.answer}.{side}", settings)

    async with anyio.create_task_group() as sides:
        sides.start_soon(answer, "pinned", _maker(node, served))
        sides.start_soon(answer, "newest", node)
    if not served.has_ended.is_set():
        await _publish(node, ticket, _pair(ticket, pinned=results["pinned"], newest=results["newest"]))


async def _answer_alone(node: NodeContext, served: ServedArm, ticket: ArmTicket) -> None:
    """Answer a row of a comparison, which ``compare`` would draw by the same seed with servers of its own."""
    samples = node.settings.eval.model_copy(update={"samples": ticket.num_samples})
    settings = node.settings.model_copy(update={"eval": samples})
    maker = _maker(node, served)
    if draws_by_seed(settings.inference):
        key = f"{settings.run.seed}.{ticket.index}.{ticket.sample}"
        maker = replace(maker, generator=SeededGenerator(maker.generator, key))
    policy = maker.policy(settings.eval_sampling_of(ticket.workflow), f"arm.{ticket.answer}")
    result = await _answer(node, policy, ticket, ticket.answer, settings)
    text = "\n\n".join(maker.codec.decode(turn.output_ids) for turn in policy.turns)[:MAX_TEXT_CHARACTERS]
    if not served.has_ended.is_set():
        told = ArmAnswer(arm_id=ticket.arm_id, number=ticket.number, result=result, text=text)
        await _publish(node, ticket, told)


def _maker(node: NodeContext, served: ServedArm) -> PolicyMaker:
    """Return what makes policies of the arm's model."""
    model = served.model
    return PolicyMaker(
        generator=model.generator, codec=model.codec, endpoint=node.endpoint, call_parser=model.call_parser
    )


async def _answer(
    node: NodeContext, policy: ServedPolicy, ticket: ArmTicket, name: str, settings: Settings
) -> EvalResult:
    row = wait_graph.row(name)
    with wait_graph.doing(row, "the workflow of", waiter=wait_graph.arm(ticket.arm)), spans.answer(ticket) as span:
        work = Work(workflow=ticket.workflow, name=row, arm_ticket=ticket)
        prompt = Prompt(epoch=0, index=ticket.index, row=deepcopy(ticket.row))
        result = await answer_row(node, policy, ticket, prompt, work, settings=settings)
        spans.note_result(span, result)
    return result


async def publish_failure(node: NodeContext, ticket: ArmTicket, reason: str) -> None:
    """Store that there is no reward, for this reason."""
    failed = EvalResult(eval_id=ticket.eval_id, index=ticket.index, error=reason, sample=ticket.sample)
    alone = ArmAnswer(arm_id=ticket.arm_id, number=ticket.number, result=failed)
    await _publish(node, ticket, alone if ticket.num_samples else _pair(ticket, pinned=failed, newest=failed))


def _pair(ticket: ArmTicket, *, pinned: EvalResult, newest: EvalResult) -> ArmResult:
    return ArmResult(arm_id=ticket.arm_id, number=ticket.number, pinned=pinned, newest=newest)


async def _publish(node: NodeContext, ticket: ArmTicket, told: ArmResult | ArmAnswer) -> None:
    """Store what came of a ticket, once for each attempt at it."""
    names = node.bus.names
    subject = (names.arm_answers if isinstance(told, ArmAnswer) else names.arm_results)(ticket.arm_id)
    msg_id = f"arm.{ticket.answer}.{ticket.attempt}"
    with wait_graph.on(wait_graph.BROKER, "its result to be stored by", waiter=wait_graph.arm(ticket.arm)):
        await node.bus.publish_patiently(subject, told, msg_id=msg_id)
