"""A completion survives what happens to its streams: no token is lost, repeated or stamped too fresh."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from areal_async.config.settings import InferenceSettings
from areal_async.errors import ContextFull, GenerationError
from areal_async.inference.client import InferenceClient
from areal_async.inference.http import context_tokens_of
from areal_async.inference.pool import ServerPool
from areal_async.protocol.types import VersionSpan
from areal_async.telemetry import tracing
from areal_async.telemetry.tracing import RecordedSpan
from tests.fakes.fake_sglang import EventStream, FakeSglang, Script, event

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]

STOP = {"type": "stop"}
PARAMS = {"max_new_tokens": 16, "stop_token_ids": [2]}


@asynccontextmanager
async def client_of(
    *servers: FakeSglang, pool_deadline_s: float = 5, vocab_size: int = 1 << 20, **settings: Any
) -> AsyncIterator[InferenceClient]:
    async with AsyncExitStack() as stack:
        pool = ServerPool([f"s{index}" for index in range(len(servers))], deadline_s=pool_deadline_s)
        for known, server in zip(pool.servers.values(), servers, strict=True):
            await stack.enter_async_context(server)
            pool.admit(known, url=server.url, version=server.version)
        client = InferenceClient(pool, InferenceSettings(**settings), max_streams=16, vocab_size=vocab_size)
        yield await stack.enter_async_context(client)


def streaming(*events: bytes, cut: Callable[[bytes], list[bytes]] = lambda data: [data]) -> Script:
    async def script(request: dict[str, Any], stream: EventStream) -> None:
        for part in cut(b"".join(events)):
            await stream.send_bytes(part)
        await stream.finish()

    return script


def span(version: str, start: int, end: int) -> dict[str, Any]:
    return {"version": version, "start": start, "end": end}


TWO_EVENTS = (
    event([11, 12], "1-0"),
    event([13, 2], "1-0", finish_reason=STOP, weight_versions=[span("1-0", 0, 4)]),
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 4096])
async def test_events_are_whole_wherever_the_bytes_are_cut(size: int) -> None:
    cut = lambda data: [data[at : at + size] for at in range(0, len(data), size)]  # noqa: E731
    async with client_of(FakeSglang(streaming(*TWO_EVENTS, cut=cut))) as client:
        turn, server = await client.generate([1, 3], PARAMS)

    assert turn.prompt_ids == [1, 3]
    assert turn.output_ids == [11, 12, 13, 2]
    assert turn.logprobs == [-0.11, -0.12, -0.13, -0.02]
    assert turn.finish_reason == "stop"
    assert turn.spans == [VersionSpan(version="1-0", start=0, end=4)]
    assert (server.outstanding_tokens, server.num_requests, server.num_generated_tokens) == (0, 0, 4)
    assert server.num_first_tokens == 1, "once for a stream, however many events it has"
    assert server.first_token_total_s > 0


async def test_request_that_waited_through_an_update_keeps_its_submit_version() -> None:
    late = event([7, 2], "1-5", finish_reason=STOP, weight_versions=[span("1-5", 0, 2)])
    async with client_of(FakeSglang(streaming(late), version="1-4")) as client:
        turn, _ = await client.generate([1], PARAMS)

    assert turn.oldest == "1-4"
    assert turn.spans == [VersionSpan(version="1-5", start=0, end=2)]


async def test_spans_of_the_last_event_are_taken_as_they_are() -> None:
    events = (
        event([7, 8, 9], "1-2"),
        event([2], "1-2", finish_reason=STOP, weight_versions=[span("1-1", 0, 2), span("1-2", 2, 4)]),
    )
    async with client_of(FakeSglang(streaming(*events), version="1-1")) as client:
        turn, _ = await client.generate([1], PARAMS)

    assert [(s.version, s.start, s.end) for s in turn.spans] == [("1-1", 0, 2), ("1-2", 2, 4)]
    assert turn.oldest == "1-1"


@pytest.mark.parametrize(
    "spans", [[span("1-0", 0, 3)], [span("1-0", 0, 2), span("1-1", 3, 4)], [span("1-0", 1, 4)], []]
)
async def test_spans_that_leave_a_gap_are_an_error(spans: list[dict[str, Any]]) -> None:
    bad = event([7, 8, 9, 2], "1-0", finish_reason=STOP, weight_versions=spans)
    async with client_of(FakeSglang(streaming(bad))) as client:
        with pytest.raises(GenerationError, match="covered once"):
            await client.generate([1], PARAMS)


async def test_broken_stream_goes_on_elsewhere_without_losing_or_repeating_a_token() -> None:
    async def break_after_five(request: dict[str, Any], stream: EventStream) -> None:
        await stream.send([10, 11], "1-3")
        await stream.send([12, 13, 14], "1-4")
        await stream.send_bytes(event([15, 16], "1-4")[:40])
        stream.break_off()

    rest = event([15, 16, 2], "1-4", finish_reason=STOP, weight_versions=[span("1-4", 0, 3)])
    first, second = FakeSglang(break_after_five, version="1-3"), FakeSglang(streaming(rest), version="1-4")
    async with client_of(first, second) as client:
        turn, server = await client.generate([1, 3], PARAMS, preferred=client.pool.servers["s0"])

    assert turn.output_ids == [10, 11, 12, 13, 14, 15, 16, 2]
    assert turn.logprobs == [-token / 100 for token in turn.output_ids]
    assert second.requests[0]["input_ids"] == [1, 3, 10, 11, 12, 13, 14]
    assert second.requests[0]["sampling_params"]["max_new_tokens"] == 11
    assert server.id == "s1"
    assert client.pool.servers["s0"].doubt
    # An event's stamp is the version at its sending; what a broken stream sent gets the older of two stamps.
    assert [(s.version, s.start, s.end) for s in turn.spans] == [("1-3", 0, 5), ("1-4", 5, 8)]


async def test_a_traced_completion_tells_of_its_streams_and_its_servers_join_the_trace() -> None:
    """By W3C's header, the same for both servers; without a trace no server sees any."""

    async def break_after_two(request: dict[str, Any], stream: EventStream) -> None:
        await stream.send([10, 11], "1-3")
        stream.break_off()

    rest = event([15, 2], "1-4", finish_reason=STOP, weight_versions=[span("1-4", 0, 2)])
    first, second = FakeSglang(break_after_two, version="1-3"), FakeSglang(streaming(rest), version="1-4")
    untraced = FakeSglang(streaming(*TWO_EVENTS))
    kept: list[RecordedSpan] = []

    class Recorder:
        def record(self, span: RecordedSpan) -> None:
            kept.append(span)

    tracing.install(Recorder(), run="r")
    try:
        async with client_of(first, second) as client, client_of(untraced) as other:
            with tracing.span("invoke_workflow", tracing.of_group("0-1-0"), attributes={}):
                await client.generate([1, 3], PARAMS, preferred=client.pool.servers["s0"])
            await other.generate([1, 3], PARAMS)
    finally:
        tracing.install(None)

    completion, workflow = kept
    assert completion.parent == workflow.context
    header = f"00-{completion.context.trace_id:032x}-{completion.context.span_id:016x}-01"
    assert {one.headers[0]["traceparent"] for one in (first, second)} == {header}
    assert "traceparent" not in untraced.headers[0]
    streams = [(one.name, one.attributes["areal.server_id"]) for one in completion.events]
    assert streams == [("stream.begun", "s0"), ("stream.broken", "s0"), ("stream.begun", "s1")]
    said = completion.attributes
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (2, 4)
    assert said["gen_ai.response.finish_reasons"] == ["stop"]
    assert (said["areal.weights.versions"], said["areal.server_id"]) == (["1-3", "1-4"], "s1")
    assert said["gen_ai.response.time_to_first_chunk"] > 0


