"""With SGLang's speculative modes tokens come several at once, and each is what it would be without them.

Without a GPU it runs them in Triton's interpreter alone (``tools/sglang_cpu/speculation_without_operators.py``), which
is slow. There EAGLE draws by rejection, and the others can but take the likeliest token.
"""

from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
from transformers import LlamaConfig

from areal_async.inference.client import InferenceClient
from areal_async.inference.http import ServerApi
from areal_async.inference.supervision.swap import swap
from areal_async.protocol.types import Turn, WeightsVersion
from tests.sglang.conftest import SglangServer, find_sglang
from tests.sglang.scoring import assert_scored_by, assert_whole
from tests.sglang.test_client import ORDER_DEADLINE_S, client_of
from tests.sglang.test_contract import assert_scored_by as assert_logprobs
from tests.unit.inference.embedded_engine import (
    CONTEXT_LENGTH,
    EOS_ID,
    FIRST_BYTE_ID,
    VOCAB_SIZE,
    Server,
    prompt_of,
    reference_logits,
    restored,
)

pytestmark = [pytest.mark.anyio, pytest.mark.sglang, pytest.mark.timeout(900)]

NUM_TOKENS = 16
LONG = 32
"""Tokens of an answer that is still running when a test has seen its first events."""
STEPS = 2
"""Tokens that a draft is longer than the one that is certain anyway."""
STOP_IDS = [EOS_ID, *range(FIRST_BYTE_ID, VOCAB_SIZE, 5)]
CHAIN = ("--speculative-num-steps", str(STEPS), "--speculative-eagle-topk", "1")
FLAGS = {
    "NGRAM": ("--speculative-ngram-max-bfs-breadth", "1"),
    "STANDALONE": CHAIN,
    "EAGLE": (*CHAIN, "--speculative-draft-load-format", "dummy", "--speculative-use-rejection-sampling"),
}


class Mode(NamedTuple):
    """A server that runs in one of the modes."""

    name: str
    server: Server

    @property
    def temperature(self) -> float:
        return 1.0 if self.name == "EAGLE" else 0.0


class Answer(NamedTuple):
    """What the client made of one prompt."""

    prompt: list[int]
    turn: Turn
    events: list[int]
    """How many tokens each of them has brought."""


