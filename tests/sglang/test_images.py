"""What both servers promise of a model that sees, in SGLang's words: ``image_data`` beside ids with one placeholder.

Where the real SGLang does worse than is needed, a test says so and holds the embedded engine alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from areal_async.inference.http import ServerApi
from areal_async.inference.supervision.swap import swap as change
from areal_async.protocol.types import WeightsVersion
from areal_async.vision.images import take_image
from areal_async.vision.spec import VisionSpec
from tests.sglang.conftest import SglangServer, find_sglang
from tests.sglang.scoring import assert_whole
from tests.sglang.test_client import client_of
from tests.sglang.test_contract import swap
from tests.unit.inference.broadcasting import Trainer
from tests.unit.inference.embedded_engine import Server, Stream, prompt_of, restored
from tests.unit.inference.seeing_engine import (
    END_ID,
    IMAGE_ID,
    SHOWN,
    SIDE,
    START_ID,
    ask,
    base64_of,
    build_seeing_model,
    expanded,
    png_of,
    reference_logprobs,
    refusal_of,
    shown_body,
    url_of,
)

pytestmark = pytest.mark.timeout(900)  # of which the server's start takes most, once

TOLERANCE = 1e-4
LONG = 400
"""Tokens of an answer that is still running when a test has seen its first chunks."""
CAT, DOG = png_of(1), png_of(2, width=2 * SIDE)
PROMPT = [*prompt_of(20, seed=1), *SHOWN, *prompt_of(8, seed=2)]
EMBEDDED_ONLY = pytest.mark.parametrize("shared_server", ["embedded"], indirect=True)


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two tiny models that see and differ in nothing but their weights."""
    folders = [tmp_path_factory.mktemp(f"{request.param}-{seed}") for seed in range(2)]
    return [build_seeing_model(folder, seed=seed, family=request.param) for seed, folder in enumerate(folders)]