async def test_tokens_are_heard_as_they_come_each_once_however_many_streams_break() -> None:
    async def break_after_three(request: dict[str, Any], stream: EventStream) -> None:
        await stream.send([10, 11], "1-3")
        await stream.send([12], "1-3")
        await stream.send_bytes(event([13, 14], "1-3")[:40])
        stream.break_off()

    rest = event([13, 2], "1-3", finish_reason=STOP, weight_versions=[span("1-3", 0, 2)])
    first, second = FakeSglang(break_after_three, version="1-3"), FakeSglang(streaming(rest), version="1-3")
    heard: list[list[int]] = []
    async with client_of(first, second) as client:
        turn, _ = await client.generate([1], PARAMS, on_tokens=heard.append)

    assert heard == [[10, 11], [12], [13, 2]]
    assert turn.output_ids == [10, 11, 12, 13, 2]


async def test_stream_that_ends_without_its_last_event_goes_on_and_its_server_is_doubted() -> None:
    half = event([10, 11], "1-0")
    rest = event([2], "1-0", finish_reason=STOP, weight_versions=[span("1-0", 0, 1)])
    async with client_of(FakeSglang(streaming(half)), FakeSglang(streaming(rest))) as client:
        first, second = client.pool.servers.values()
        turn, server = await client.generate([1], {**PARAMS, "temperature": 0.6}, preferred=first)

    assert (turn.output_ids, server) == ([10, 11, 2], second)
    assert turn.temperature == 0.6, "what every stream was asked for"
    assert first.doubt == "the stream ended early"


