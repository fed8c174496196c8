"""The spans of each station on the road from a ticket to a gradient: their names and what is said of them.

A group's trace, below the admission, with who records it:

    admit                          the controller
    +- lease                       the node: from the ticket's storage to its lease, once per delivery
    |  +- invoke_workflow          ... each sibling
    |  |  +- text_completion       ... each call of the model; a server that traces joins below it
    |  |  +- execute_tool, reward
    |  +- publish trajectories     ... each message
    +- await cut                   the trainer: from the last slot's storage to the cut
    +- train                       ... linked to the step's own trace
    +- settle                      whoever records the outcome

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

NATS = "nats"
FAILED = (OutcomeKind.FAILED, OutcomeKind.DEAD)


class DeliveredMessage(Protocol):
    """A delivered message."""

    @property
    def stored_ns(self) -> int:
        """By the broker's clock."""
        ...

    @property
    def num_delivered(self) -> int: ...


# a group


def admitted(ticket: Ticket) -> Span:
    """The first span of a group: its ticket is published."""
    return tracing.first_span(
        f"admit {ticket.workflow}",
        tracing.of_group(ticket.group_id),
        kind=PRODUCER,
        attributes={
            **_of_group(ticket.group_id, ticket.workflow),
            "areal.group_size": ticket.group_size,
            "areal.weights.version": ticket.version,
            "areal.ticket.number": ticket.number,
            **_sent("tickets"),
        },
    )


@contextmanager
def leased(ticket: Ticket, delivery: DeliveredMessage, *, node_id: str) -> Iterator[None]:
    """Run a ticket's work for its lease, which it has waited for since it was stored."""
    of_group = _of_group(ticket.group_id, ticket.workflow)
    place = tracing.of_group(ticket.group_id)
    with _leased(place, ticket.workflow, delivery, of_group, node_id=node_id, destination="tickets"):
        yield


@contextmanager
def _leased(
    place: SpanContext | None,
    workflow: str,
    delivery: DeliveredMessage,
    about: Attributes,
    *,
    node_id: str,
    destination: str,
) -> Iterator[None]:
    if place is None:
        yield
        return
    lease = tracing.past(
        f"lease {workflow}",
        place,
        start_ns=delivery.stored_ns,
        kind=CONSUMER,
        attributes={
            **about,
            "areal.node_id": node_id,
            "areal.ticket.num_delivered": delivery.num_delivered,
            **_received(destination),
        },
    )
    with trace.use_span(lease):
        yield


def episode(ticket: Ticket, siblings: Iterable[int]) -> Span:
    """One call of a workflow, for the siblings whose slots it fills."""
    return tracing.span(
        f"invoke_workflow {ticket.workflow}",
        tracing.current(),
        attributes={
            **_of_group(ticket.group_id, ticket.workflow),
            "areal.siblings": [str(sibling) for sibling in siblings],
            "gen_ai.operation.name": "invoke_workflow",
            "gen_ai.workflow.name": ticket.workflow,
        },
    )


def note_trajectories(span: Span, trajectories: Iterable[Trajectory]) -> None:
    """Say of an episode what came of it."""
    for slot in (one.slot for one in trajectories):
        said: dict[str, AnyValue] = {
            "areal.sibling": slot.sibling,
            "gen_ai.evaluation.name": "reward",
            "gen_ai.evaluation.score.label": slot.status.value,
        }
        if slot.status is SlotStatus.SCORED:
            said["gen_ai.evaluation.score.value"] = slot.reward
        elif slot.status is SlotStatus.REJECTED:
            said |= tracing.quoted("areal.rejected", slot.reason)
        span.add_event("gen_ai.evaluation.result", said)
        if slot.status is SlotStatus.FAILED:
            tracing.fail(span, slot.status.value, slot.reason)


def completion(model: str, num_prompt_tokens: int, sampling_params: Mapping[str, Any]) -> Span:
    """One call of a model, over however many streams it takes."""
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
    """Say of a completion what came of it; ``server_id`` is where it ended."""
    span.set_attribute("gen_ai.usage.output_tokens", len(turn.output_ids))
    span.set_attribute("gen_ai.response.finish_reasons", [turn.finish_reason])
    span.set_attribute("areal.weights.versions", [one.version for one in turn.spans])
    span.set_attribute("areal.server_id", server_id)


