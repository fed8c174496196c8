"""The spans of each step on the road from a ticket to a gradient: their names and attributes.

A group's trace, below the admission, with who records it:

    admit                          the controller
    +- lease                       the node: from the ticket's storage to its lease, once per delivery
    |  +- invoke_workflow          ... each sibling
    |  |  +- text_completion       ... each call of the model; a server that traces joins below it
    |  |  +- execute_tool, reward
    |  +- publish trajectories     ... each message
    +- await cut                   the trainer: from the last slot's storage to the cut
    +- train                       ... linked to the step's own trace
    +- settle                      the process that records the outcome

``lease`` is over when its work begins, so that what a killed node did has a parent that was sent. A training step has a
trace of its own: ``step`` and, below it, ``cut``, ``fetch``, the calls of its graph on each rank, ``publish weights``,
``swap`` on each server, and ``checkpoint``. So has each held-out row of an evaluation, with who records it:

    ask                            the controller; asked again, it is another span below the first
    +- lease                       the node, as of a group's ticket, and below it the same calls
    |  +- invoke_workflow
    |  +- publish result
    +- await result                the controller: from the result's storage to when it has it

Of a row that ``eval`` answers by itself there is ``invoke_workflow`` alone, and the calls below it.

Names and attributes are OpenTelemetry's (``gen_ai.*``, ``messaging.*``)
where it has some, else ``areal.*``.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

from opentelemetry import trace
from opentelemetry.trace import Span, SpanContext
from opentelemetry.util.types import AnyValue

from areal_async.api import ToolCall
from areal_async.protocol.arms import ArmTicket
from areal_async.protocol.evaluations import EvalResult, EvalTicket
from areal_async.protocol.types import (
    Cut,
    CutKind,
    Outcome,
    OutcomeKind,
    Slot,
    SlotStatus,
    Ticket,
    Trajectory,
    Turn,
    Version,
)
from areal_async.telemetry import tracing
from areal_async.telemetry.tracing import CLIENT, CONSUMER, PRODUCER, Attributes, RecordedSpan

FAILED = (OutcomeKind.FAILED, OutcomeKind.DEAD)


class DeliveredMessage(Protocol):
    """The delivery of a message."""

    @property
    def stored_ns(self) -> int:
        """Time of its storage, in nanoseconds since 1970 by the broker's clock."""
        ...

    @property
    def num_delivered(self) -> int: ...


# a group


def admitted(ticket: Ticket) -> Span:
    """Return the first span of a group: the publication of its ticket."""
    attributes = {
        **_of_ticket(ticket),
        "areal.group_size": ticket.group_size,
        "areal.weights.version": ticket.version,
        "areal.ticket.number": ticket.number,
    }
    return _sent(f"admit {ticket.workflow}", _first_of(ticket), "tickets", attributes, is_first=True)


@contextmanager
def leased(ticket: Ticket | EvalTicket, delivery: DeliveredMessage, *, node_id: str) -> Iterator[None]:
    """Run a ticket's work for its lease, which it has waited for since it was stored."""
    stream = "tickets" if isinstance(ticket, Ticket) else "eval"
    delivered: Attributes = {"areal.node_id": node_id, "areal.ticket.num_delivered": delivery.num_delivered}
    attributes = {**_of_ticket(ticket), **delivered}
    lease = _received(f"lease {ticket.workflow}", _first_of(ticket), stream, attributes, since_ns=delivery.stored_ns)
    with nullcontext() if lease is tracing.NOTHING else trace.use_span(lease):
        yield


def episode(ticket: Ticket, siblings: Iterable[int]) -> Span:
    """Return the span of one call of a workflow, for the siblings whose slots it fills."""
    siblings_of = {"areal.siblings": [str(sibling) for sibling in siblings]}
    return _invocation(ticket.workflow, tracing.current(), {**_of_ticket(ticket), **siblings_of})


