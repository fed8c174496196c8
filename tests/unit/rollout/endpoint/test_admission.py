"""A trajectory that asks too much at once waits for itself, and is told when to come again; others are served."""

import asyncio
import json
import resource
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anthropic
import anyio
import httpx
import openai
import pytest

from areal_async.config.settings import SamplingSettings
from areal_async.inference.pool import ServerHandle
from areal_async.protocol.types import Turn
from areal_async.rollout.endpoint import openai_chat
from areal_async.rollout.endpoint.admission import CONNECTIONS_PER_SESSION, AdmissionLimits
from areal_async.rollout.endpoint.http import LONG_BODY_BYTES
from areal_async.rollout.endpoint.policy import PolicyMaker, ServedPolicy
from areal_async.rollout.endpoint.server import AgentEndpoint
from areal_async.rollout.endpoint.session import Session
from areal_async.vision.images import Image
from tests.brokers import until
from tests.unit.rollout.byte_model import ScriptedModel
from tests.unit.rollout.chat_templates import codec_with
from tests.unit.rollout.endpoint.scripted_endpoint import QUESTION, chat, client, said, served, speaker

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BODIES: Mapping[str, Any] = {
    CHAT: chat(),
    RESPONSES: {"model": "m", "input": "hi"},
    MESSAGES: {"model": "m", "max_tokens": 9, "messages": QUESTION},
}
NUM_PARALLEL = 5000
PATIENCE_S = 500.0
"""For what hangs: thousands of connections take a busy machine minutes."""
NEVER_S = 10_000.0
SMALL = AdmissionLimits(
    max_body_bytes=64 << 10, max_short_bytes=1 << 10, max_share_bytes=128 << 10, max_held_bytes=192 << 10,
    body_deadline_s=NEVER_S,
)  # fmt: skip
LONG_TEXT = "many words, " * 4000


class Gate(ScriptedModel):
    """Answers when it is opened; counts who waits."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waiting = self.most_waiting = 0
        self.is_open = asyncio.Event()

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: Mapping[str, Any],
        *,
        preferred: ServerHandle | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
        images: Sequence[Image] = (),
    ) -> tuple[Turn, ServerHandle]:
        self.num_waiting += 1
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        try:
            await self.is_open.wait()
        finally:
            self.num_waiting -= 1
        self.answers.append(said("ok"))
        return await super().generate(
            prompt_ids, sampling_params, preferred=preferred, on_tokens=on_tokens, images=images
        )


def policy_at(endpoint: AgentEndpoint, model: ScriptedModel, name: str) -> ServedPolicy:
    return PolicyMaker(generator=model, codec=codec_with("hermes"), endpoint=endpoint).policy(SamplingSettings(), name)


async def connect(policy: ServedPolicy, body: bytes, *, num_bytes: int | None = None) -> Any:
    """Send a request whose body is said to have ``num_bytes``; return the reader and the writer."""
    url = httpx.URL(policy.base_url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST {url.path}{CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {policy.api_key}\r\n"
    writer.write(f"{head}content-length: {len(body) if num_bytes is None else num_bytes}\r\n\r\n".encode() + body)
    return reader, writer


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], Any]:
    """Return the status, the headers and the body."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, json.loads(await reader.readexactly(int(headers["content-length"])))


def assert_all_let_go_of(endpoint: AgentEndpoint) -> None:
    assert endpoint._app.room.num_held_bytes == endpoint._app.room.num_waiting == 0
    assert [session.num_admitted for session in endpoint._sessions.values()] == [0] * len(endpoint._sessions)


def num_connections(endpoint: AgentEndpoint) -> int:
    return len(endpoint._server.server_state.connections) if endpoint._server else 0


@asynccontextmanager
async def two_at_an_endpoint(
    limits: AdmissionLimits | None = None,
) -> AsyncIterator[tuple[AgentEndpoint, ServedPolicy, ServedPolicy]]:
    """One whose model waits at a gate, and its neighbour."""
    async with AgentEndpoint(limits=limits) as endpoint:
        greedy, neighbour = (
            policy_at(endpoint, Gate(), "greedy"),
            policy_at(endpoint, speaker(*["hi"] * 9), "neighbour"),
        )
        assert greedy.api_key != neighbour.api_key, "they have sessions"
        with anyio.fail_after(PATIENCE_S):
            yield endpoint, greedy, neighbour
            await until(lambda: not any(one.num_admitted for one in endpoint._sessions.values()))
            assert_all_let_go_of(endpoint)


def gate_of(policy: ServedPolicy) -> Gate:
    assert isinstance(policy._maker.generator, Gate)
    return policy._maker.generator


def session_of(endpoint: AgentEndpoint, policy: ServedPolicy) -> Session:
    key = policy.api_key
    (session,) = [one for one in endpoint._sessions.values() if one.key == key]
    return session