def note_stream(server_id: str, version: str, *, num_tokens: int) -> None:
    """Note in a completion that a stream is asked for: the first one, or one that goes on from ``num_tokens``."""
    said: dict[str, AnyValue] = {
        "areal.server_id": server_id,
        "areal.weights.version": version,
        "areal.num_tokens": num_tokens,
    }
    tracing.current_span().add_event("stream.begun", said)


def note_break(server_id: str, kind: str, cause: str, *, num_tokens: int) -> None:
    """Note in a completion that a stream broke after ``num_tokens`` in all, with which kind of error, and why."""
    said: dict[str, AnyValue] = {
        "areal.server_id": server_id,
        "error.type": kind,
        "areal.num_tokens": num_tokens,
        **tracing.quoted("areal.cause", cause),
    }
    tracing.current_span().add_event("stream.broken", said)


def note_first_token() -> None:
    """Note in a completion that it has begun to come."""
    span = tracing.current_span()
    if isinstance(span, RecordedSpan):
        span.set_attribute("gen_ai.response.time_to_first_chunk", span.age_s)


def tool_call(call: ToolCall, *, is_known: bool) -> Span:
    """A model's call of a tool. The name of one that is not there is the model's own words."""
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
    """A ``@reward`` function, from its call to its score: the wait for a worker is in it."""
    return tracing.span(f"reward {name}", tracing.current(), attributes={"gen_ai.evaluation.name": name})


def published(ticket: Ticket, slots: Iterable[Slot], *, num_bytes: int) -> Span:
    """A message of finished slots, from its first send to its storage: the wait for room in the stream is in it."""
    return tracing.span(
        "publish trajectories",
        tracing.current(),
        kind=PRODUCER,
        attributes={
            **_of_group(ticket.group_id, ticket.workflow),
            "areal.siblings": [str(slot.sibling) for slot in slots],
            **_sent("trajectories"),
            "messaging.message.body.size": num_bytes,
        },
    )


@contextmanager
def cut(entry: Cut, stored: Mapping[str, Mapping[int, DeliveredMessage]]) -> Iterator[None]:
    """Write a journal entry; of a cut, say of its groups how long they have waited for it.

    Args:
        stored: group id -> its messages.
    """
    if entry.kind is not CutKind.CUT or not tracing.is_on():
        yield
        return
    made = Version(entry.lineage, entry.step)
    with part_of_step(made, "cut", num_groups=len(entry.groups)):
        yield
    now_ns = time.time_ns()
    for group in entry.groups:
        tracing.past(
            "await cut",
            tracing.of_group(group.group_id),
            start_ns=max((one.stored_ns for one in stored.get(group.group_id, {}).values()), default=now_ns),
            end_ns=now_ns,
            kind=CONSUMER,
            attributes={
                **_of_group(group.group_id, group.workflow),
                **_of_step(made),
                **_received("trajectories"),
            },
        )


def settled(outcome: Outcome) -> Span:
    """The outcome of a group, or of one of its slots, is recorded."""
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
    """The first span of a row: its ticket is published; those of other samples, or published again, are below it."""
    place = tracing.of_row(ticket.eval_id, ticket.index)
    make = tracing.span if ticket.attempt or ticket.sample else tracing.first_span
    return make(f"ask {ticket.workflow}", place, kind=PRODUCER, attributes={**_of_row(ticket), **_sent("eval")})


@contextmanager
def leased_row(ticket: EvalTicket, delivery: DeliveredMessage, *, node_id: str) -> Iterator[None]:
    """As ``leased``."""
    place = tracing.of_row(ticket.eval_id, ticket.index)
    with _leased(place, ticket.workflow, delivery, _of_row(ticket), node_id=node_id, destination="eval"):
        yield


def answer(ticket: EvalTicket) -> Span:
    """The one call of a workflow that answers a row."""
    return tracing.span(
        f"invoke_workflow {ticket.workflow}",
        tracing.current(),
        attributes={
            **_of_row(ticket),
            "gen_ai.operation.name": "invoke_workflow",
            "gen_ai.workflow.name": ticket.workflow,
        },
    )


