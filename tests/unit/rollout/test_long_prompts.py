"""One long conversation holds up no other: it is refused unread where it cannot fit, and is read beside the loop."""

import asyncio
import threading
from functools import partial
from typing import Any

import anyio.lowlevel
import pytest

from areal_async.config.settings import SamplingSettings
from areal_async.errors import ContextFull
from areal_async.inference.pool import ServerPool
from areal_async.rollout.named_policies import FrozenReward
from areal_async.rollout.policy.offload import NUM_THREADS, run_beside
from areal_async.rollout.policy.policy import RecordingPolicy
from areal_async.rollout.policy.text import CHARACTERS_PER_TOKEN, LONG_TEXT_CHARACTERS, TextCodec
from tests.brokers import until
from tests.unit.rollout.byte_model import END, ByteTokenizer, ScriptedModel
from tests.unit.rollout.endpoint.scripted_endpoint import chat, client, served, speaker

pytestmark = pytest.mark.anyio

MEGABYTES = "many words, " * (2 * (1 << 20) // 12)
LONG, SHORT = "x" * (LONG_TEXT_CHARACTERS + 1), "x" * 100


class WatchedTokenizer(ByteTokenizer):
    """Tells in which threads it was asked, and for how many characters."""

    def __init__(self) -> None:
        self.encoded: list[tuple[bool, int]] = []
        self.rendered: list[bool] = []

    def apply_chat_template(self, *args: Any, **options: Any) -> str:
        self.rendered.append(threading.current_thread() is threading.main_thread())
        return super().apply_chat_template(*args, **options)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.encoded.append((threading.current_thread() is threading.main_thread(), len(text)))
        return super().encode(text, add_special_tokens=add_special_tokens)


def policy_with(tokenizer: WatchedTokenizer, *answers: list[int]) -> RecordingPolicy:
    codec = TextCodec(tokenizer, stop_token_ids=[END], vocab_size=END + 1)
    return RecordingPolicy(ScriptedModel(*answers), codec, SamplingSettings(), name="uid")


async def ask(policy: RecordingPolicy, how: str, text: str) -> None:
    messages = [{"role": "user", "content": text}]
    match how:
        case "chat":
            await policy.chat(messages)
        case "stream":
            async with policy.stream(messages) as stream:
                async for _ in stream:
                    pass
        case "complete":
            await policy.complete(text)


@pytest.mark.parametrize("how", ["chat", "stream", "complete"])
@pytest.mark.parametrize("text", [LONG, SHORT], ids=["long", "short"])
async def test_what_is_long_is_rendered_and_tokenized_beside_the_loop(how: str, text: str) -> None:
    tokenizer = WatchedTokenizer()
    await ask(policy_with(tokenizer, [97, END]), how, text)

    assert {is_on_loop for is_on_loop, _ in tokenizer.encoded} == {text is SHORT}
    assert set(tokenizer.rendered) <= {text is SHORT}


@pytest.mark.parametrize("how", ["chat", "stream", "complete"])
async def test_what_cannot_fit_is_refused_before_it_is_tokenized(how: str) -> None:
    tokenizer = WatchedTokenizer()
    policy = policy_with(tokenizer, [97, END])
    policy.record.max_sequence_tokens = 1000

    with pytest.raises(ContextFull, match=r"got \d+ characters, at least \d+ tokens, .*length of 1000 tokens"):
        await ask(policy, how, "x" * (1000 * CHARACTERS_PER_TOKEN))
    assert tokenizer.encoded == []


async def test_what_may_fit_is_tokenized_to_find_out() -> None:
    tokenizer = WatchedTokenizer()
    policy = policy_with(tokenizer, [97, END])
    policy.record.max_sequence_tokens = 1000

    with pytest.raises(ContextFull, match=r"got \d+ tokens, .*length of 1000 tokens"):
        await ask(policy, "complete", "x" * 1001)
    assert [length for _, length in tokenizer.encoded] == [1001]


async def test_a_server_that_was_met_bounds_a_prompt_too() -> None:
    tokenizer = WatchedTokenizer()
    policy = policy_with(tokenizer, [97, END], [97, END])
    await ask(policy, "chat", SHORT)
    assert policy._turns.server is not None
    policy._turns.server.context_tokens = 1000
    tokenizer.encoded.clear()

    with pytest.raises(ContextFull, match=r"inference\.context_length or the model's"):
        await ask(policy, "chat", "y" * (1000 * CHARACTERS_PER_TOKEN))
    assert tokenizer.encoded == []


class Counting:
    """Scores by length."""

    async def score(self, prompt_ids: list[int]) -> float:
        return float(len(prompt_ids))


@pytest.mark.parametrize("text", [LONG, SHORT], ids=["long", "short"])
async def test_long_conversation_is_tokenized_for_a_reward_model_beside_the_loop(text: str) -> None:
    tokenizer = WatchedTokenizer()
    pool = ServerPool(["s0"], deadline_s=60.0)
    model = FrozenReward(
        scorer=Counting(), codec=TextCodec(tokenizer, stop_token_ids=[END], vocab_size=END + 1), pool=pool
    )
    messages = [{"role": "user", "content": text}]

    assert await model.score(messages) > len(text)
    assert {is_on_loop for is_on_loop, _ in tokenizer.encoded} == {text is SHORT}

    tokenizer.encoded.clear()
    pool.servers["s0"].context_tokens = len(text) // CHARACTERS_PER_TOKEN
    with pytest.raises(ContextFull, match="the reward model's"):
        await model.score(messages)
    assert tokenizer.encoded == []


async def test_long_texts_are_not_kept_by_the_thousand() -> None:
    tokenizer = WatchedTokenizer()
    codec = TextCodec(tokenizer, stop_token_ids=[END], vocab_size=END + 1)
    for number in range(50):
        codec.encode(f"{LONG}{number}")
    assert codec._encode_once.cache_info().currsize + codec._encode_long_once.cache_info().currsize <= 8


async def test_a_request_of_megabytes_is_told_that_it_does_not_fit() -> None:
    async with served(speaker("hi")) as policy, client(policy) as http:
        policy.record.max_sequence_tokens = 4096
        for is_streamed in (False, True):
            body = chat(messages=[{"role": "user", "content": MEGABYTES}], stream=is_streamed)
            response = await http.post("/chat/completions", json=body)
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "context_length_exceeded"
        assert (await http.post("/chat/completions", json=chat())).status_code == 200


async def test_work_whose_caller_is_cancelled_keeps_its_thread() -> None:
    begun: list[int] = []
    may_end = threading.Event()

    def work(number: int) -> int:
        begun.append(number)
        may_end.wait(60.0)
        return number

    try:
        tasks = [asyncio.create_task(run_beside(partial(work, number))) for number in range(NUM_THREADS)]
        await until(lambda: len(begun) == NUM_THREADS)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        one_more = asyncio.create_task(run_beside(partial(work, 9)))
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
        assert 9 not in begun, "no thread is free"
    finally:
        may_end.set()
    assert await one_more == 9
