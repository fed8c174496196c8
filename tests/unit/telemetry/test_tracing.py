"""Traces need nothing on the wire: ids are derived, alike in every process, and off they cost nothing."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.lowlevel
import pytest
from opentelemetry.trace import SpanContext, format_span_id, format_trace_id

from areal_async.api import ToolCall
from areal_async.errors import RewardError, WorkflowError
from areal_async.protocol.evaluations import EvalResult, EvalTicket
from areal_async.protocol.types import Outcome, OutcomeKind, Slot, SlotStatus, Ticket, Trajectory, Version
from areal_async.rollout.tools.run import Toolbox
from areal_async.telemetry import spans, tracing
from areal_async.telemetry.tracing import (
    NOTHING,
    RecordedSpan,
    derived,
    install,
    is_sampled,
    of_group,
    of_row,
    of_step,
    span,
)
from tests.unit.rollout import sample_rewards

SECRET = "what the model wrote"
IDS = [f"0-{index}-0" for index in range(4000)]


def _ids(found: SpanContext) -> tuple[str, str]:
    return format_trace_id(found.trace_id), format_span_id(found.span_id)


class Kept(list[RecordedSpan]):
    """A recorder."""

    def record(self, span: RecordedSpan) -> None:
        self.append(span)


@pytest.fixture
def kept() -> Iterator[Kept]:
    install(kept := Kept(), run="seen.1", has_texts=True)
    yield kept
    install(None)


def test_ids_follow_from_the_run_and_the_group_alone() -> None:
    """Another process, another host, another day: these very numbers, or a trace falls apart."""
    first = derived("gsm8k.ab12", "group", "0-17-0")

    assert _ids(first) == ("29294f02b59bb536a8a5fcc21062f336", "4fc90be3334d88b3")
    assert (first.trace_flags, first.is_remote) == (1, True)
    others = [("gsm8k.cd34", "group", "0-17-0"), ("gsm8k.ab12", "group", "0-17-1"), ("gsm8k.ab12", "step", "0-17-0")]
    assert len({_ids(first), *(_ids(derived(*other)) for other in others)}) == 4
    row = derived("gsm8k.ab12", "eval", "1-40.7")
    assert _ids(row) == ("84960745568bc9d6cfbc8fb108e43198", "5fa68110566469e8")


@pytest.mark.usefixtures("kept")
def test_which_groups_are_recorded_follows_from_their_ids() -> None:
    """Alike in every process; and more of them at a higher ratio, never others."""
    traces = {group_id: derived("run", "group", group_id).trace_id for group_id in IDS}
    tenth, half = ({one for one in IDS if is_sampled(traces[one], ratio)} for ratio in (0.1, 0.5))

    assert tenth < half
    assert 0.08 < len(tenth) / len(IDS) < 0.12
    assert 0.47 < len(half) / len(IDS) < 0.53
    assert all(is_sampled(trace, 1.0) for trace in traces.values())
    assert not any(is_sampled(trace, 0.0) for trace in traces.values())
    install(Kept(), run="run", ratio=0.1)
    assert {one for one in IDS if of_group(one) is not None} == tenth
    assert {one for one in range(4000) if of_row("1-2", one) is not None} == {
        one for one in range(4000) if is_sampled(derived("run", "eval", f"1-2.{one}").trace_id, 0.1)
    }
    assert of_step(Version(1, 1)) is not None, "steps all are"


@pytest.mark.timeout(400)  # a process that imports all of it
def test_off_nothing_is_recorded_and_the_sdk_is_not_imported() -> None:
    """By none of the processes, and by the command line, which answers ``--help`` at once, not even the API."""
    code = (
        "import sys, pathlib\n"
        "import areal_async.cli.main\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
        "import areal_async.cli.run, areal_async.doctor.preflight\n"
        "import areal_async.controller.main, areal_async.rollout.main, areal_async.trainer.main\n"
        "from areal_async.telemetry import tracing\n"
        "from areal_async.telemetry.exporters.traces import recording\n"
        "from areal_async.config.settings import Settings\n"
        "with recording(Settings(), pathlib.Path('nowhere'), role='node'):\n"
        "    assert tracing.of_group('0-1-0') is None\n"
        "heavy = ('opentelemetry.sdk', 'opentelemetry.exporter', 'requests')\n"
        "print(sorted(name for name in sys.modules if name.startswith(heavy)))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path.cwd(), check=False)
    assert ended.stdout.strip() == "[]", ended.stdout + ended.stderr


def test_off_every_span_is_the_same_one_that_does_nothing() -> None:
    assert of_group("0-1-0") is None
    assert of_row("1-2", 7) is None
    assert of_step(Version(1, 1)) is None
    with span("x", of_group("0-1-0"), attributes={}) as made:
        made.set_attribute("a", 1)
        made.add_event("b", {})
        tracing.fail(made, "c", "d")
        assert tracing.current() is None
        assert tracing.headers() == {}
    assert made is NOTHING


@pytest.mark.anyio
async def test_a_span_belongs_to_the_one_that_its_task_was_started_in(kept: Kept) -> None:
    """Siblings run side by side: what each one calls is below it, and below no other."""

    async def sibling(number: int) -> None:
        with span(f"sibling {number}", tracing.current(), attributes={}):
            await anyio.lowlevel.checkpoint()
            async with anyio.create_task_group() as calls:
                calls.start_soon(call, number)

    async def call(number: int) -> None:
        with span(f"call {number}", tracing.current(), attributes={}):
            await anyio.lowlevel.checkpoint()

    group = of_group("0-1-0")
    with tracing.span("group", group, is_first=True, attributes={}):
        async with anyio.create_task_group() as siblings:
            for number in range(3):
                siblings.start_soon(sibling, number)

    named = {one.name: one for one in kept}
    assert named["group"].context == group
    assert named["group"].parent is None
    for number in range(3):
        assert named[f"sibling {number}"].parent == group
        assert named[f"call {number}"].parent == named[f"sibling {number}"].context
    assert {one.context.trace_id for one in kept} == {named["group"].context.trace_id}
    assert all(one.end_ns >= one.start_ns for one in kept)
    assert tracing.current() is None


def test_an_error_is_said_in_our_words_and_a_strangers_is_not_asked_for_any(kept: Kept) -> None:
    """A user's exception may raise when it is printed."""

    class Hostile(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    for error in (WorkflowError("workflow x: got y"), Hostile()):
        with pytest.raises(type(error)), span("x", of_group("0-1-0"), attributes={}):
            raise error

    assert [one.status.description for one in kept] == ["workflow x: got y", "Hostile"]
    assert [one.attributes["error.type"] for one in kept] == ["WorkflowError", "Hostile"]


class Came(NamedTuple):
    """A delivered message."""

    stored_ns: int = 5
    num_delivered: int = 2


def test_a_held_out_row_has_one_trace_however_often_it_is_asked_and_answered(kept: Kept) -> None:
    for attempt in range(2):
        ticket = EvalTicket(eval_id="1-40", index=7, workflow="w", row={}, attempt=attempt)
        with spans.asked(ticket):
            pass
        with spans.leased(ticket, Came(), node_id="0"):
            with spans.answer(ticket) as span:
                spans.note_result(span, EvalResult(eval_id="1-40", index=7, reward=0.5))
            with spans.published_result(ticket):
                pass
    spans.received_result(EvalResult(eval_id="1-40", index=7), Came())

    row = of_row("1-40", 7)
    assert row is not None
    assert {one.context.trace_id for one in kept} == {row.trace_id}
    assert len({one.context.span_id for one in kept}) == len(kept), "no span twice"
    (first,) = [one for one in kept if one.parent is None]
    assert (first.name, first.context) == ("ask w", row)
    leases = [one for one in kept if one.name == "lease w"]
    above = {one.name: one.parent for one in kept}
    assert [one.parent for one in leases] == [row, row]
    assert above["ask w"] == above["await result"] == row, "asked again, it is below the first"
    assert above["invoke_workflow w"] == above["publish result"] == leases[1].context
    (result,) = [one.events for one in kept if one.name == "invoke_workflow w"][0]
    assert result.attributes["gen_ai.evaluation.score.value"] == 0.5
    assert all(one.attributes["areal.eval_id"] == "1-40" for one in kept)


def test_a_step_is_linked_to_the_groups_it_trains_and_they_to_it(kept: Kept) -> None:
    made = Version(2, 7)
    spans.trained(made, ["0-1-0", "0-2-0"], since_s=0.0, wait_s=0.5, train_s=2.0)

    step = of_step(made)
    assert step is not None
    (first,) = [one for one in kept if one.parent is None]
    assert (first.context, [one.context for one in first.links]) == (step, [of_group("0-1-0"), of_group("0-2-0")])
    trained = [one for one in kept if one.name == "train in step 7"]
    assert [(one.parent, one.links[0].context) for one in trained] == [(one.context, step) for one in first.links]
    assert [one.end_ns - one.start_ns for one in trained] == [2_000_000_000] * 2
    assert of_step(Version(2, 0)) is None  # nobody has trained those


@pytest.mark.anyio
async def test_a_tool_and_a_reward_are_below_the_episode_that_called_them(kept: Kept) -> None:
    """A call that is none is there too, with the words that the model is given."""

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    slot = Slot(sibling=1, sample_uid="u", status=SlotStatus.FAILED, reason="no reward", oldest="1-0", newest="1-0")
    failed = Trajectory(slot=slot, sequences=[])
    ticket = Ticket(group_id="0-1-0", workflow="w", row={}, group_size=2, version="1-0")
    calls = [ToolCall(id="call00001", name="add", arguments=given) for given in ({"a": 1, "b": 2}, {"a": "x"})]
    with tracing.span("admit", of_group("0-1-0"), is_first=True, attributes={}), spans.episode(ticket, [1]) as episode:
        results = await Toolbox([add], timeout_s=5.0).run(calls)
        assert [one.is_error for one in results] == [False, True]
        assert await sample_rewards.length_of("four") == 4.0
        spans.note_trajectories(episode, [failed])

    named: dict[str, RecordedSpan] = {one.name: one for one in kept}
    below = [one for one in kept if one.parent == named["invoke_workflow w"].context]
    assert [one.name for one in below] == ["execute_tool add", "execute_tool add", "reward length_of"]
    good, bad, reward = below
    assert (good.status.description, good.attributes["gen_ai.tool.call.id"], reward.status.description) == (
        None,
        "call00001",
        None,
    )
    assert bad.status.description == results[1].text.removeprefix("error: ")
    (result,) = named["invoke_workflow w"].events
    assert (result.name, result.attributes["gen_ai.evaluation.score.label"]) == ("gen_ai.evaluation.result", "failed")
    assert named["invoke_workflow w"].status.description == "no reward"


@pytest.mark.anyio
@pytest.mark.parametrize("has_texts", [False, True])
async def test_what_a_model_wrote_is_in_no_span_unless_texts_are_let_in(*, has_texts: bool) -> None:
    """Errors, reasons and causes may quote prompts and answers; the name of a tool that is not there always does."""

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        raise ValueError(f"cannot add {a}, {b}: {SECRET}")

    install(kept := Kept(), run="seen.1", has_texts=has_texts)
    ends = [
        Trajectory(
            slot=Slot(sibling=0, sample_uid="u", status=status, reason=SECRET, oldest="1-0", newest="1-0"), sequences=[]
        )
        for status in (SlotStatus.FAILED, SlotStatus.REJECTED)
    ]
    ticket = Ticket(group_id="0-1-0", workflow="w", row={}, group_size=2, version="1-0")
    calls = [ToolCall(id="call00001", name=name, arguments={"a": 1, "b": 2}) for name in ("add", SECRET * 100)]
    with (
        tracing.span("admit", of_group("0-1-0"), is_first=True, attributes={}),
        spans.episode(ticket, [0, 1]) as episode,
    ):
        spans.note_break("0-0", "ServerFault", SECRET, num_tokens=3)
        await Toolbox([add], timeout_s=5.0).run(calls)
        spans.note_trajectories(episode, ends)
    with pytest.raises(RewardError), span("reward r", of_group("0-1-0"), attributes={}):
        raise RewardError(f"reward r: {SECRET}")
    row = EvalTicket(eval_id="1-40", index=7, workflow="e", row={"question": SECRET})
    with spans.asked(row), spans.leased(row, Came(), node_id="0"), spans.answer(row) as answer:
        spans.note_result(answer, EvalResult(eval_id="1-40", index=7, error=SECRET))
    with spans.settled(Outcome(kind=OutcomeKind.FAILED, group_id="0-1-0", lineage=1, reason=SECRET)):
        pass
    install(None)

    assert all(SECRET not in one.name for one in kept)
    failed = {one.name: one for one in kept if not one.status.is_unset}
    assert {name: one.attributes["error.type"] for name, one in failed.items()} == {
        "execute_tool add": "ToolError",
        "execute_tool unknown": "ToolError",
        "invoke_workflow w": "failed",
        "reward r": "RewardError",
        "invoke_workflow e": "failed",
        "settle failed": "failed",
    }
    quoting = [one for one in kept if SECRET in str((one.status.description, one.attributes, one.events))]
    assert [one.name for one in quoting] == (list(failed) if has_texts else [])
    assert all(len(str(one.status.description)) <= tracing.MAX_REASON_CHARACTERS for one in kept)
