"""A request shows its images with one placeholder each, as often as it is sent; what a server counts is what we do."""

import base64
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow

from areal_async.config.settings import InferenceSettings
from areal_async.errors import ContextFull, GenerationError
from areal_async.inference.client import InferenceClient
from areal_async.inference.completion import Completion
from areal_async.inference.pool import ServerHandle, ServerPool
from areal_async.inference.request import ref_of
from areal_async.vision.images import Image, take_image
from areal_async.vision.rows import expand
from areal_async.vision.spec import VisionSpec
from tests.fakes.fake_sglang import EventStream, FakeSglang, Script, event
from tests.unit.vision.specs import shipped

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]

MARK, PAD, END_MARK, VIDEO = 90, 91, 92, 93
VISION = shipped(
    "qwen3_vl",
    image_token_id=PAD,
    video_token_id=VIDEO,
    vision_start_token_id=MARK,
    vision_end_token_id=END_MARK,
    min_pixels=64 * 64,
    max_pixels=256 * 256,
)
PARAMS = {"max_new_tokens": 16}


def image_of(color: str, width: int) -> Image:
    return take_image(Pillow.new("RGB", (width, 64), color), VISION)


RED, BLUE = image_of("red", 64), image_of("blue", 128)
PROMPT = [1, MARK, *[PAD] * 4, END_MARK, 5, MARK, *[PAD] * 8, END_MARK, 7]
SENT = [1, MARK, PAD, END_MARK, 5, MARK, PAD, END_MARK, 7]


@asynccontextmanager
async def client_of(*servers: FakeSglang, vision: VisionSpec | None = VISION) -> AsyncIterator[InferenceClient]:
    async with AsyncExitStack() as stack:
        pool = ServerPool([f"s{index}" for index in range(len(servers))], deadline_s=5)
        for known, server in zip(pool.servers.values(), servers, strict=True):
            await stack.enter_async_context(server)
            pool.admit(known, url=server.url, version=server.version)
        client = InferenceClient(pool, InferenceSettings(), max_streams=4, vocab_size=100, vision=vision)
        yield await stack.enter_async_context(client)


def saying(output_ids: list[int], *, breaks_off: bool = False, num_more: int | None = 0) -> Script:
    """Count the prompt as a server that sees it does, or otherwise by ``num_more``; None for no count at all."""

    async def script(request: dict[str, Any], stream: EventStream) -> None:
        num_seen = len(PROMPT) - len(SENT) if "image_data" in request else 0
        count = {} if num_more is None else {"prompt_tokens": len(request["input_ids"]) + num_seen + num_more}
        await stream.send(output_ids, "1-0", finish_reason=None if breaks_off else {"type": "stop"}, **count)
        if breaks_off:
            stream.break_off()
        else:
            await stream.finish()

    return script


def shown(request: dict[str, Any]) -> list[bytes]:
    heads, contents = zip(*(url.split(",") for url in request["image_data"]), strict=True)
    assert set(heads) == {"data:image/png;base64"}
    return [base64.b64decode(content) for content in contents]


async def test_request_has_one_placeholder_for_each_image_and_its_turn_all_of_them() -> None:
    server = FakeSglang(saying([10, 11]))
    async with client_of(server) as client:
        turn, _ = await client.generate(PROMPT, PARAMS, images=[RED, BLUE])

    (request,) = server.requests
    assert request["input_ids"] == SENT
    assert shown(request) == [RED.data, BLUE.data]
    assert turn.prompt_ids == PROMPT
    assert turn.images == [ref_of(RED), ref_of(BLUE)]


async def test_stream_that_goes_on_in_mid_answer_is_sent_the_same_images() -> None:
    first, second = FakeSglang(saying([10, 11], breaks_off=True)), FakeSglang(saying([12]))
    async with client_of(first, second) as client:
        turn, _ = await client.generate(PROMPT, PARAMS, images=[RED, BLUE], preferred=client.pool.servers["s0"])

    requests = first.requests + second.requests
    assert [request["input_ids"] for request in requests] == [SENT, [*SENT, 10, 11]]
    assert [shown(request) for request in requests] == [[RED.data, BLUE.data]] * 2
    assert turn.output_ids == [10, 11, 12]


@pytest.mark.parametrize(("num_more", "count"), [(1, 20), (-3, 16), (None, None)])
async def test_server_that_sees_images_in_other_sizes_is_an_error_of_one_sentence(
    num_more: int | None, count: int | None
) -> None:
    sentence = f"images: server s0 counts {count} tokens in a prompt of 19: it sees images in other sizes"
    server = FakeSglang(saying([10], num_more=num_more))
    async with client_of(server) as client:
        with pytest.raises(GenerationError, match=sentence):
            await client.generate(PROMPT, PARAMS, images=[RED, BLUE])


