"""A full context is an ordinary end: the answer is cut there and counted, and who catches it keeps its reward."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from transformers import AutoTokenizer

from areal_async.api import Policy, Workflow
from areal_async.config.settings import RolloutSettings, SamplingSettings, Settings, TrainerSettings
from areal_async.errors import ContextFull
from areal_async.inference.client import InferenceClient
from areal_async.inference.external_servers import visited_servers
from areal_async.protocol.types import Prompt, SlotStatus
from areal_async.rollout.endpoint.policy import PolicyMaker
from areal_async.rollout.endpoint.server import AgentEndpoint
from areal_async.rollout.policy.text import TextCodec
from areal_async.rollout.trial import Attempt, Trial
from areal_async.rollout.user_code.source_location import UserCode
from areal_async.rollout.workflow_call import TaskWorkflow
from tests.unit.inference.embedded_engine import CONTEXT_LENGTH, EOS_ID, VOCAB_SIZE, Server

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""A character is a token: lengths are what they look like."""
USUAL_BUDGET = 16384


@pytest.fixture
def anyio_backend() -> Any:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def client(embedded_server: Server, tmp_path: Path) -> AsyncIterator[InferenceClient]:
    url = str(embedded_server.http.base_url).rstrip("/")
    async with visited_servers(Settings(), [url], log_path=tmp_path / "log") as (pool, facts):
        assert facts[0].context_tokens == CONTEXT_LENGTH
        async with InferenceClient(pool, Settings().inference, max_streams=16, vocab_size=1 << 20) as client:
            yield client


async def attempt_at(
    workflow: Workflow, client: InferenceClient, models: list[Path], *, token_budget: int = USUAL_BUDGET
) -> Attempt:
    tokenizer = AutoTokenizer.from_pretrained(models[0])
    tokenizer.chat_template = TEMPLATE
    codec = TextCodec(tokenizer, stop_token_ids=[EOS_ID], vocab_size=VOCAB_SIZE)
    heard: list[Attempt] = []
    settings = Settings(
        rollout=RolloutSettings(sampling=SamplingSettings(max_new_tokens=300, ignore_eos=True)),
        trainer=TrainerSettings(token_budget=token_budget),
    )
    async with AgentEndpoint() as endpoint:
        trial = Trial(
            TaskWorkflow("w", workflow, settings),
            PolicyMaker(generator=client, codec=codec, endpoint=endpoint),
            user_code=UserCode(Path(__file__)),
            version="0-0",
        )
        await trial.run([Prompt(epoch=0, index=0, row={})], num_siblings=1, on_attempt=heard.append)
    return heard[0]


def question(num_tokens: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "q" * num_tokens}]


async def test_answer_that_would_outgrow_the_context_is_cut_there_and_counted(
    client: InferenceClient, models: list[Path]
) -> None:
    async def ask(prompt: Prompt, policy: Policy) -> float:
        reply = await policy.chat(question(250))
        assert reply.finish_reason == "length"
        return 1.0

    slot = (await attempt_at(ask, client, models)).trajectory.slot
    assert (slot.status, slot.num_truncated, slot.num_tokens) == (SlotStatus.SCORED, 1, CONTEXT_LENGTH - 2)

    slot = (await attempt_at(ask, client, models, token_budget=400)).trajectory.slot
    assert (slot.status, slot.num_truncated, slot.num_tokens) == (SlotStatus.SCORED, 1, 400)


async def test_workflow_that_catches_a_full_context_is_trained_with_its_reward(
    client: InferenceClient, models: list[Path]
) -> None:
    async def talk(prompt: Prompt, policy: Policy) -> float:
        messages: list[Any] = question(100)
        try:
            while True:
                messages += [(await policy.chat(messages)).message, *question(100)]
        except ContextFull:
            return 0.2

    trajectory = (await attempt_at(talk, client, models)).trajectory
    assert (trajectory.slot.status, trajectory.slot.reward) == (SlotStatus.SCORED, 0.2)
    assert trajectory.slot.num_output_tokens == 310


async def test_agent_that_catches_a_full_context_is_trained_like_a_native_one(
    client: InferenceClient, models: list[Path]
) -> None:
    codes: list[str | None] = []

    async def agent(prompt: Prompt, policy: Policy) -> float:
        messages: Any = question(100)
        async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as openai_client:
            try:
                while True:
                    answer = await openai_client.chat.completions.create(model="m", messages=messages)
                    messages += [answer.choices[0].message.to_dict(), *question(100)]
            except openai.BadRequestError as refused:
                codes.append(refused.code)
        async with anthropic.AsyncAnthropic(base_url=policy.base_url, api_key=policy.api_key) as anthropic_client:
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                await anthropic_client.messages.create(model="m", max_tokens=9, messages=messages)
        return 0.2

    trajectory = (await attempt_at(agent, client, models)).trajectory
    assert (trajectory.slot.status, trajectory.slot.reward) == (SlotStatus.SCORED, 0.2)
    assert trajectory.slot.num_output_tokens == 310
    assert codes == ["context_length_exceeded"]


async def test_full_context_that_nobody_catches_is_a_failure_with_its_cure(
    client: InferenceClient, models: list[Path]
) -> None:
    async def ask(prompt: Prompt, policy: Policy) -> float:
        return float(len((await policy.chat(question(CONTEXT_LENGTH - 6))).text))

    slot = (await attempt_at(ask, client, models)).trajectory.slot
    assert slot.status is SlotStatus.FAILED
    assert slot.reason.startswith("prompt is too long: got 506 tokens")
    assert "inference.context_length" in slot.reason