@pytest.fixture
def anyio_backend() -> Any:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
def drafts(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models that draft: the same one, and a layer of EAGLE's with random weights, to which it is alike enough."""
    folder = tmp_path_factory.mktemp("eagle")
    LlamaConfig(
        architectures=["LlamaForCausalLMEagle"],
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
    ).save_pretrained(folder)
    return {"STANDALONE": models[0], "EAGLE": folder}


@pytest.fixture(scope="module", params=["NGRAM", "EAGLE", pytest.param("STANDALONE", marks=pytest.mark.nightly)])
def shared_mode(request: pytest.FixtureRequest, models: list[Path], drafts: dict[str, Path]) -> Iterator[Mode]:
    find_sglang()
    flags = ["--speculative-algorithm", request.param, *FLAGS[request.param]]
    flags += ["--speculative-num-draft-tokens", str(STEPS + 1), "--attention-backend", "triton"]
    if request.param in drafts:
        flags += ["--speculative-draft-model-path", str(drafts[request.param])]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        server = SglangServer(models[0], *flags)
    yield Mode(request.param, server)
    server.close()


@pytest.fixture
def mode(shared_mode: Mode, models: list[Path]) -> Iterator[Mode]:
    with restored(shared_mode.server, models[0]):
        yield shared_mode


async def answer(client: InferenceClient, mode: Mode, prompt: list[int], num_tokens: int, **params: Any) -> Answer:
    events: list[int] = []
    params = {"max_new_tokens": num_tokens, "temperature": mode.temperature, "ignore_eos": True, **params}
    turn, _ = await client.generate(prompt, params, on_tokens=lambda ids: events.append(len(ids)))
    return Answer(prompt, turn, events)


async def answers(mode: Mode, num_prompts: int, num_tokens: int, **params: Any) -> list[Answer]:
    """Have that many prompts answered at once."""
    found: list[Answer] = []

    async def add(prompt: list[int]) -> None:
        found.append(await answer(client, mode, prompt, num_tokens, **params))

    async with client_of(mode.server) as client, anyio.create_task_group() as tasks:
        for index in range(num_prompts):
            tasks.start_soon(add, prompt_of(6 + index, seed=index))
    return found


async def answer_while(mode: Mode, event: Callable[[InferenceClient, ServerApi], Coroutine[Any, Any, None]]) -> Answer:
    """Stream a long answer, and have ``event`` happen in its midst."""
    async with client_of(mode.server) as client, anyio.create_task_group() as tasks:
        known = client.pool.servers["s0"]
        found: list[Answer] = []

        async def add() -> None:
            found.append(await answer(client, mode, prompt_of(8), LONG))

        tasks.start_soon(add)
        while known.num_generated_tokens < STEPS + 2:  # noqa: ASYNC110 -- a counter has no event
            await anyio.sleep(0.01)
        await event(client, ServerApi(client.administration, known.url))
    return found[0]


async def test_drafted_tokens_come_at_once_each_with_the_logprob_and_version_of_the_model(
    mode: Mode, models: list[Path]
) -> None:
    for _ in range(2):  # n-grams are sure to be found in an answer that was given before
        [(prompt, turn, events)] = await answers(mode, 1, NUM_TOKENS)
        assert_whole(turn, NUM_TOKENS)
        assert_scored_by(models[0], prompt, turn)
        assert [span.version for span in turn.spans] == ["0-0"]
        assert sum(events) == NUM_TOKENS
        if mode.temperature == 0.0:
            assert turn.output_ids == reference_logits(models[0], prompt, turn.output_ids).argmax(-1).tolist()
    assert 1 < max(events) <= STEPS + 1


async def test_an_answer_ends_at_its_stop_token_whatever_was_drafted_after_it(mode: Mode, models: list[Path]) -> None:
    found = await answers(mode, 3, NUM_TOKENS, stop_token_ids=STOP_IDS, ignore_eos=False)
    for prompt, turn, _ in found:
        ends = [index for index, token_id in enumerate(turn.output_ids, start=1) if token_id in STOP_IDS]
        assert ends == ([len(turn.output_ids)] if turn.finish_reason == "stop" else [])
        assert_scored_by(models[0], prompt, turn)
    assert "stop" in {turn.finish_reason for _, turn, _ in found}


async def test_tokens_around_an_update_of_the_weights_have_the_version_that_made_them(
    mode: Mode, models: list[Path]
) -> None:
    async def update(client: InferenceClient, api: ServerApi) -> None:
        target = WeightsVersion(version="0-1", path=str(models[1]))
        await swap(api, target, mode="retract", deadline_s=ORDER_DEADLINE_S)

    prompt, turn, _ = await answer_while(mode, update)

    assert_whole(turn, LONG)
    old, new = turn.spans
    assert (old.version, new.version) == ("0-0", "0-1")
    assert_scored_by(models[0], prompt, turn, old.start, old.end)
    assert_scored_by(models[1], prompt, turn, new.start, new.end)


async def test_an_answer_that_is_aborted_while_it_waits_goes_on_without_a_doubled_token(
    mode: Mode, models: list[Path]
) -> None:
    async def retract_and_abort(client: InferenceClient, api: ServerApi) -> None:
        await api.pause("retract", deadline_s=ORDER_DEADLINE_S)
        await api.abort_all(deadline_s=ORDER_DEADLINE_S)
        await api.resume(deadline_s=ORDER_DEADLINE_S)

    prompt, turn, _ = await answer_while(mode, retract_and_abort)

    assert_whole(turn, LONG)
    assert_scored_by(models[0], prompt, turn)


def test_an_aborted_answer_has_a_logprob_for_each_of_its_tokens(mode: Mode, models: list[Path]) -> None:
    prompt = prompt_of(8)
    with mode.server.stream(prompt, rid="doomed", max_new_tokens=LONG, temperature=mode.temperature) as stream:
        stream.read(2)
        mode.server.post("/abort_request", rid="doomed")
        stream.read()

    assert stream.meta["finish_reason"]["type"] == "abort"
    assert stream.meta["completion_tokens"] == len(stream.output_ids) == len(stream.logprobs) < LONG
    assert_logprobs(models[0], prompt, stream.output_ids, stream.logprobs, slice(None))


async def test_the_server_takes_as_much_as_it_is_known_to(mode: Mode) -> None:
    async with client_of(mode.server) as client:
        url = client.pool.servers["s0"].url
        context = await ServerApi(client.administration, url).context_tokens(deadline_s=ORDER_DEADLINE_S)
    assert context == CONTEXT_LENGTH - STEPS - 1

    fitting = mode.server.generate(prompt_of(context - 4), max_new_tokens=4, temperature=mode.temperature)
    assert len(fitting["output_ids"]) == 4