async def test_what_a_server_counts_in_text_alone_is_its_own_affair() -> None:
    server = FakeSglang(saying([10], num_more=7))
    async with client_of(server) as client:
        turn, _ = await client.generate([1, 2], PARAMS)

    assert turn.images == []
    assert server.requests[0]["input_ids"] == [1, 2]
    assert "image_data" not in server.requests[0]


@pytest.mark.parametrize(
    ("prompt_ids", "images", "sentence"),
    [
        (PROMPT, [RED], "prompt: got 1 images and placeholders for 2"),
        (PROMPT, [], "prompt: got 0 images and placeholders for 2"),
        ([1, 2], [RED], "prompt: got 1 images and placeholders for 0"),
        ([*PROMPT, VIDEO, 3], [RED, BLUE], f"prompt: got the placeholder of a video .token {VIDEO}. beside images"),
        ([*PROMPT, MARK], [RED, BLUE], f"or the mark before an image .{MARK}. at the end"),
        ([1, PAD], [], "prompt: row: got a placeholder of images at token 1 without both marks"),
    ],
)
async def test_prompt_whose_images_are_not_its_placeholders_never_leaves(
    prompt_ids: list[int], images: list[Image], sentence: str
) -> None:
    server = FakeSglang()
    async with client_of(server) as client:
        with pytest.raises(GenerationError, match=sentence):
            await client.generate(prompt_ids, PARAMS, images=images)

    assert server.requests == []


async def test_image_for_a_model_that_does_not_see_never_leaves() -> None:
    server = FakeSglang()
    async with client_of(server, vision=None) as client:
        with pytest.raises(GenerationError, match="got 1 images for a model that sees none"):
            await client.generate([1, 2], PARAMS, images=[RED])

    assert server.requests == []


@pytest.mark.parametrize("placeholder", [PAD, VIDEO])
async def test_placeholder_that_the_model_says_ends_the_completion(placeholder: int) -> None:
    server = FakeSglang(saying([10, placeholder, 11]))
    async with client_of(server) as client:
        with pytest.raises(GenerationError, match=f"the model has said token {placeholder}, the placeholder of an"):
            await client.generate([1, 2], PARAMS)

    assert len(server.requests) == 1


IMAGES = st.sampled_from([RED, BLUE])
PARTS = st.lists(st.one_of(IMAGES, st.lists(st.integers(2, 89), min_size=1, max_size=3)), min_size=1, max_size=5)
SAID = st.lists(st.sampled_from([10, 11, MARK, END_MARK]), max_size=4)


@given(turns=st.lists(st.tuples(PARTS, SAID), min_size=1, max_size=3), streams=st.lists(SAID, min_size=1, max_size=3))
def test_whatever_was_shown_and_said_each_request_has_one_placeholder_for_each_image(
    turns: list[tuple[list[Image | list[int]], list[int]]], streams: list[list[int]]
) -> None:
    """In a conversation whose turns have merged, and in each stream of an answer that takes several."""
    sent: list[int] = []
    images: list[Image] = []
    said: list[int] = []
    told: list[int] = []
    for parts, answer in turns:
        sent += [token for part in parts for token in ([MARK, PAD, END_MARK] if isinstance(part, Image) else part)]
        images += [part for part in parts if isinstance(part, Image)]
        sent += answer + [3]
    prompt = expand(sent, [VISION.grid_of(image.width, image.height) for image in images], VISION)
    completion = Completion(
        prompt, PARAMS | {"max_new_tokens": 99}, on_tokens=told.extend, images=images, vision=VISION
    )

    for output_ids in streams:
        completion.begin_stream(ServerHandle("s0", version="1-0"))
        while images and said[-1:] == [MARK]:
            said.pop()
        assert completion.request["input_ids"] == sent + said
        assert sent.count(PAD) == len(images)
        assert told == said[: len(told)], "nobody is told what is said again"
        completion.add(event(output_ids, "1-0", prompt_tokens=len(prompt) + len(said)).removeprefix(b"data: "))
        completion.end_stream()
        said += output_ids


async def test_room_of_a_server_is_reckoned_with_every_token_of_an_image() -> None:
    server = FakeSglang(saying([10]))
    async with client_of(server) as client:
        client.pool.servers["s0"].context_tokens = len(PROMPT)
        with pytest.raises(ContextFull, match=f"got {len(PROMPT)} tokens"):
            await client.generate(PROMPT, PARAMS, images=[RED, BLUE])

    assert server.requests == []