def _invocation(workflow: str, parent: SpanContext | None, attributes: Attributes, *, is_first: bool = False) -> Span:
    attributes = {**attributes, "gen_ai.operation.name": "invoke_workflow", "gen_ai.workflow.name": workflow}
    return tracing.span(f"invoke_workflow {workflow}", parent, attributes=attributes, is_first=is_first)


def note_trajectories(span: Span, trajectories: Iterable[Trajectory]) -> None:
    """Note in an episode what came of it."""
    for slot in (one.slot for one in trajectories):
        attributes: dict[str, AnyValue] = {"areal.sibling": slot.sibling}
        if slot.status is SlotStatus.REJECTED:
            attributes |= tracing.quoted("areal.rejected", slot.reason)
        _note_reward(span, slot.status, slot.reward, slot.reason, attributes)


def _note_reward(span: Span, status: SlotStatus, reward: float, reason: str, attributes: Attributes) -> None:
    score: dict[str, AnyValue] = {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.label": status.value}
    if status is SlotStatus.SCORED:
        score["gen_ai.evaluation.score.value"] = reward
    elif status is SlotStatus.FAILED:
        tracing.fail(span, status.value, reason)
    span.add_event("gen_ai.evaluation.result", {**attributes, **score})


def completion(model: str, num_prompt_tokens: int, sampling_params: Mapping[str, Any]) -> Span:
    """Return the span of one call of a model, over all its streams."""
    name = "text_completion"
    attributes = {
        "gen_ai.operation.name": name,
        "gen_ai.provider.name": "sglang",
        "gen_ai.request.model": model,
        "gen_ai.request.stream": True,
        "gen_ai.request.max_tokens": sampling_params["max_new_tokens"],
        "gen_ai.request.temperature": float(sampling_params.get("temperature", 1.0)),
        "gen_ai.request.top_p": float(sampling_params.get("top_p", 1.0)),
        "gen_ai.usage.input_tokens": num_prompt_tokens,
    }
    return tracing.span(f"{name} {model}".strip(), tracing.current(), kind=CLIENT, attributes=attributes)


def note_turn(span: Span, turn: Turn, *, server_id: str) -> None:
    """Note in a completion what came of it; ``server_id`` is where it ended."""
    span.set_attributes(
        {
            "gen_ai.usage.output_tokens": len(turn.output_ids),
            "gen_ai.response.finish_reasons": [turn.finish_reason],
            "areal.weights.versions": [one.version for one in turn.spans],
            "areal.server_id": server_id,
        }
    )


def note_stream(server_id: str, version: str, *, num_tokens: int) -> None:
    """Note in a completion that a stream is asked for: the first one, or one that goes on from ``num_tokens``."""
    facts: Attributes = {"areal.server_id": server_id, "areal.weights.version": version, "areal.num_tokens": num_tokens}
    tracing.current_span().add_event("stream.begun", facts)


def note_break(server_id: str, kind: str, cause: str, *, num_tokens: int) -> None:
    """Note in a completion that a stream broke after ``num_tokens`` in all, with which kind of error, and why."""
    facts: Attributes = {"areal.server_id": server_id, "error.type": kind, "areal.num_tokens": num_tokens}
    tracing.current_span().add_event("stream.broken", {**facts, **tracing.quoted("areal.cause", cause)})


def note_first_token() -> None:
    """Note in a completion the time to its first token."""
    span = tracing.current_span()
    if isinstance(span, RecordedSpan):
        span.set_attribute("gen_ai.response.time_to_first_chunk", span.age_s)


def tool_call(call: ToolCall, *, is_known: bool) -> Span:
    """Return the span of a model's call of a tool; the name of an unknown tool is the model's text and left out."""
    name = call.name if is_known else "unknown"
    attributes = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name,
        "gen_ai.tool.call.id": call.id,
        "gen_ai.tool.type": "function",
    }
    return tracing.span(f"execute_tool {name}", tracing.current(), attributes=attributes)