async def test_request_aborted_by_a_pause_goes_on_where_it_stopped() -> None:
    async def abort_then_answer(request: dict[str, Any], stream: EventStream) -> None:
        if len(server.requests) == 1:
            await stream.send([10], "1-0", finish_reason={"type": "abort"}, weight_versions=[span("1-0", 0, 1)])
        else:
            await stream.send([11, 2], "1-1", finish_reason=STOP, weight_versions=[span("1-1", 0, 2)])
        await stream.finish()

    server = FakeSglang(abort_then_answer)
    async with client_of(server) as client:
        turn, known = await client.generate([1], PARAMS)

    assert turn.output_ids == [10, 11, 2]
    assert [(s.version, s.start, s.end) for s in turn.spans] == [("1-0", 0, 1), ("1-1", 1, 3)]
    assert not known.doubt


@pytest.mark.parametrize("unsent", [[], [12, 13]])
async def test_abort_event_that_repeats_what_was_sent_adds_only_what_is_new(unsent: list[int]) -> None:
    """A request that SGLang aborts while it waits ends with its last token again and all its logprobs again."""

    async def abort_then_answer(request: dict[str, Any], stream: EventStream) -> None:
        if len(server.requests) == 1:
            await stream.send([10, 11], "1-0", completion_tokens=2)
            known = [10, 11, *unsent]
            repeated = [*unsent, known[-1]]
            logprobs = [[-token / 100, token, None] for token in unsent + known]
            await stream.send(
                repeated, "1-0", finish_reason={"type": "abort"}, completion_tokens=len(known),
                output_token_logprobs=logprobs, weight_versions=[span("1-0", 0, len(known))],
            )  # fmt: skip
        else:
            await stream.send([2], "1-1", finish_reason=STOP, weight_versions=[span("1-1", 0, 1)])
        await stream.finish()

    server = FakeSglang(abort_then_answer)
    async with client_of(server) as client:
        turn, known_server = await client.generate([1], PARAMS)

    assert turn.output_ids == [10, 11, *unsent, 2]
    assert turn.logprobs == [-token / 100 for token in turn.output_ids]
    assert server.requests[1]["input_ids"] == [1, 10, 11, *unsent]
    assert not known_server.doubt


