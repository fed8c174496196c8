"""Things in an image are counted from the image itself, and a closer look shows the part that was asked for."""

from typing import Any

import PIL.Image
import pytest

from areal_async.config.settings import SamplingSettings
from areal_async.errors import ToolError
from areal_async.inference.request import ref_of
from areal_async.protocol.types import Prompt
from areal_async.rollout.policy.policy import RecordingPolicy
from areal_async.vision.images import Image, take_image
from tests.unit.rollout.byte_model import ScriptedModel
from tests.unit.rollout.seeing import seeing_codec, vision
from workflows.clevr_count import clevr_count
from workflows.clevr_zoom import HINT, clevr_zoom, enlarged

pytestmark = pytest.mark.anyio

QUESTION = "How many different items are there in the image?"


def quarters() -> PIL.Image.Image:
    """Return an image of 64 x 64 pixels with a quarter of each colour, row by row."""
    image = PIL.Image.new("RGB", (2, 2))
    for number, colour in enumerate([(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)]):
        image.putpixel((number % 2, number // 2), colour)
    return image.resize((64, 64), PIL.Image.Resampling.NEAREST)


def plain(colour: str) -> Image:
    return take_image(PIL.Image.new("RGB", (64, 64), colour), vision())


async def play(workflow: Any, *said: str) -> tuple[float, RecordingPolicy]:
    codec = seeing_codec()
    model = ScriptedModel(*([*codec.encode(text), codec.stop_token_ids[0]] for text in said))
    policy = RecordingPolicy(model, codec, SamplingSettings(), name="uid")
    row = {"images": [take_image(quarters(), vision())], "problem": f"<image>{QUESTION}", "answer": "4"}
    return await workflow(Prompt(epoch=0, index=0, row=row), policy), policy


def call(left: int, top: int, right: int, bottom: int) -> str:
    arguments = f'{{"left": {left}, "top": {top}, "right": {right}, "bottom": {bottom}}}'
    return f'<tool_call>{{"name": "zoom", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize(("said", "reward"), [("There are 4.", 1.0), ("four", 1.0), ("There are 3.", 0.0), ("", 0.0)])
async def test_image_is_shown_before_the_question_and_the_number_scored(said: str, reward: float) -> None:
    scored, policy = await play(clevr_count, said)

    (turn,) = policy.turns
    assert scored == reward
    assert turn.images == [ref_of(take_image(quarters(), vision()))]
    text = policy._codec.decode(turn.prompt_ids, skip_special_tokens=False)
    assert f"<|vision_end|>{QUESTION}<|im_end|>" in text


@pytest.mark.parametrize(
    ("said", "reward", "num_errors"),
    [
        ([call(500, 0, 1000, 500), "4"], 1.0, 0),
        ([call(500, 0, 1000, 500), "1"], 0.0, 0),
        ([call(500, 0, 500, 500), call(500, 0, 1000, 500), "4"], 1.0, 1),
        (["There are 4."], 1.0, 0),
        ([f"<answer>4</answer>{call(500, 0, 1000, 500)}"] * 4, 0.0, 0),
    ],
)
async def test_a_closer_look_shows_that_part_and_the_last_answer_is_scored(
    said: list[str], reward: float, num_errors: int
) -> None:
    scored, policy = await play(clevr_zoom, *said)

    assert (scored, policy.record.num_tool_errors, policy.record.num_breaks) == (reward, num_errors, 0)
    whole, part = ref_of(take_image(quarters(), vision())), ref_of(plain("#00ff00"))
    num_looks = sum("tool_call" in text for text in said[:-1]) - num_errors
    assert policy.turns[-1].images == [whole, *[part] * num_looks]
    assert f"{QUESTION} {HINT}" in policy._codec.decode(policy.turns[0].prompt_ids, skip_special_tokens=False)


def test_a_part_is_as_large_as_the_whole_unless_that_were_more_than_four_times() -> None:
    image = PIL.Image.new("RGB", (200, 100))

    assert enlarged(image, (0, 0, 1000, 1000)).size == (200, 100)
    assert enlarged(image, (250, 250, 750, 750)).size == (200, 100)
    assert enlarged(image, (0, 0, 250, 1000)).size == (100, 200)
    assert enlarged(image, (0, 0, 100, 100)).size == (80, 40)


@pytest.mark.parametrize(
    ("box", "need"),
    [
        ((-1, 0, 500, 500), "0 <= left < right <= 1000"),
        ((0, 0, 1001, 500), "0 <= left < right <= 1000"),
        ((0, 0, 500, 1001), "0 <= left < right <= 1000"),
        ((500, 0, 500, 500), "0 <= left < right <= 1000"),
        ((0, 600, 500, 600), "0 <= left < right <= 1000"),
        ((0, 0, 500, 10), "4 x 4 at least"),
        ((0, 0, 10, 500), "4 x 4 at least"),
    ],
)
def test_what_is_no_part_is_told_so(box: tuple[int, int, int, int], need: str) -> None:
    with pytest.raises(ToolError, match=f"need {need}"):
        enlarged(PIL.Image.new("RGB", (100, 100)), box)