def reward(name: str) -> Span:
    """Return the span of a ``@reward`` function, from its call to its score, with the wait for a worker."""
    return tracing.span(f"reward {name}", tracing.current(), attributes={"gen_ai.evaluation.name": name})


def published(ticket: Ticket, slots: Iterable[Slot], *, num_bytes: int) -> Span:
    """Return the span of a message of finished slots, from its first send to its storage, with the wait for room."""
    siblings = {"areal.siblings": [str(slot.sibling) for slot in slots]}
    attributes = {**_of_ticket(ticket), **siblings, "messaging.message.body.size": num_bytes}
    return _sent("publish trajectories", tracing.current(), "trajectories", attributes)


@contextmanager
def cut(entry: Cut, stored: Mapping[str, Mapping[int, DeliveredMessage]]) -> Iterator[None]:
    """Run the writing of a journal entry; for a cut, record how long each of its groups has waited for it.

    Args:
        stored: group id -> sibling -> its message.
    """
    if entry.kind is not CutKind.CUT or not tracing.is_on():
        yield
        return
    made = Version(entry.lineage, entry.step)
    with part_of_step(made, "cut", num_groups=len(entry.groups)):
        yield
    now_ns = time.time_ns()
    for group in entry.groups:
        attributes = {**_of_group(group.group_id, group.workflow), **_of_step(made)}
        since_ns = max((one.stored_ns for one in stored.get(group.group_id, {}).values()), default=now_ns)
        _received("await cut", tracing.of_group(group.group_id), "trajectories", attributes, since_ns=since_ns)


def settled(outcome: Outcome) -> Span:
    """Return the span of the recording of an outcome, of a group or of one of its slots."""
    kind = outcome.kind
    name = f"settle {kind}" if kind.settles else f"record {kind}"
    attributes = {
        **_of_group(outcome.group_id, outcome.workflow),
        "areal.outcome": kind.value,
        **tracing.quoted("areal.outcome.reason", outcome.reason),
        "areal.lineage": outcome.lineage,
        "areal.step": outcome.step,
    }
    span = tracing.span(name, tracing.of_group(outcome.group_id), kind=PRODUCER, attributes=attributes)
    if kind in FAILED:
        tracing.fail(span, kind.value, outcome.reason)
    return span


# a held-out row of an evaluation


def asked(ticket: EvalTicket) -> Span:
    """Return the span of a row's published ticket: its first one, or, for other samples and attempts, one below it."""
    is_first = not (ticket.attempt or ticket.sample)
    return _sent(f"ask {ticket.workflow}", _first_of(ticket), "eval", _of_ticket(ticket), is_first=is_first)


def answer(ticket: EvalTicket) -> Span:
    """Return the span of a call of a workflow that answers a row."""
    return _invocation(ticket.workflow, tracing.current(), _of_ticket(ticket))


def tried(workflow: str, *, eval_id: str, index: int, sample: int) -> Span:
    """Return the span of a workflow's call for a row without a ticket, the first of its trace for sample 0."""
    attributes = {**_of_row(eval_id, index, sample), "areal.workflow": workflow}
    return _invocation(workflow, tracing.of_row(eval_id, index), attributes, is_first=not sample)


def note_result(span: Span, result: EvalResult) -> None:
    """Note in an answer what came of it."""
    _note_reward(span, SlotStatus.FAILED if result.error else SlotStatus.SCORED, result.reward, result.error, {})


def published_result(ticket: EvalTicket) -> Span:
    """Return the span of a row's result, from its sending to its storage."""
    return _sent("publish result", tracing.current(), "eval", _of_ticket(ticket))


def received_result(result: EvalResult, delivery: DeliveredMessage) -> None:
    """Record the wait of a row's result for the process that asked for it."""
    first, attributes = (
        tracing.of_row(result.eval_id, result.index),
        _of_row(result.eval_id, result.index, result.sample),
    )
    _received("await result", first, "eval", attributes, since_ns=delivery.stored_ns)


# a training step


