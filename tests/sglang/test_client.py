"""Whatever the servers do meanwhile, the client returns each token once, with its logprob and its version.

Both are proved by scoring what came back: a token that was lost, doubled or stamped with the wrong version has not the
logprob that the model of its span gives it.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from areal_async.config.settings import InferenceSettings
from areal_async.errors import ContextFull, GenerationError
from areal_async.inference.client import InferenceClient
from areal_async.inference.http import ServerApi
from areal_async.inference.pool import KEPT_TOKENS, MIN_ROOM_TOKENS, ServerPool
from areal_async.inference.supervision.swap import swap
from areal_async.protocol.types import Turn, WeightsVersion
from areal_async.vision.spec import VisionSpec
from tests.sglang.relay import only_beginnings
from tests.sglang.scoring import assert_scored_by, assert_whole
from tests.unit.inference.embedded_engine import CONTEXT_LENGTH, Server, prompt_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

NUM_TOKENS = 300
NUM_STREAMS = 4
ORDER_DEADLINE_S = 60.0


@pytest.fixture
def anyio_backend() -> Any:
    return "asyncio", {"use_uvloop": True}


@asynccontextmanager
async def client_of(*servers: Server, vision: VisionSpec | None = None) -> AsyncIterator[InferenceClient]:
    pool = ServerPool([f"s{index}" for index in range(len(servers))], deadline_s=60)
    for known, server in zip(pool.servers.values(), servers, strict=True):
        pool.admit(known, url=str(server.http.base_url).rstrip("/"), version="0-0")
    client = InferenceClient(pool, InferenceSettings(), max_streams=16, vocab_size=1 << 20, vision=vision)
    async with client:
        yield client


async def generate_while(
    client: InferenceClient, event: Callable[[], Any], *, num_received: int = 20 * NUM_STREAMS
) -> list[tuple[list[int], Turn]]:
    """Stream several answers from the first server, have ``event`` happen in their midst, return prompts and turns."""
    first = client.pool.servers["s0"]
    answers: list[tuple[list[int], Turn]] = []
    prompts = [prompt_of(8 + index, seed=index) for index in range(NUM_STREAMS)]

    async def generate(prompt: list[int]) -> None:
        params = {"max_new_tokens": NUM_TOKENS, "temperature": 1.0, "ignore_eos": True}
        turn, _ = await client.generate(prompt, params, preferred=first)
        answers.append((prompt, turn))

    async with anyio.create_task_group() as tasks:
        for prompt in prompts:
            tasks.start_soon(generate, prompt)
        while first.num_generated_tokens < num_received:  # noqa: ASYNC110 -- a counter has no event
            await anyio.sleep(0.01)
        await event()
    assert len(answers) == NUM_STREAMS
    return answers


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
async def test_tokens_streamed_through_a_swap_have_the_version_that_made_them(
    server: Server, models: list[Path], mode: str
) -> None:
    async with client_of(server) as client:
        known = client.pool.servers["s0"]

        async def change() -> None:
            target = WeightsVersion(version="0-1", path=str(models[1]))
            await swap(ServerApi(client.administration, known.url), target, mode=mode, deadline_s=ORDER_DEADLINE_S)
            client.pool.admit(known, url=known.url, version="0-1")

        answers = await generate_while(client, change)

    for prompt, turn in answers:
        assert_whole(turn, NUM_TOKENS)
        old, new = turn.spans
        assert (old.version, new.version, turn.oldest) == ("0-0", "0-1", "0-0")
        assert_scored_by(models[0], prompt, turn, old.start, old.end)
        if mode != "in_place":  # there the new weights go on from the old ones' cache, which no single model does
            assert_scored_by(models[1], prompt, turn, new.start, new.end)


async def test_streams_aborted_while_they_wait_go_on_without_a_doubled_token(
    server: Server, models: list[Path]
) -> None:
    """SGLang repeats the last token and every logprob in the event that ends a retracted request."""
    async with client_of(server) as client:
        api = ServerApi(client.administration, client.pool.servers["s0"].url)

        async def retract_and_abort() -> None:
            await api.pause("retract", deadline_s=ORDER_DEADLINE_S)
            await client.administration.post(f"{api.url}/abort_request", json={"abort_all": True})
            await api.resume(deadline_s=ORDER_DEADLINE_S)

        answers = await generate_while(client, retract_and_abort)
        assert not client.pool.servers["s0"].doubt

    for prompt, turn in answers:
        assert_whole(turn, NUM_TOKENS)
        assert_scored_by(models[0], prompt, turn, 0, NUM_TOKENS)


@pytest.fixture
def victim(shared_server: Server, models: list[Path]) -> Iterator[Server]:
    """One more server of the same kind, to be killed."""
    server = type(shared_server)(models[0])
    yield server
    server.close()


async def test_streams_of_a_killed_server_go_on_elsewhere_from_what_was_received(
    server: Server, victim: Server, models: list[Path]
) -> None:
    async with client_of(victim, server) as client:

        async def kill() -> None:
            victim.process.kill()

        dead, alive = client.pool.servers.values()
        async with only_beginnings(dead.url) as dead.url:
            answers = await generate_while(client, kill, num_received=NUM_STREAMS)
        assert dead.doubt
        assert dead.num_generated_tokens + alive.num_generated_tokens == NUM_STREAMS * NUM_TOKENS
        assert alive.num_generated_tokens > 0

    for prompt, turn in answers:
        assert_whole(turn, NUM_TOKENS)
        assert_scored_by(models[0], prompt, turn, 0, NUM_TOKENS)


async def test_server_is_asked_for_no_more_than_it_takes(server: Server) -> None:
    async with client_of(server) as client:
        known = client.pool.servers["s0"]
        context = await ServerApi(client.administration, known.url).context_tokens(deadline_s=ORDER_DEADLINE_S)
        assert context == CONTEXT_LENGTH
        known.context_tokens = context
        params = {"max_new_tokens": NUM_TOKENS, "temperature": 1.0, "ignore_eos": True}
        for num_tokens in (250, context - MIN_ROOM_TOKENS - 1, context - MIN_ROOM_TOKENS):
            turn, _ = await client.generate(prompt_of(num_tokens, seed=0), params)
            assert (turn.finish_reason, len(turn.output_ids)) == ("length", context - num_tokens - KEPT_TOKENS)
        with pytest.raises(ContextFull):
            await client.generate(prompt_of(context - MIN_ROOM_TOKENS + 1, seed=0), params)
        known.context_tokens = None
        with pytest.raises(GenerationError):  # it would refuse that itself, so none is refused that it would take
            await client.generate(prompt_of(context - MIN_ROOM_TOKENS + 1, seed=0), {**params, "max_new_tokens": 1})