@pytest.fixture(scope="module", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def shared_server(request: pytest.FixtureRequest, models: list[Path]) -> Iterator[Server]:
    if request.param == "sglang":
        find_sglang()
    server = (Server if request.param == "embedded" else SglangServer)(models[0])
    yield server
    server.close()


@pytest.fixture
def server(shared_server: Server, models: list[Path]) -> Iterator[Server]:
    """The shared server, running, idle and with the first model's weights whatever the test did."""
    with restored(shared_server, models[0]):
        yield shared_server


def assert_scored_by(
    model: Path, prompt: list[int], pngs: list[bytes], ids: list[int], logprobs: list[float], span: slice
) -> None:
    expected = reference_logprobs(model, prompt, pngs, ids)
    torch.testing.assert_close(torch.tensor(logprobs[span]), torch.tensor(expected[span]), atol=TOLERANCE, rtol=0.0)


def assert_answer_scored_by(model: Path, prompt: list[int], pngs: list[bytes], answer: dict[str, Any]) -> None:
    logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert_scored_by(model, prompt, pngs, answer["output_ids"], logprobs, slice(None))


def scored(server: Server, model: Path, prompt: list[int], pngs: list[bytes], **fields: str) -> int:
    """Answer, hold every logprob against transformers, and return the tokens found cached."""
    answer = server.post("/generate", **shown_body(prompt, pngs, max_new_tokens=8), **fields).json()
    assert_answer_scored_by(model, prompt, pngs, answer)
    return int(answer["meta_info"]["cached_tokens"])


@contextmanager
def streamed(server: Server, prompt: list[int], pngs: list[bytes], **sampling: Any) -> Iterator[Stream]:
    """Open one streamed answer about images."""
    request = shown_body(prompt, pngs, **sampling) | {"stream": True}
    with server.http.stream("POST", "/generate", json=request) as response:
        assert response.status_code == 200
        yield Stream(response)


def test_an_answer_about_an_image_has_the_forward_pass_logprobs(server: Server, models: list[Path]) -> None:
    answer = ask(server, PROMPT, [CAT], max_new_tokens=40)
    meta = answer["meta_info"]

    assert_answer_scored_by(models[0], PROMPT, [CAT], answer)
    assert meta["prompt_tokens"] == len(expanded(models[0], PROMPT, [CAT]))
    assert meta["image_tokens"] == meta["prompt_tokens"] - len(PROMPT) + 1 > 1
    assert server.http.get("/model_info").json()["has_image_understanding"] is True


def test_two_images_stand_where_their_placeholders_do(server: Server, models: list[Path]) -> None:
    prompt = [*SHOWN, *prompt_of(5), *SHOWN, *prompt_of(6, seed=1)]

    answer = ask(server, prompt, [CAT, DOG], max_new_tokens=40)

    assert_answer_scored_by(models[0], prompt, [CAT, DOG], answer)
    assert answer["meta_info"]["prompt_tokens"] == len(expanded(models[0], prompt, [CAT, DOG]))
    assert answer["meta_info"]["image_tokens"] == answer["meta_info"]["prompt_tokens"] - len(prompt) + 2


def test_text_alone_is_answered_as_before(server: Server, models: list[Path]) -> None:
    prompt = prompt_of(30)

    answer = ask(server, prompt, [], max_new_tokens=20)

    assert_answer_scored_by(models[0], prompt, [], answer)
    assert "image_tokens" not in answer["meta_info"]


def test_streams_about_images_and_text_that_join_late_have_the_forward_pass_logprobs(
    server: Server, models: list[Path]
) -> None:
    cases = [(PROMPT, [CAT]), (prompt_of(9), []), ([*SHOWN, 5, *SHOWN, 7], [DOG, CAT])]
    first, *rest = cases
    with streamed(server, *first, max_new_tokens=60) as early:
        early.read(3)
        late = [streamed(server, *case, max_new_tokens=40) for case in rest]
        with late[0] as second, late[1] as third:
            streams = [early, second, third]
            for stream in streams:
                stream.read()

    for (prompt, pngs), stream in zip(cases, streams, strict=True):
        assert_scored_by(models[0], prompt, pngs, stream.output_ids, stream.logprobs, slice(None))
    assert early.meta["image_tokens"] == len(expanded(models[0], SHOWN, [CAT])) - 2


@pytest.mark.parametrize("image_data", [url_of(CAT), base64_of(CAT), [base64_of(CAT)]], ids=["url", "base64", "list"])
def test_an_image_comes_in_any_of_sglangs_forms(server: Server, image_data: object) -> None:
    greedy = shown_body(PROMPT, [CAT], max_new_tokens=6, temperature=0)
    expected = server.post("/generate", **greedy).json()["output_ids"]

    assert server.post("/generate", **greedy | {"image_data": image_data}).json()["output_ids"] == expected


def test_text_may_have_the_placeholder(server: Server, models: list[Path]) -> None:
    text = "so <|vision_start|><|image_pad|><|vision_end|>?"
    answer = server.post("/generate", text=text, image_data=url_of(CAT), sampling_params={"max_new_tokens": 4}).json()

    assert answer["meta_info"]["prompt_tokens"] == len("so ?") + len(expanded(models[0], SHOWN, [CAT]))


@pytest.mark.parametrize("image_data", [[[url_of(CAT)], [url_of(DOG)]], [url_of(CAT), url_of(DOG)]])
def test_a_batch_has_images_for_each_prompt(server: Server, models: list[Path], image_data: object) -> None:
    prompts = [[5, *SHOWN], [6, 7, *SHOWN]]
    request = {"input_ids": prompts, "image_data": image_data}
    answers = server.post("/generate", **request, sampling_params={"max_new_tokens": 2}).json()

    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [
        len(expanded(models[0], prompt, [png])) for prompt, png in zip(prompts, (CAT, DOG), strict=True)
    ]


def test_one_image_may_be_that_of_a_whole_batch(server: Server, models: list[Path]) -> None:
    prompts = [[5, *SHOWN], [6, 7, *SHOWN]]
    answers = server.post(
        "/generate",
        input_ids=prompts,
        image_data=url_of(CAT),
        sampling_params={"max_new_tokens": 2},
    ).json()

    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [
        len(expanded(models[0], prompt, [CAT])) for prompt in prompts
    ]


def test_a_cached_prefix_is_that_of_the_same_image_only(server: Server, models: list[Path]) -> None:
    """While the first answers run: the embedded engine shares what is running."""
    shown = [[CAT], [png_of(3)], [CAT]]
    with streamed(server, PROMPT, [CAT], max_new_tokens=LONG) as held:
        held.read(3)
        answers = [ask(server, PROMPT, pngs, max_new_tokens=8) for pngs in shown]

    same, other, again = (answer["meta_info"]["cached_tokens"] for answer in answers)
    assert same == again == len(expanded(models[0], PROMPT, [CAT])) - 1
    assert other <= PROMPT.index(IMAGE_ID)
    for pngs, answer in zip(shown, answers, strict=True):
        assert_answer_scored_by(models[0], PROMPT, pngs, answer)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_weights_change_in_the_middle_of_an_answer_about_an_image(
    server: Server, models: list[Path], mode: str
) -> None:
    """Retracted, the image too is seen by the new weights; in place, what was seen of it stays."""
    with streamed(server, PROMPT, [CAT], max_new_tokens=LONG) as stream:
        stream.read(3)
        swap(server, models[1], "0-1", mode=mode)
        stream.read()

    old, new = stream.meta["weight_versions"]
    assert (old["version"], new["version"]) == ("0-0", "0-1")
    assert (old["start"], new["start"], new["end"]) == (0, old["end"], LONG)
    assert 0 < old["end"] < LONG
    assert stream.meta["prompt_tokens"] == len(expanded(models[0], PROMPT, [CAT]))
    at_old, at_new = slice(0, old["end"]), slice(new["start"], LONG)
    assert_scored_by(models[0], PROMPT, [CAT], stream.output_ids, stream.logprobs, at_old)
    if mode == "retract":
        assert_scored_by(models[1], PROMPT, [CAT], stream.output_ids, stream.logprobs, at_new)


def test_after_a_swap_a_known_image_is_seen_by_the_new_weights(server: Server, models: list[Path]) -> None:
    """SGLang keeps what its tower made of an image, unless it is started as we start it."""
    scored(server, models[0], PROMPT, [CAT])
    swap(server, models[1], "0-1", mode="retract")

    assert scored(server, models[1], PROMPT, [CAT]) == 0


def test_after_an_in_place_swap_a_salted_prompt_is_seen_by_the_new_weights(server: Server, models: list[Path]) -> None:
    """The request that is held keeps the cache in use, so that it cannot be flushed."""
    scored(server, models[0], PROMPT, [CAT], cache_salt="0-0")
    with streamed(server, PROMPT, [CAT], max_new_tokens=LONG) as held:
        held.read(3)
        swap(server, models[1], "0-1", mode="in_place")

        assert scored(server, models[1], PROMPT, [CAT], cache_salt="0-1") == 0


def test_a_broadcast_in_the_middle_of_an_answer_changes_what_is_seen(server: Server, models: list[Path]) -> None:
    trainer = Trainer(server, "run-1-1")
    trainer.join()
    try:
        with streamed(server, PROMPT, [CAT], max_new_tokens=LONG) as stream:
            stream.read(3)
            server.post("/pause_generation", mode="retract")
            trainer.send(models[1], "0-1")
            server.post("/continue_generation")
            stream.read()
    finally:
        trainer.close()

    old, new = stream.meta["weight_versions"]
    assert (old["version"], new["version"], new["end"]) == ("0-0", "0-1", LONG)
    assert_scored_by(models[0], PROMPT, [CAT], stream.output_ids, stream.logprobs, slice(0, old["end"]))
    assert_scored_by(models[1], PROMPT, [CAT], stream.output_ids, stream.logprobs, slice(new["start"], LONG))
    scored(server, models[1], PROMPT, [CAT])


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["retract", "abort"])
async def test_the_client_goes_on_about_its_images_under_new_weights(
    server: Server, models: list[Path], mode: str
) -> None:
    """Its prompts are expanded, in the next turn too; what was aborted is sent anew, with what was said."""
    vision = VisionSpec.read(models[0])
    assert vision is not None
    images = [take_image(png, vision) for png in (CAT, DOG)]
    params = {"max_new_tokens": LONG, "temperature": 0.0, "ignore_eos": True}
    async with client_of(server, vision=vision) as client:
        known = client.pool.servers["s0"]

        async def update() -> None:
            while known.num_generated_tokens < 20:  # noqa: ASYNC110 -- a counter has no event
                await anyio.sleep(0.01)
            target = WeightsVersion(version="0-1", path=str(models[1]))
            await change(ServerApi(client.administration, known.url), target, mode=mode, deadline_s=60)
            client.pool.admit(known, url=known.url, version="0-1")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(update)
            turn, _ = await client.generate(expanded(models[0], PROMPT, [CAT]), params, images=images[:1])
        more = [*PROMPT, *turn.output_ids[:20], *SHOWN]
        short = {**params, "max_new_tokens": 8}
        next_turn, _ = await client.generate(expanded(models[0], more, [CAT, DOG]), short, images=images)

    assert_whole(turn, LONG)
    old, new = turn.spans
    assert (old.version, new.version, turn.oldest) == ("0-0", "0-1", "0-0")
    for model, span in zip(models, (slice(0, old.end), slice(new.start, LONG)), strict=True):
        assert_scored_by(model, PROMPT, [CAT], turn.output_ids, turn.logprobs, span)
    assert_scored_by(models[1], more, [CAT, DOG], next_turn.output_ids, next_turn.logprobs, slice(None))