def part_of_step(made: Version, name: str, **attributes: AnyValue) -> Span:
    """Return the span of a part of the step that makes ``made``, on any process."""
    named = {f"areal.{key}": value for key, value in attributes.items()}
    return tracing.span(name, tracing.of_step(made), attributes={**_of_step(made), **named})


def call_of_step(name: str, role: str) -> Span:
    """Return the span of one call of a step's graph on this rank, with the wait for its model's thread."""
    return tracing.span(name, tracing.current(), attributes={"areal.model_role": role})


def trained(made: Version, group_ids: Iterable[str], *, since_s: float, wait_s: float, train_s: float) -> None:
    """Record a whole step, weights included, which began to wait for its groups at monotonic time ``since_s``."""
    step = tracing.of_step(made)
    if step is None:
        return
    start_ns, begins_ns = tracing.wall_ns(since_s), tracing.wall_ns(since_s + wait_s)
    groups = {group_id: first for group_id in group_ids if (first := tracing.of_group(group_id)) is not None}
    name, of_step, links = f"step {made.step}", _of_step(made), groups.values()
    tracing.span(name, step, start_ns=start_ns, attributes=of_step, links=links, is_first=True).end(time.time_ns())
    tracing.span("await data", step, start_ns=start_ns, attributes=of_step).end(begins_ns)
    for group_id, first in groups.items():
        attributes = {**_of_group(group_id), **of_step}
        span = tracing.span(f"train in {name}", first, start_ns=begins_ns, attributes=attributes, links=[step])
        span.end(begins_ns + int(train_s * 1e9))


def _of_group(group_id: str, workflow: str = "") -> dict[str, AnyValue]:
    return {"areal.group_id": group_id, **({"areal.workflow": workflow} if workflow else {})}


def _of_row(eval_id: str, index: int, sample: int) -> dict[str, AnyValue]:
    return {"areal.eval_id": eval_id, "areal.eval.index": index, "areal.eval.sample": sample}


def _of_ticket(ticket: Ticket | EvalTicket) -> dict[str, AnyValue]:
    if isinstance(ticket, Ticket):
        return _of_group(ticket.group_id, ticket.workflow)
    row = _of_row(ticket.eval_id, ticket.index, ticket.sample)
    if isinstance(ticket, ArmTicket):
        row |= {"areal.arm": ticket.arm, "areal.arm.number": ticket.number}
    return {**row, "areal.eval.attempt": ticket.attempt, "areal.workflow": ticket.workflow}


def _first_of(ticket: Ticket | EvalTicket) -> SpanContext | None:
    if isinstance(ticket, Ticket):
        return tracing.of_group(ticket.group_id)
    if isinstance(ticket, ArmTicket):
        return tracing.of_row(ticket.arm_id, ticket.number)
    return tracing.of_row(ticket.eval_id, ticket.index)


def _of_step(made: Version) -> dict[str, AnyValue]:
    return {"areal.step": made.step, "areal.lineage": made.lineage, "areal.weights.version": str(made)}


def _sent(
    name: str, parent: SpanContext | None, stream: str, attributes: Attributes, *, is_first: bool = False
) -> Span:
    """Return the span of a message, from its first send to its storage."""
    attributes = {**attributes, **_messaging("publish", "send", stream)}
    return tracing.span(name, parent, kind=PRODUCER, attributes=attributes, is_first=is_first)


def _received(name: str, parent: SpanContext | None, stream: str, attributes: Attributes, *, since_ns: int) -> Span:
    """Record the wait of a stored message for who has received it now; return its span, which is over."""
    attributes = {**attributes, **_messaging("receive", "receive", stream)}
    span = tracing.span(name, parent, kind=CONSUMER, attributes=attributes, start_ns=since_ns)
    span.end(time.time_ns())
    return span


def _messaging(name: str, kind: str, destination: str) -> dict[str, AnyValue]:
    return {
        "messaging.system": "nats",
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
        "messaging.destination.name": destination,
    }