async def test_stream_that_breaks_with_its_last_token_allowed_ends_by_length() -> None:
    async def break_off(request: dict[str, Any], stream: EventStream) -> None:
        await stream.send([10, 11], "1-0")
        stream.break_off()

    server = FakeSglang(break_off)
    async with client_of(server) as client:
        turn, _ = await client.generate([1], {"max_new_tokens": 2})

    assert (turn.output_ids, turn.finish_reason) == ([10, 11], "length")
    assert len(server.requests) == 1


async def test_refused_request_is_an_error_at_once_in_the_servers_words() -> None:
    async def refuse(request: dict[str, Any], stream: EventStream) -> None:
        await stream.refuse(400, {"error": {"message": "input of 9999 tokens is longer than 512"}})

    server = FakeSglang(refuse)
    async with client_of(server) as client:
        with pytest.raises(GenerationError, match="input of 9999 tokens is longer than 512"):
            await client.generate([1], PARAMS)

    assert len(server.requests) == 1


async def test_refusal_inside_a_stream_is_an_error_at_once() -> None:
    refusal = b'data: {"error": {"message": "too long"}}\n\n'
    async with client_of(FakeSglang(streaming(refusal))) as client:
        with pytest.raises(GenerationError, match="too long"):
            await client.generate([1], PARAMS)


async def test_stream_without_incremental_output_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_async.inference.client.MAX_FRUITLESS_STREAMS", 1)
    cumulative = event([10], "1-0", output_token_logprobs=[[-0.1, 9, None], [-0.1, 10, None]])
    async with client_of(FakeSglang(streaming(cumulative))) as client:
        with pytest.raises(GenerationError, match="--incremental-streaming-output"):
            await client.generate([1], PARAMS)


async def test_cancelled_request_is_aborted_at_the_server() -> None:
    began = anyio.Event()

    async def never_end(request: dict[str, Any], stream: EventStream) -> None:
        await stream.send([10], "1-0")
        began.set()
        await anyio.sleep_forever()

    server = FakeSglang(never_end)
    async with client_of(server) as client, anyio.create_task_group() as tasks:
        client.pool.servers["s0"].admin_key = "secret"
        tasks.start_soon(client.generate, [1], PARAMS)
        await began.wait()
        await wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()

    assert server.calls == [("/abort_request", {"rid": server.requests[0]["rid"]})]
    assert server.authorizations == ["bearer secret"]
    assert "authorization" not in server.headers[0], "the secret was sent where it is not needed"


async def test_stream_that_falls_silent_is_given_up_after_its_deadline() -> None:
    async def fall_silent(request: dict[str, Any], stream: EventStream) -> None:
        await stream.send([10], "1-0")
        await anyio.sleep_forever()

    server = FakeSglang(fall_silent)
    async with client_of(server, pool_deadline_s=0.05, between_tokens_deadline_s=0.05) as client:
        with pytest.raises(GenerationError, match=r"no inference server .*no event for 0.05 s"):
            await client.generate([1], PARAMS)

    assert [route for route, _ in server.calls] == ["/abort_request"]


@pytest.mark.parametrize("has_other", [False, True])
async def test_server_is_silent_only_while_it_gives_nobody_a_token(has_other: bool) -> None:
    told = anyio.Event()

    async def script(request: dict[str, Any], stream: EventStream) -> None:
        if request["input_ids"] == [1]:
            await stream.send([10], "1-0")
            await anyio.sleep_forever()
        await stream.send([11, 2], "1-0", finish_reason=STOP, weight_versions=[span("1-0", 0, 2)])
        await stream.finish()

    async with client_of(FakeSglang(script), pool_deadline_s=0.05, between_tokens_deadline_s=1) as client:
        known = client.pool.servers["s0"]

        async def fail() -> None:
            with pytest.raises(GenerationError, match="no event for 1 s"):
                await client.generate([1], PARAMS, on_tokens=lambda _: told.set())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)
            await told.wait()
            if has_other:
                await client.generate([3], PARAMS)

    assert known.doubt
    assert known.is_silent is not has_other


