"""Three turns with tools, streamed by a real engine to the official clients: every recorded token is its own."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import anyio
import anyio.to_thread
import openai
import pytest

from areal_async.config.settings import InferenceSettings, SamplingSettings
from areal_async.inference.client import InferenceClient
from areal_async.inference.pool import ServerPool
from areal_async.protocol.types import Sequence
from areal_async.rollout.endpoint.policy import PolicyMaker, ServedPolicy
from areal_async.rollout.endpoint.server import AgentEndpoint
from areal_async.rollout.policy.merge import merge_turns
from areal_async.rollout.policy.text import load_codec
from tests.sglang.scoring import assert_scored_by
from tests.unit.inference.embedded_engine import Server
from tests.unit.rollout.endpoint.memorised import TEXTS, TOOLS, conversation, memorise
from tests.unit.rollout.endpoint.scripted_endpoint import END, PARAMETERS, QUESTION

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

MAX_NEW_TOKENS = 96


@pytest.fixture(scope="module")
def row() -> Sequence:
    return anyio.run(conversation)


@pytest.fixture(scope="module")
def folder(row: Sequence, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return memorise(row, tmp_path_factory.mktemp("memorised"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    yield server
    server.close()


@asynccontextmanager
async def served_by(engine: Server, folder: Path) -> AsyncIterator[ServedPolicy]:
    pool = ServerPool(["s0"], deadline_s=60)
    pool.admit(pool.servers["s0"], url=str(engine.http.base_url).rstrip("/"), version="0-0")
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            InferenceClient(pool, InferenceSettings(), max_streams=16, vocab_size=1 << 20)
        )
        endpoint = await stack.enter_async_context(AgentEndpoint())
        sampling = SamplingSettings(max_new_tokens=MAX_NEW_TOKENS)
        maker = PolicyMaker(generator=client, codec=load_codec(str(folder)), endpoint=endpoint)
        yield maker.policy(sampling, "uid")


def assert_engine_s_own(policy: ServedPolicy, row: Sequence, engine: Server, folder: Path) -> None:
    """The sequence is the one of no endpoint at all; ids and logprobs are what the engine says and the model gives."""
    (recorded,) = merge_turns(policy.turns)
    assert recorded.token_ids.tolist() == row.token_ids.tolist()
    assert recorded.loss_mask.tolist() == row.loss_mask.tolist()
    for turn in policy.turns:
        about = {"max_new_tokens": MAX_NEW_TOKENS, "ignore_eos": False, "stop_token_ids": [END], "temperature": 0.0}
        answer = engine.generate(turn.prompt_ids, **about)
        assert turn.output_ids == answer["output_ids"]
        logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        assert turn.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert_scored_by(folder, turn.prompt_ids, turn)


async def test_openai_chat(row: Sequence, engine: Server, folder: Path) -> None:
    async with served_by(engine, folder) as policy:
        async with openai.AsyncOpenAI(base_url=f"{policy.base_url}/v1", api_key=policy.api_key) as client:
            messages: Any = list(QUESTION)
            told: list[float] = []
            tools: Any = TOOLS
            for _ in TEXTS:
                async with client.chat.completions.stream(
                    model="m", messages=messages, tools=tools, temperature=0, logprobs=True
                ) as stream:
                    async for event in stream:
                        for choice in event.chunk.choices if event.type == "chunk" else ():
                            told += [one.logprob for one in (choice.logprobs and choice.logprobs.content) or ()]
                    message = (await stream.get_final_completion()).choices[0].message
                messages.append(message.to_dict())
                messages += [
                    {"role": "tool", "tool_call_id": call.id, "content": "5"} for call in message.tool_calls or []
                ]
        assert message.content == TEXTS[-1]
        assert told == [logprob for turn in policy.turns for logprob in turn.logprobs]
        assert_engine_s_own(policy, row, engine, folder)


async def test_openai_responses(row: Sequence, engine: Server, folder: Path) -> None:
    async with served_by(engine, folder) as policy:
        async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            items: Any = list(QUESTION)
            previous: Any = openai.omit
            tools: Any = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}]
            for _ in TEXTS:
                async with client.responses.stream(
                    model="m", input=items, tools=tools, temperature=0, previous_response_id=previous
                ) as stream:
                    async for _event in stream:
                        pass
                    response = await stream.get_final_response()
                previous = response.id
                items = [
                    {"type": "function_call_output", "call_id": item.call_id, "output": "5"}
                    for item in response.output
                    if item.type == "function_call"
                ]
        assert response.output_text == TEXTS[-1]
        assert_engine_s_own(policy, row, engine, folder)


async def test_anthropic_messages(row: Sequence, engine: Server, folder: Path) -> None:
    async with served_by(engine, folder) as policy:
        async with anthropic.AsyncAnthropic(base_url=policy.base_url, api_key=policy.api_key) as client:
            messages: Any = list(QUESTION)
            tools: Any = [{"name": "add", "input_schema": PARAMETERS}]
            for _ in TEXTS:
                async with client.messages.stream(
                    model="m", max_tokens=1024, messages=messages, tools=tools, extra_body={"temperature": 0}
                ) as stream:
                    async for _event in stream:
                        pass
                    message = await stream.get_final_message()
                results = [
                    {"type": "tool_result", "tool_use_id": block.id, "content": "5"}
                    for block in message.content
                    if block.type == "tool_use"
                ]
                messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        assert [block.text for block in message.content if block.type == "text"] == [TEXTS[-1]]
        assert_engine_s_own(policy, row, engine, folder)


async def test_prompt_that_the_engine_refuses_is_the_agent_s_own_error(engine: Server, folder: Path) -> None:
    question: Any = [{"role": "user", "content": "2 and 3? " * 1000}]
    async with served_by(engine, folder) as policy:
        async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="m", messages=question)
        assert caught.value.code == "context_length_exceeded"
        assert policy.failures


async def test_generation_on_the_engine_ends_with_the_trajectory(engine: Server, folder: Path) -> None:
    async with served_by(engine, folder) as policy:
        engine.wait_for_load(num_running_reqs=0)
        policy.sampling = SamplingSettings(max_new_tokens=400, ignore_eos=True)
        async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            stream = await client.chat.completions.create(model="m", messages=QUESTION, stream=True)  # type: ignore[arg-type]
            await anext(aiter(stream))
            policy.close()
            with anyio.fail_after(60):
                await anyio.to_thread.run_sync(lambda: engine.wait_for_load(num_running_reqs=0))
            await stream.close()
        assert policy.turns == []
