"""With the embedded engine: a conversation about images is recorded with the logprobs that the model itself gives."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from areal_async.config.settings import InferenceSettings, SamplingSettings
from areal_async.errors import GenerationError
from areal_async.inference.client import InferenceClient
from areal_async.inference.pool import ServerPool
from areal_async.protocol.types import Turn
from areal_async.rollout.policy.merge import merge_turns
from areal_async.rollout.policy.policy import RecordingPolicy
from areal_async.rollout.policy.text import TextCodec, load_codec
from areal_async.vision.rows import collapse
from areal_async.vision.spec import VisionSpec
from tests.unit.inference.embedded_engine import Server
from tests.unit.inference.seeing_engine import IMAGE_ID, build_seeing_model, png_of, reference_logprobs

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

CAT, DOG = png_of(1), png_of(2, width=96, height=128)
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_seeing_model(tmp_path_factory.mktemp("seeing"), seed=4)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    yield server
    server.close()


@asynccontextmanager
async def policy_of(engine: Server, codec: TextCodec, vision: VisionSpec | None) -> AsyncIterator[RecordingPolicy]:
    pool = ServerPool(["s0"], deadline_s=60)
    pool.admit(pool.servers["s0"], url=str(engine.http.base_url).rstrip("/"), version="0-0")
    async with InferenceClient(
        pool, InferenceSettings(), max_streams=4, vocab_size=codec.vocab_size, vision=vision
    ) as client:
        yield RecordingPolicy(client, codec, SamplingSettings(max_new_tokens=8), name="uid")


def shown(image: bytes, text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text}, {"type": "image", "image": image}]}


def assert_scored_by(folder: Path, policy: RecordingPolicy, turn: Turn) -> None:
    """The turn's own images and collapsed ids give, by transformers, the logprobs that were recorded."""
    vision = VisionSpec.read(folder)
    assert vision is not None
    pngs = [policy.record.images[image.sha256].data for image in turn.images]
    expected = reference_logprobs(folder, collapse(turn.prompt_ids, vision), pngs, turn.output_ids)
    assert turn.logprobs == pytest.approx(expected, abs=1e-4)


async def test_conversation_about_two_images_has_the_models_own_logprobs(engine: Server, folder: Path) -> None:
    codec = load_codec(str(folder))
    async with policy_of(engine, codec, codec.vision) as policy:
        first = await policy.chat([shown(CAT, "one: ")], **GREEDY)
        await policy.chat([shown(CAT, "one: "), first.message, shown(DOG, " two: ")], **GREEDY)

    assert [turn.prompt_ids.count(IMAGE_ID) for turn in policy.turns] == [7 * 7, 7 * 7 + 3 * 4]
    for turn in policy.turns:
        assert_scored_by(folder, policy, turn)
    (row,) = merge_turns(policy.turns)
    assert row.images == policy.turns[1].images
    assert len(row.images) == 2


async def test_answer_that_is_interrupted_goes_on_about_the_same_image(engine: Server, folder: Path) -> None:
    codec = load_codec(str(folder))
    heard: list[int] = []
    is_speaking = anyio.Event()
    num_heard_by_the_pause = 0

    def hear(token_ids: list[int]) -> None:
        heard.extend(token_ids)
        is_speaking.set()

    async with policy_of(engine, codec, codec.vision) as policy:

        async def interrupt() -> None:
            nonlocal num_heard_by_the_pause
            await is_speaking.wait()
            await anyio.to_thread.run_sync(partial(engine.post, "/pause_generation"))
            num_heard_by_the_pause = len(heard)
            await anyio.to_thread.run_sync(partial(engine.post, "/continue_generation"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(interrupt)
            rendered = await policy._rendered_prompt([shown(CAT, "one: ")], ())
            policy.record.images |= {image.sha256: image for image in rendered.images}
            params = policy._sampling_params({**GREEDY, "max_new_tokens": 300})
            (turn,) = await policy._turns.generate(rendered.prompt_ids, params, on_tokens=hear, images=rendered.images)

    assert 0 < num_heard_by_the_pause < 300, "interrupted, and went on"
    assert heard == turn.output_ids
    assert len(heard) == 300
    assert_scored_by(folder, policy, turn)


async def test_server_of_a_folder_with_other_sizes_is_found_out(engine: Server, folder: Path) -> None:
    codec = load_codec(str(folder))
    assert codec.vision is not None
    async with policy_of(engine, codec, codec.vision) as policy:
        rendered = await policy._rendered_prompt([shown(CAT, "one: ")], ())
        longer = [*rendered.prompt_ids]
        longer.insert(longer.index(IMAGE_ID), IMAGE_ID)  # as if the folder had said so
        params = policy._sampling_params(GREEDY)

        need = len(longer)
        with pytest.raises(GenerationError, match=f"counts {need - 1} tokens in a prompt of {need}: it sees images in"):
            await policy._turns.generate(longer, params, images=rendered.images)