def tried(workflow: str, *, eval_id: str, index: int, sample: int) -> Span:
    """The first span of a row that no ticket asks for: a call of a workflow that answers it; others are below it."""
    make = tracing.span if sample else tracing.first_span
    return make(
        f"invoke_workflow {workflow}",
        tracing.of_row(eval_id, index),
        attributes={
            "areal.eval_id": eval_id,
            "areal.eval.index": index,
            "areal.eval.sample": sample,
            "areal.workflow": workflow,
            "gen_ai.operation.name": "invoke_workflow",
            "gen_ai.workflow.name": workflow,
        },
    )


def note_result(span: Span, result: EvalResult) -> None:
    """Say of an answer what came of it."""
    status = SlotStatus.FAILED if result.error else SlotStatus.SCORED
    said: dict[str, AnyValue] = {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.label": status.value}
    if result.error:
        tracing.fail(span, status.value, result.error)
    else:
        said["gen_ai.evaluation.score.value"] = result.reward
    span.add_event("gen_ai.evaluation.result", said)


def published_result(ticket: EvalTicket) -> Span:
    """A row's result, from when it is sent to its storage."""
    return tracing.span(
        "publish result", tracing.current(), kind=PRODUCER, attributes={**_of_row(ticket), **_sent("eval")}
    )


def received_result(result: EvalResult, delivery: DeliveredMessage) -> None:
    """A row's result has come to who asked for it."""
    tracing.past(
        "await result",
        tracing.of_row(result.eval_id, result.index),
        start_ns=delivery.stored_ns,
        kind=CONSUMER,
        attributes={
            "areal.eval_id": result.eval_id,
            "areal.eval.index": result.index,
            "areal.eval.sample": result.sample,
            **_received("eval"),
        },
    )


# a training step


def part_of_step(made: Version, name: str, **attributes: AnyValue) -> Span:
    """A part of the step that makes ``made``, on whichever process."""
    return tracing.span(
        name,
        tracing.of_step(made),
        attributes={**_of_step(made), **{f"areal.{key}": value for key, value in attributes.items()}},
    )


def call_of_step(name: str, role: str) -> Span:
    """One call of a step's graph, on this rank: the wait for its model's thread is in it."""
    return tracing.span(name, tracing.current(), attributes={"areal.model_role": role})


def trained(made: Version, group_ids: Iterable[str], *, since_s: float, wait_s: float, train_s: float) -> None:
    """A step is over, weights and all; it began to wait for its groups at ``since_s`` of the monotonic clock."""
    step = tracing.of_step(made)
    if step is None:
        return
    start_ns, begins_ns = tracing.wall_ns(since_s), tracing.wall_ns(since_s + wait_s)
    places = [(group_id, place) for group_id in group_ids if (place := tracing.of_group(group_id)) is not None]
    tracing.past(
        f"step {made.step}",
        step,
        start_ns=start_ns,
        attributes=_of_step(made),
        links=[place for _, place in places],
        is_first=True,
    )
    tracing.past("await data", step, start_ns=start_ns, end_ns=begins_ns, attributes=_of_step(made))
    for group_id, place in places:
        tracing.past(
            f"train in step {made.step}",
            place,
            start_ns=begins_ns,
            end_ns=begins_ns + int(train_s * 1e9),
            attributes={**_of_group(group_id), **_of_step(made)},
            links=[step],
        )


def _of_group(group_id: str, workflow: str = "") -> dict[str, AnyValue]:
    return {"areal.group_id": group_id, **({"areal.workflow": workflow} if workflow else {})}


def _of_row(ticket: EvalTicket) -> dict[str, AnyValue]:
    return {
        "areal.eval_id": ticket.eval_id,
        "areal.eval.index": ticket.index,
        "areal.eval.attempt": ticket.attempt,
        "areal.eval.sample": ticket.sample,
        "areal.workflow": ticket.workflow,
    }


def _of_step(made: Version) -> dict[str, AnyValue]:
    return {"areal.step": made.step, "areal.lineage": made.lineage, "areal.weights.version": str(made)}


def _sent(destination: str) -> dict[str, AnyValue]:
    return {
        "messaging.system": NATS,
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": destination,
    }


def _received(destination: str) -> dict[str, AnyValue]:
    return {
        "messaging.system": NATS,
        "messaging.operation.name": "receive",
        "messaging.operation.type": "receive",
        "messaging.destination.name": destination,
    }
