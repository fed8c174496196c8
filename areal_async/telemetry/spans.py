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
from contextlib import contextmanager
from typing import Any, Protocol

from opentelemetry import trace
from opentelemetry.trace import Span, SpanContext
from opentelemetry.util.types import AnyValue

from areal_async.api import ToolCall
from areal_async.protocol.types import (
    Cut,
    CutKind,
    EvalResult,
    EvalTicket,
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
    return tracing.span(
        f"admit {ticket.workflow}",
        _first_of(ticket),
        is_first=True,
        kind=PRODUCER,
        attributes={
            **_of_ticket(ticket),
            "areal.group_size": ticket.group_size,
            "areal.weights.version": ticket.version,
            "areal.ticket.number": ticket.number,
            **_sent("tickets"),
        },
    )


@contextmanager
def leased(ticket: Ticket | EvalTicket, delivery: DeliveredMessage, *, node_id: str) -> Iterator[None]:
    """Run a ticket's work for its lease, which it has waited for since it was stored."""
    lease = tracing.span(
        f"lease {ticket.workflow}",
        _first_of(ticket),
        start_ns=delivery.stored_ns,
        kind=CONSUMER,
        attributes={
            **_of_ticket(ticket),
            "areal.node_id": node_id,
            "areal.ticket.num_delivered": delivery.num_delivered,
            **_received("tickets" if isinstance(ticket, Ticket) else "eval"),
        },
    )
    lease.end(time.time_ns())
    if lease is tracing.NOTHING:
        yield
        return
    with trace.use_span(lease):
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
    return tracing.span(
        f"{name} {model}" if model else name,
        tracing.current(),
        kind=CLIENT,
        attributes={
            "gen_ai.operation.name": name,
            "gen_ai.provider.name": "sglang",
            "gen_ai.request.model": model,
            "gen_ai.request.stream": True,
            "gen_ai.request.max_tokens": sampling_params["max_new_tokens"],
            "gen_ai.request.temperature": float(sampling_params.get("temperature", 1.0)),
            "gen_ai.request.top_p": float(sampling_params.get("top_p", 1.0)),
            "gen_ai.usage.input_tokens": num_prompt_tokens,
        },
    )


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
    tracing.current_span().add_event(
        "stream.begun",
        {"areal.server_id": server_id, "areal.weights.version": version, "areal.num_tokens": num_tokens},
    )


def note_break(server_id: str, kind: str, cause: str, *, num_tokens: int) -> None:
    """Note in a completion that a stream broke after ``num_tokens`` in all, with which kind of error, and why."""
    tracing.current_span().add_event(
        "stream.broken",
        {
            "areal.server_id": server_id,
            "error.type": kind,
            "areal.num_tokens": num_tokens,
            **tracing.quoted("areal.cause", cause),
        },
    )


def note_first_token() -> None:
    """Note in a completion the time to its first token."""
    span = tracing.current_span()
    if isinstance(span, RecordedSpan):
        span.set_attribute("gen_ai.response.time_to_first_chunk", span.age_s)


def tool_call(call: ToolCall, *, is_known: bool) -> Span:
    """Return the span of a model's call of a tool; the name of an unknown tool is the model's text and left out."""
    name = call.name if is_known else "unknown"
    return tracing.span(
        f"execute_tool {name}",
        tracing.current(),
        attributes={
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": name,
            "gen_ai.tool.call.id": call.id,
            "gen_ai.tool.type": "function",
        },
    )


def reward(name: str) -> Span:
    """Return the span of a ``@reward`` function, from its call to its score, with the wait for a worker."""
    return tracing.span(f"reward {name}", tracing.current(), attributes={"gen_ai.evaluation.name": name})


def published(ticket: Ticket, slots: Iterable[Slot], *, num_bytes: int) -> Span:
    """Return the span of a message of finished slots, from its first send to its storage, with the wait for room."""
    return tracing.span(
        "publish trajectories",
        tracing.current(),
        kind=PRODUCER,
        attributes={
            **_of_ticket(ticket),
            "areal.siblings": [str(slot.sibling) for slot in slots],
            **_sent("trajectories"),
            "messaging.message.body.size": num_bytes,
        },
    )


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
        tracing.span(
            "await cut",
            tracing.of_group(group.group_id),
            start_ns=max((one.stored_ns for one in stored.get(group.group_id, {}).values()), default=now_ns),
            kind=CONSUMER,
            attributes={
                **_of_group(group.group_id, group.workflow),
                **_of_step(made),
                **_received("trajectories"),
            },
        ).end(now_ns)


def settled(outcome: Outcome) -> Span:
    """Return the span of the recording of an outcome, of a group or of one of its slots."""
    kind = outcome.kind
    span = tracing.span(
        f"settle {kind}" if kind.settles else f"record {kind}",
        tracing.of_group(outcome.group_id),
        kind=PRODUCER,
        attributes={
            **_of_group(outcome.group_id, outcome.workflow),
            "areal.outcome": kind.value,
            **tracing.quoted("areal.outcome.reason", outcome.reason),
            "areal.lineage": outcome.lineage,
            "areal.step": outcome.step,
        },
    )
    if kind in FAILED:
        tracing.fail(span, kind.value, outcome.reason)
    return span


# a held-out row of an evaluation


def asked(ticket: EvalTicket) -> Span:
    """Return the span of a row's published ticket: its first one, or, for other samples and attempts, one below it."""
    is_first = not (ticket.attempt or ticket.sample)
    attributes = {**_of_ticket(ticket), **_sent("eval")}
    name = f"ask {ticket.workflow}"
    return tracing.span(name, _first_of(ticket), kind=PRODUCER, attributes=attributes, is_first=is_first)


def answer(ticket: EvalTicket) -> Span:
    """Return the span of the call of a workflow that answers a row."""
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
    attributes = {**_of_ticket(ticket), **_sent("eval")}
    return tracing.span("publish result", tracing.current(), kind=PRODUCER, attributes=attributes)


def received_result(result: EvalResult, delivery: DeliveredMessage) -> None:
    """Record the wait of a row's result for the process that asked for it."""
    tracing.span(
        "await result",
        tracing.of_row(result.eval_id, result.index),
        start_ns=delivery.stored_ns,
        kind=CONSUMER,
        attributes={**_of_row(result.eval_id, result.index, result.sample), **_received("eval")},
    ).end(time.time_ns())


# a training step


def part_of_step(made: Version, name: str, **attributes: AnyValue) -> Span:
    """Return the span of a part of the step that makes ``made``, on any process."""
    return tracing.span(
        name,
        tracing.of_step(made),
        attributes={**_of_step(made), **{f"areal.{key}": value for key, value in attributes.items()}},
    )


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
    tracing.span(
        f"step {made.step}",
        step,
        start_ns=start_ns,
        attributes=_of_step(made),
        links=groups.values(),
        is_first=True,
    ).end(time.time_ns())
    tracing.span("await data", step, start_ns=start_ns, attributes=_of_step(made)).end(begins_ns)
    for group_id, first in groups.items():
        tracing.span(
            f"train in step {made.step}",
            first,
            start_ns=begins_ns,
            attributes={**_of_group(group_id), **_of_step(made)},
            links=[step],
        ).end(begins_ns + int(train_s * 1e9))


def _of_group(group_id: str, workflow: str = "") -> dict[str, AnyValue]:
    return {"areal.group_id": group_id, **({"areal.workflow": workflow} if workflow else {})}


def _of_row(eval_id: str, index: int, sample: int) -> dict[str, AnyValue]:
    return {"areal.eval_id": eval_id, "areal.eval.index": index, "areal.eval.sample": sample}


def _of_ticket(ticket: Ticket | EvalTicket) -> dict[str, AnyValue]:
    if isinstance(ticket, Ticket):
        return _of_group(ticket.group_id, ticket.workflow)
    row = _of_row(ticket.eval_id, ticket.index, ticket.sample)
    return {**row, "areal.eval.attempt": ticket.attempt, "areal.workflow": ticket.workflow}


def _first_of(ticket: Ticket | EvalTicket) -> SpanContext | None:
    if isinstance(ticket, Ticket):
        return tracing.of_group(ticket.group_id)
    return tracing.of_row(ticket.eval_id, ticket.index)


def _of_step(made: Version) -> dict[str, AnyValue]:
    return {"areal.step": made.step, "areal.lineage": made.lineage, "areal.weights.version": str(made)}


def _sent(destination: str) -> dict[str, AnyValue]:
    return _message("publish", "send", destination)


def _received(destination: str) -> dict[str, AnyValue]:
    return _message("receive", "receive", destination)


def _message(name: str, kind: str, destination: str) -> dict[str, AnyValue]:
    return {
        "messaging.system": "nats",
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
        "messaging.destination.name": destination,
    }