def test_an_aborting_pause_ends_an_answer_about_an_image(server: Server) -> None:
    with streamed(server, PROMPT, [CAT], max_new_tokens=LONG) as stream:
        stream.read(3)
        server.post("/pause_generation")
        stream.read()

    assert stream.meta["finish_reason"]["type"] == "abort"
    assert 3 <= len(stream.output_ids) < LONG


def test_lengths_are_those_of_the_expanded_prompt(server: Server, models: list[Path]) -> None:
    prompt = [*prompt_of(504), *SHOWN]
    num_tokens = len(expanded(models[0], prompt, [CAT]))
    answer = server.http.post("/generate", json=shown_body(prompt, [CAT], max_new_tokens=1))

    assert f"The input ({num_tokens} tokens) is longer than the model's context length" in refusal_of(answer)


@pytest.mark.parametrize("image", ["!!!", base64_of(b"no image")])
def test_what_is_no_image_is_refused(server: Server, image: str) -> None:
    answer = server.http.post("/generate", json=shown_body(PROMPT, []) | {"image_data": image})

    assert refusal_of(answer)


@EMBEDDED_ONLY
@pytest.mark.parametrize(
    ("prompt", "pngs", "message"),
    [
        ([5, *SHOWN], [], "got 0 images, need 1"),
        ([5], [CAT], "got 1 images, need 0"),
        ([5, *SHOWN], [CAT, DOG], "got 2 images, need 1"),
        ([5, *SHOWN, *SHOWN], [CAT], "got 1 images, need 2"),
        ([5, START_ID, *[IMAGE_ID] * 6, END_ID], [CAT], "got 6 placeholders for the image at token 2, need one"),
    ],
    ids=["no-image", "no-placeholder", "more-images", "fewer-images", "expanded"],
)
def test_placeholders_that_do_not_fit_the_images_are_refused(
    server: Server, prompt: list[int], pngs: list[bytes], message: str
) -> None:
    """SGLang 0.5.23 answers without the image to the first two, with the first image to the third, else 500."""
    answer = server.http.post("/generate", json=shown_body(prompt, pngs, max_new_tokens=1))

    assert message in refusal_of(answer)
    with streamed(server, prompt, pngs, max_new_tokens=1) as stream:
        stream.read()
    assert message in stream.events[0]["error"]["message"]


@EMBEDDED_ONLY
@pytest.mark.parametrize(
    ("png", "message"),
    [
        (png_of(1, width=70, height=90), "got 70 x 90 pixels, need multiples of "),
        (png_of(1, width=4 * SIDE, height=4 * SIDE), "got 896 x 896 pixels"),
    ],
    ids=["between", "too-large"],
)
def test_an_image_that_would_have_to_be_resized_is_refused(server: Server, png: bytes, message: str) -> None:
    """SGLang resizes it, and a trainer would not know to what."""
    answer = server.http.post("/generate", json=shown_body(PROMPT, [png], max_new_tokens=1))

    assert message in refusal_of(answer)