async def send_slowly(endpoint: AgentEndpoint, policy: ServedPolicy) -> asyncio.StreamWriter:
    """Begin a request with the longest body there may be, and return when it is known."""
    num_before = session_of(endpoint, policy).num_admitted
    _, writer = await connect(policy, b"{", num_bytes=SMALL.max_body_bytes)
    await until(lambda: session_of(endpoint, policy).num_admitted == num_before + 1)
    assert isinstance(writer, asyncio.StreamWriter)
    return writer


async def ask(policy: ServedPolicy, text: str = "hi") -> int:
    async with client(policy) as http:
        response = await http.post(CHAT, json=chat(messages=[{"role": "user", "content": text}]))
        return response.status_code


@pytest.fixture
def many_files() -> Iterator[int]:
    """Number of files that may be open."""
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = hard if hard != resource.RLIM_INFINITY else 1 << 16
    num_files = max(before, min(num_files, 1 << 16))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))
    yield num_files
    resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


async def test_of_thousands_of_requests_some_run_some_wait_and_others_are_told_to_come_again(many_files: int) -> None:
    num_parallel = min(NUM_PARALLEL, many_files // 2 - 500)
    statuses: list[int] = []
    waits: list[int] = []
    body = json.dumps(chat()).encode()

    async def ask_once(policy: ServedPolicy) -> None:
        reader, writer = await connect(policy, body)
        status, headers, answer = await read_answer(reader)
        statuses.append(status)
        if status == 429:
            assert answer["error"]["code"] == "rate_limit_exceeded"
            waits.append(int(headers["retry-after"]))
        writer.close()

    # Of so many some come late on a busy machine, and are to be told so by nothing but their number.
    limits = replace(AdmissionLimits.of_process(), body_deadline_s=NEVER_S, head_deadline_s=NEVER_S)
    async with two_at_an_endpoint(limits) as (endpoint, greedy, neighbour):
        gate = gate_of(greedy)
        assert num_parallel > limits.max_admitted
        async with anyio.create_task_group() as asking:
            for _ in range(num_parallel):
                asking.start_soon(ask_once, greedy)
            await until(lambda: len(statuses) == num_parallel - limits.max_admitted, within_s=PATIENCE_S)
            await until(lambda: gate.num_waiting == limits.max_running, within_s=PATIENCE_S)
            assert set(statuses) == {429}
            assert min(waits) >= 1
            assert len(set(waits)) > 1, "not all of them come again at once"
            assert "wait already" in str(greedy.failures[0])

            assert await ask(neighbour) == 200
            gate.is_open.set()

        assert gate.most_waiting == limits.max_running
        assert statuses.count(200) == len(greedy.turns) == limits.max_admitted
        assert not greedy.failures, "what was answered after it makes it good"
        await until(lambda: num_connections(endpoint) == 0, within_s=PATIENCE_S)


@pytest.mark.parametrize("path", BODIES)
async def test_official_clients_come_again_when_they_were_told_to(path: str) -> None:
    statuses: list[int] = []
    async with two_at_an_endpoint(AdmissionLimits(max_admitted=1, retry_after_s=1)) as (_, greedy, _):
        gate = gate_of(greedy)

        async def note(response: Any) -> None:
            statuses.append(response.status_code)
            if response.status_code == 429:
                kind = (json.loads(await response.aread()))["error"]["type"]
                assert (kind, response.headers["retry-after"]) == ("rate_limit_error", "1")
                gate.is_open.set()

        async with anyio.create_task_group() as asking:
            asking.start_soon(ask, greedy)
            await until(lambda: gate.num_waiting == 1)
            hooks: Any = {"response": [note]}
            keys: Any = {"base_url": greedy.base_url, "api_key": greedy.api_key}
            if path == MESSAGES:
                http = anthropic.DefaultAsyncHttpxClient(event_hooks=hooks)
                async with anthropic.AsyncAnthropic(http_client=http, **keys) as messages_client:
                    await messages_client.messages.create(**BODIES[path])
            else:
                async with openai.AsyncOpenAI(
                    http_client=openai.DefaultAsyncHttpxClient(event_hooks=hooks), **keys
                ) as openai_client:
                    wanted: Any = openai_client.responses if path == RESPONSES else openai_client.chat.completions
                    await wanted.create(**BODIES[path])

        assert (statuses[0], statuses[-1]) == (429, 200)
        assert len(greedy.turns) == 2


async def test_request_that_waits_goes_with_its_client_and_with_its_trajectory() -> None:
    body = json.dumps(chat()).encode()
    async with two_at_an_endpoint(AdmissionLimits(max_running=1)) as (endpoint, greedy, neighbour):
        session = session_of(endpoint, greedy)
        running, first = await connect(greedy, body)
        await until(lambda: gate_of(greedy).num_waiting == 1)
        _, second = await connect(greedy, body)
        await until(lambda: session.num_admitted == 2)

        second.close()
        await until(lambda: session.num_admitted == 1)
        waiting, third = await connect(greedy, body)
        await until(lambda: session.num_admitted == 2)
        assert gate_of(greedy).most_waiting == 1
        greedy.close()
        for reader in (running, waiting):
            assert (await read_answer(reader))[0] == 401
        assert session.num_admitted == 0
        assert await ask(neighbour) == 200
        first.close()
        third.close()


@pytest.mark.parametrize("num_bytes", [100, 60_000], ids=["short", "long"])
async def test_body_that_does_not_end_is_given_up(num_bytes: int) -> None:
    limits = AdmissionLimits(body_deadline_s=1.0, head_deadline_s=NEVER_S, max_short_bytes=1 << 10)
    async with two_at_an_endpoint(limits) as (endpoint, greedy, neighbour):
        reader, writer = await connect(greedy, b'{"messages"', num_bytes=num_bytes)
        status, headers, answer = await read_answer(reader)

        assert (status, answer["error"]["code"], headers["x-should-retry"]) == (408, "request_timeout", "true")
        assert await reader.read() == b"", "the connection is closed"
        assert "has not come within 1 s" in str(greedy.failures[0])
        assert await ask(neighbour) == 200
        assert_all_let_go_of(endpoint)
        writer.close()


async def test_slow_bodies_of_one_wait_for_its_own_share_and_go_with_it() -> None:
    async with two_at_an_endpoint(SMALL) as (endpoint, greedy, neighbour):
        room = endpoint._app.room
        clients = [await send_slowly(endpoint, greedy) for _ in range(9)]
        await until(lambda: room.num_waiting == 7)
        assert room.num_held_bytes == SMALL.max_share_bytes

        assert await ask(neighbour, LONG_TEXT) == 200
        assert room.num_held_bytes == SMALL.max_share_bytes
        for writer in clients[:2]:
            writer.close()
        await until(lambda: room.num_waiting == 5)
        assert room.num_held_bytes == SMALL.max_share_bytes, "others have their turn"
        greedy.close()
        await until(lambda: room.num_held_bytes == 0)
        assert_all_let_go_of(endpoint)
        for writer in clients[2:]:
            writer.close()


async def test_short_request_is_answered_though_slow_bodies_take_all_room() -> None:
    async with two_at_an_endpoint(SMALL) as (endpoint, greedy, neighbour):
        room = endpoint._app.room
        other = policy_at(endpoint, Gate(), "other")
        clients = [await send_slowly(endpoint, one) for one in (greedy, greedy, other, other)]
        await until(lambda: room.num_waiting == 1)
        assert room.num_held_bytes == SMALL.max_held_bytes

        assert await ask(neighbour) == 200
        async with anyio.create_task_group() as asking:
            asking.start_soon(ask, neighbour, LONG_TEXT)
            await until(lambda: room.num_waiting == 2)
            for writer in clients:
                writer.close()
        assert len(neighbour.turns) == 2


async def test_body_of_unknown_length_holds_as_much_as_came() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield json.dumps(chat(messages=[{"role": "user", "content": LONG_TEXT}])).encode()

    async with two_at_an_endpoint(SMALL) as (endpoint, greedy, _):
        room = endpoint._app.room
        async with client(greedy) as http, anyio.create_task_group() as asking:
            asking.start_soon(lambda: http.post(CHAT, content=pieces()))
            await until(lambda: gate_of(greedy).num_waiting == 1)
            assert len(LONG_TEXT) < room.num_held_bytes < SMALL.max_body_bytes
            gate_of(greedy).is_open.set()


async def test_longer_body_than_may_be_is_refused_before_it_comes() -> None:
    async with two_at_an_endpoint(SMALL) as (_, greedy, _):
        reader, writer = await connect(greedy, b"{", num_bytes=SMALL.max_body_bytes + 1)

        assert (await read_answer(reader))[0] == 413
        writer.close()


async def test_long_body_is_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    on_loop: list[bool] = []
    parse = openai_chat.parse

    def watched(*args: Any) -> Any:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return parse(*args)

    monkeypatch.setattr(openai_chat, "parse", watched)
    async with served(speaker("hi", "ho")) as policy:
        assert await ask(policy, "x" * 100) == 200
        assert await ask(policy, "x" * (LONG_BODY_BYTES + 1)) == 200
    assert on_loop == [True, False]


def test_process_that_may_open_few_files_has_fewer_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {}
    for num_files in (1024, 20_000, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _, num_files=num_files: (num_files, num_files))
        limits[num_files] = AdmissionLimits.of_process()

    assert limits[20_000] == limits[resource.RLIM_INFINITY] == AdmissionLimits()
    assert limits[1024].max_connections == 512
    assert limits[1024].max_admitted == 512 // CONNECTIONS_PER_SESSION
