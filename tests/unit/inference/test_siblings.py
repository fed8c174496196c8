"""A group's prompt is computed once, on one server, and nobody waits for it longer than for a moment."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from areal_async.config.settings import InferenceSettings
from areal_async.inference import siblings
from areal_async.inference.client import InferenceClient
from areal_async.inference.pool import MAX_IMBALANCE, ServerPool, SiblingGroup
from areal_async.inference.siblings import requests_of
from areal_async.protocol.types import Turn
from tests.fakes.fake_sglang import EventStream, FakeSglang
from tests.unit.inference.embedded_engine import Server, prompt_of

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]

PARAMS = {"max_new_tokens": 8, "stop_token_ids": [2], "temperature": 1.0}
STOP = {"type": "stop"}
GROUP_SIZE = 8


class RadixServer:
    """Counts the tokens that a server with a prefix cache has to compute: a prefix is found once its request began."""

    def __init__(self) -> None:
        self.fake = FakeSglang(self._answer)
        self._cached: list[list[int]] = []
        self.num_computed = 0
        self.gate: asyncio.Event | None = None
        """What first tokens wait for; None for none."""
        self.is_broken = False
        """Streams end there without a token."""

    async def _answer(self, request: dict[str, Any], stream: EventStream) -> None:
        prompt = request["input_ids"]
        num_cached = max((_common(prompt[:-1], known) for known in self._cached), default=0)
        self.num_computed += len(prompt) - num_cached
        await (self.gate.wait() if self.gate is not None else asyncio.sleep(0))
        if self.is_broken:
            await stream.finish()
            return
        self._cached.append(prompt)
        counts = {"prompt_tokens": len(prompt), "cached_tokens": num_cached}
        await stream.send([5, 6], "1-0", completion_tokens=2, **counts)
        spans = [{"version": "1-0", "start": 0, "end": 3}]
        await stream.send([2], "1-0", completion_tokens=3, finish_reason=STOP, weight_versions=spans, **counts)
        await stream.finish()


def _common(left: list[int], right: list[int]) -> int:
    return next((at for at, (one, other) in enumerate(zip(left, right, strict=False)) if one != other), len(left))


async def entered(stack: AsyncExitStack, servers: list[RadixServer], backend: Any = "sglang") -> InferenceClient:
    pool = ServerPool([f"s{index}" for index in range(len(servers))], deadline_s=5)
    for known, server in zip(pool.servers.values(), servers, strict=True):
        await stack.enter_async_context(server.fake)
        pool.admit(known, url=server.fake.url, version="1-0")
    settings = InferenceSettings(backend=backend)
    return await stack.enter_async_context(InferenceClient(pool, settings, max_streams=512, vocab_size=1 << 20))


def asking(
    client: InferenceClient, group: SiblingGroup, prompt: list[int], turns: list[Turn], params: Any = PARAMS
) -> Callable[[], Awaitable[None]]:
    async def ask() -> None:
        with requests_of(group):
            turns.append((await client.generate(prompt, params))[0])

    return ask


async def test_groups_prompts_are_computed_once_and_servers_share_the_groups() -> None:
    servers = [RadixServer() for _ in range(4)]
    prompts = [[1000 + number] * 2000 for number in range(16)]
    turns: list[Turn] = []
    async with AsyncExitStack() as stack:
        client = await entered(stack, servers)
        async with anyio.create_task_group() as tasks:
            for prompt in prompts:
                group = SiblingGroup()
                for _ in range(GROUP_SIZE):
                    tasks.start_soon(asking(client, group, prompt, turns))

    num_computed = sum(server.num_computed for server in servers)
    loads = [len(server.fake.requests) for server in servers]
    assert len(turns) == len(prompts) * GROUP_SIZE
    assert num_computed <= 1.1 * sum(map(len, prompts))
    assert max(loads) <= MAX_IMBALANCE * sum(loads) / len(loads)
    assert sum(turn.prompt_tokens - turn.cached_tokens for turn in turns) == num_computed
    assert [(one.outstanding_tokens, one.prefilling) for one in client.pool.servers.values()] == [(0, set())] * 4


@pytest.mark.parametrize("end", ["cancelled", "fails", "swap", "doubt", "fence", "hold", "disowned"])
async def test_siblings_go_where_the_first_gives_no_token(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "HOLD_S", 1e6)
    first, second = RadixServer(), RadixServer()
    group, turns = SiblingGroup(), list[Turn]()
    async with AsyncExitStack() as stack:
        client = await entered(stack, [first, second])
        known, other = client.pool.servers.values()
        first.gate = asyncio.Event()
        async with anyio.create_task_group() as tasks:
            leading = anyio.CancelScope()

            async def lead() -> None:
                with leading:
                    await asking(client, group, [7] * 100, turns)()

            tasks.start_soon(lead)
            await arrived(first, 1)
            for _ in range(3):
                tasks.start_soon(asking(client, group, [7] * 100, turns))
            await wait_all_tasks_blocked()
            assert (len(first.fake.requests), known.num_requests) == (1, 4), "the others wait, each with its place"
            match end:
                case "cancelled":
                    leading.cancel()
                case "fails":
                    first.is_broken = True
                    first.gate.set()
                case "swap":
                    client.pool.admit(known, url=known.url, version="1-1")
                case "doubt":
                    client.pool.cast_doubt(known, "broken")
                case "fence":
                    client.pool.fence(known, "broken")
                case "hold":
                    client.pool.hold(known)
                case "disowned":
                    client.pool.remove(known, "not ours")
            await arrived(first if end in ("cancelled", "swap") else second, 3)
            first.gate.set()

    assert len(turns) == 3 + (end != "cancelled")
    salts = [one["cache_salt"] for one in first.fake.requests[1:]]
    assert salts == {"cancelled": ["1-0"] * 3, "swap": ["1-1"] * 3}.get(end, []), "what each was sent under"
    assert (known.num_requests, other.num_requests) == (0, 0)


async def test_a_node_that_ends_leaves_no_sibling_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "HOLD_S", 1e6)
    server = RadixServer()
    async with AsyncExitStack() as stack:
        client = await entered(stack, [server])
        server.gate = asyncio.Event()
        async with anyio.create_task_group() as tasks:
            group = SiblingGroup()
            for _ in range(3):
                tasks.start_soon(asking(client, group, [7] * 100, []))
            await arrived(server, 1)
            tasks.cancel_scope.cancel()

        known = client.pool.servers["s0"]
        assert (known.num_requests, known.outstanding_tokens, known.prefilling) == (0, 0, set())
        server.gate.set()


async def arrived(server: RadixServer, number: int) -> None:
    with anyio.fail_after(10):
        while len(server.fake.requests) < number:  # noqa: ASYNC110 - it comes over a socket
            await anyio.sleep(0.005)


async def test_the_hold_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings, "HOLD_S", 0.01)
    server = RadixServer()
    group, turns = SiblingGroup(), list[Turn]()
    async with AsyncExitStack() as stack:
        client = await entered(stack, [server])
        server.gate = asyncio.Event()
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(asking(client, group, [7] * 100, turns))
            await arrived(server, 3)
            server.gate.set()

    assert len(turns) == 3


async def test_nobody_waits_for_another_prompt_or_where_the_server_joins_equal_ones() -> None:
    for backend, prompts in (("sglang", ([7] * 100, [8] * 100)), ("embedded", ([7] * 100, [7] * 100))):
        server = RadixServer()
        group, turns = SiblingGroup(), list[Turn]()
        async with AsyncExitStack() as stack:
            client = await entered(stack, [server], backend)
            server.gate = asyncio.Event()
            async with anyio.create_task_group() as tasks:
                for prompt in prompts:
                    tasks.start_soon(asking(client, group, prompt, turns))
                await arrived(server, 2)
                server.gate.set()


async def test_siblings_leave_a_server_on_which_others_have_too_much() -> None:
    pool = ServerPool(["s0", "s1"], deadline_s=5)
    for server in pool.servers.values():
        pool.admit(server, url="http://x", version="1-0")
    first, second = pool.servers.values()
    group = SiblingGroup()

    chosen = [await pool.choose(cost_tokens=10, group=group) for _ in range(GROUP_SIZE)]
    assert set(chosen) == {first}, "a group alone stays whole"
    second.outstanding_tokens = 60
    first.outstanding_tokens += 100  # others'
    assert await pool.choose(first, cost_tokens=10, group=group) is second
    assert await pool.choose(cost_tokens=10, group=group) is second, "who comes later follows"
    first.outstanding_tokens -= 100
    assert await pool.choose(first, cost_tokens=10, group=group) is first, "a conversation goes on where it was"


async def test_idle_servers_take_turns() -> None:
    pool = ServerPool(["s0", "s1", "s2"], deadline_s=5)
    for server in pool.servers.values():
        pool.admit(server, url="http://x", version="1-0")
    taken = Counter[str]()

    for _ in range(9):
        server = await pool.choose(cost_tokens=10)
        taken[server.id] += 1
        pool.release(server, cost_tokens=10)

    assert taken == {"s0": 3, "s1": 3, "s2": 3}


async def test_embedded_engine_joins_equal_prompts_and_says_so(server: Server) -> None:
    prompt = prompt_of(300)
    group, turns = SiblingGroup(), list[Turn]()
    pool = ServerPool(["s0"], deadline_s=5)
    pool.admit(pool.servers["s0"], url=str(server.http.base_url).rstrip("/"), version="0-0")
    settings = InferenceSettings(backend="embedded")
    async with InferenceClient(pool, settings, max_streams=16, vocab_size=1 << 20) as client:
        params = {"max_new_tokens": 64, "ignore_eos": True, "temperature": 1.0}
        async with anyio.create_task_group() as tasks:
            for _ in range(GROUP_SIZE):
                tasks.start_soon(asking(client, group, prompt, turns, params))

    known = pool.servers["s0"]
    assert sum(turn.prompt_tokens for turn in turns) == known.num_prompt_tokens == GROUP_SIZE * len(prompt)
    assert known.num_prompt_tokens - known.num_cached_tokens <= 1.1 * len(prompt)