async def test_completion_waits_for_a_server_and_goes_on_when_one_is_admitted() -> None:
    server = FakeSglang(streaming(*TWO_EVENTS))
    async with client_of(server) as client:
        known = client.pool.servers["s0"]
        client.pool.fence(known, "starting")
        turns: list[list[int]] = []

        async def generate() -> None:
            turns.append((await client.generate([1], PARAMS))[0].output_ids)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate)
            await wait_all_tasks_blocked()
            assert not server.requests
            client.pool.admit(known, url=server.url, version="1-0")

    assert turns == [[11, 12, 13, 2]]


async def test_completion_past_its_total_deadline_is_aborted_and_the_error_names_it() -> None:
    async def go_on_for_ever(request: dict[str, Any], stream: EventStream) -> None:
        await stream.send([10, 11], "1-0")
        await anyio.sleep_forever()

    server = FakeSglang(go_on_for_ever)
    async with client_of(server, total_deadline_s=0.2) as client:
        with pytest.raises(GenerationError, match=r"got 2 of at most 16 tokens within inference.total_d.* = 0.2"):
            await client.generate([1], PARAMS)

    assert server.calls == [("/abort_request", {"rid": server.requests[0]["rid"]})]


async def test_total_deadline_counts_the_wait_for_a_server_too() -> None:
    async with client_of(FakeSglang(), total_deadline_s=0.05) as client:
        client.pool.fence(client.pool.servers["s0"], "starting")
        with pytest.raises(GenerationError, match="got 0 of at most 16 tokens within inference.total_deadline_s"):
            await client.generate([1], PARAMS)


@pytest.mark.parametrize(
    ("prompt_ids", "complaint"),
    [
        ([5, 100, 6], r"got token id 100 at position 1, need 0 to 99: the model's vocabulary has 100"),
        ([5, 6, -1, 200], r"got token id -1 at position 2, need 0 to 99"),
        ([], r"got no tokens, need at least one"),
    ],
)
async def test_prompt_that_would_end_a_server_is_never_sent(prompt_ids: list[int], complaint: str) -> None:
    server = FakeSglang(streaming(*TWO_EVENTS))
    async with client_of(server, vocab_size=100) as client:
        with pytest.raises(GenerationError, match=complaint):
            await client.generate(prompt_ids, PARAMS)
        await client.generate([0, 99], PARAMS)

    assert [request["input_ids"] for request in server.requests] == [[0, 99]]


async def test_answer_is_asked_for_as_long_as_the_server_s_context_has_room() -> None:
    async def break_off(request: dict[str, Any], stream: EventStream) -> None:
        await stream.send([10, 11, 12], "1-0")
        stream.break_off()

    first, second = FakeSglang(break_off), FakeSglang()
    async with client_of(first, second) as client:
        for server in client.pool.servers.values():
            server.context_tokens = 16
        one = client.pool.servers["s0"]
        with pytest.raises(ContextFull, match="got 10 tokens"):
            await client.generate([1] * 10, PARAMS, preferred=one)
        turn, _ = await client.generate([1] * 9, PARAMS, preferred=one)

    assert [request["sampling_params"]["max_new_tokens"] for request in first.requests] == [5]
    assert (turn.output_ids, turn.finish_reason, second.requests) == ([10, 11, 12], "length", [])
    assert one.num_requests == 0


@pytest.mark.parametrize(
    ("info", "tokens"),
    [
        ({"context_length": None, "max_req_input_len": 506}, 512),
        ({"context_length": 4096, "max_req_input_len": 506}, 512),
        ({"context_length": 512}, 512),
        ({"context_length": 512, "speculative_eagle_topk": 4, "speculative_num_steps": 5}, 492),
        ({"context_length": 512, "speculative_num_draft_tokens": 8, "speculative_eagle_topk": None}, 504),
        ({}, None),
    ],
)
def test_context_is_what_the_server_says_of_it(info: dict[str, Any], tokens: int | None) -> None:
    assert context_tokens_of(info) == tokens
