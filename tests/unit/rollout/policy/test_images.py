"""What a model saw is what is recorded: which images stand behind the tokens of a prompt, byte for byte."""

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from PIL import Image

from areal_async.config.settings import SamplingSettings
from areal_async.errors import ContextFull, WorkflowError
from areal_async.inference.request import ref_of
from areal_async.rollout.policy import images as images_module
from areal_async.rollout.policy.images import ImageIntake
from areal_async.rollout.policy.merge import merge_turns
from areal_async.rollout.policy.policy import RecordingPolicy
from areal_async.vision.images import Image as TakenImage
from areal_async.vision.images import ImageError, take_image
from areal_async.vision.rows import collapse
from tests.unit.rollout.byte_model import ScriptedModel
from tests.unit.rollout.byte_model import codec as blind_codec
from tests.unit.rollout.chat_templates import HERMES
from tests.unit.rollout.policy.test_merge import turn_of
from tests.unit.rollout.seeing import PLACEHOLDER, picture, seeing_codec, shown, vision

pytestmark = pytest.mark.anyio

END = 2
USER = {"role": "user", "content": "And now?"}


def policy_of(model: ScriptedModel, *, codec: Any = None) -> RecordingPolicy:
    return RecordingPolicy(model, codec or seeing_codec(), SamplingSettings(max_new_tokens=8), name="uid")


def png(color: str, width: int = 64, height: int = 64) -> bytes:
    buffer = io.BytesIO()
    picture(color, width, height).save(buffer, "PNG")
    return buffer.getvalue()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def taken(color: str, width: int = 64, height: int = 64) -> TakenImage:
    return take_image(picture(color, width, height), vision())


def num_placeholders(ids: list[int]) -> int:
    return ids.count(vision().image_token_id)


def test_turn_that_shows_another_image_behind_the_same_tokens_is_a_sequence_of_its_own() -> None:
    red, blue = ref_of(taken("red")), ref_of(taken("blue"))
    first = replace(turn_of([1, 5, 2], [3]), images=[red])
    same = replace(turn_of([1, 5, 2, 3, 7], [4]), images=[red])
    other = replace(turn_of([1, 5, 2, 3, 7], [4]), images=[blue])
    more = replace(turn_of([1, 5, 2, 3, 7, 5], [4]), images=[red, blue])

    assert [row.images for row in merge_turns([first, same])] == [[red]]
    assert [row.images for row in merge_turns([first, other])] == [[red], [blue]]
    assert [row.images for row in merge_turns([first, more])] == [[red, blue]], "those of its last prompt are all"
    assert merge_turns([turn_of([1], [2])])[0].images is None


async def test_recorded_prompt_is_expanded_and_names_its_images_in_order() -> None:
    policy = policy_of(model := ScriptedModel([10, END]))
    messages = [
        {"role": "user", "content": [
            {"type": "image", "image": picture("red", 128, 64)},
            {"type": "text", "text": "and"},
            {"type": "image_url", "image_url": {"url": url(png("blue")), "detail": "low"}},
        ]}
    ]  # fmt: skip

    await policy.chat(messages)

    (turn,) = policy.turns
    red, blue = taken("red", 128, 64), taken("blue")
    assert num_placeholders(turn.prompt_ids) == 4 * 2 + 2 * 2
    assert turn.images == [ref_of(red), ref_of(blue)]
    assert policy.record.images == {red.sha256: red, blue.sha256: blue}
    assert model.seen == [[red, blue]]
    text = policy._codec.decode(collapse(turn.prompt_ids, vision()), skip_special_tokens=False)
    mark = f"<|vision_start|>{PLACEHOLDER}<|vision_end|>"
    assert text == f"<|im_start|>user\n{mark}and{mark}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("form", ["picture", "bytes", "path", "url", "row", "row with a path", "taken before"])
async def test_image_is_the_same_in_whatever_form_it_is_given(form: str, tmp_path: Path) -> None:
    policy = policy_of(ScriptedModel([10, END]))
    path = tmp_path / "one.png"
    path.write_bytes(png("red"))
    forms: dict[str, Any] = {
        "picture": picture("red"),
        "bytes": png("red"),
        "path": str(path),
        "url": url(png("red")),
        "row": {"bytes": png("red"), "path": None},
        "row with a path": {"bytes": None, "path": str(path)},
        "taken before": taken("red"),
    }

    await policy.chat([shown(forms[form])])

    assert policy.turns[0].images == [ref_of(taken("red"))]


async def test_conversation_goes_on_with_the_images_that_it_began_with() -> None:
    policy = policy_of(model := ScriptedModel([10, END], [11, END], [12, END]))
    first = await policy.chat([shown(picture("red"))])
    messages = [shown(picture("red")), first.message, shown(picture("blue"))]
    second = await policy.chat(messages)
    await policy.chat([*messages, second.message, USER])

    one, two, three = policy.turns
    assert two.prompt_ids[: len(one.prompt_ids) + 2] == one.prompt_ids + one.output_ids
    assert three.prompt_ids[: len(two.prompt_ids) + 2] == two.prompt_ids + two.output_ids
    assert [[image.sha256 for image in seen] for seen in model.seen] == [
        [taken(color).sha256 for color in colors] for colors in (["red"], ["red", "blue"], ["red", "blue"])
    ]
    (row,) = merge_turns(policy.turns)
    assert row.images == [ref_of(taken("red")), ref_of(taken("blue"))]
    assert policy.record.num_breaks == 0


async def test_conversation_with_another_image_in_its_past_is_a_new_one_though_its_tokens_are_equal() -> None:
    policy = policy_of(ScriptedModel([10, END], [11, END]))
    first = await policy.chat([shown(picture("red"))])
    await policy.chat([shown(picture("blue")), first.message, USER])

    one, two = policy.turns
    assert two.prompt_ids[: len(one.prompt_ids) + 2] == one.prompt_ids + one.output_ids, "equal tokens"
    assert two.images == [ref_of(taken("blue"))]
    assert policy.record.num_breaks == 1
    assert len(merge_turns(policy.turns)) == 2


async def test_canvas_that_is_drawn_on_later_shows_what_it_showed_then() -> None:
    policy = policy_of(ScriptedModel([10, END], [11, END]))
    canvas = picture("red")
    first = await policy.chat([shown(canvas)])
    canvas.paste("blue", (0, 0, 64, 64))
    await policy.chat([shown(picture("red")), first.message, shown(canvas)])

    assert [image.sha256 for image in policy.turns[1].images] == [taken("red").sha256, taken("blue").sha256]


async def test_stream_and_several_replies_see_the_same_images() -> None:
    policy = policy_of(model := ScriptedModel([10, END], [11, END], [12, END]))

    async with policy.stream([shown(picture("red"))]) as stream:
        async for _ in stream:
            pass
    await policy.chat([shown(picture("red"))], n=2)

    assert model.seen == [[taken("red")]] * 3
    assert [turn.images for turn in policy.turns] == [[ref_of(taken("red"))]] * 3


async def test_room_is_reckoned_with_the_tokens_of_images() -> None:
    policy = policy_of(model := ScriptedModel())
    policy.record.max_sequence_tokens = 60

    with pytest.raises(ContextFull, match=r"got 82 tokens, .* length of 60 tokens"):
        await policy.chat([shown(picture("red", 256, 256))])
    assert model.calls == []


async def test_tool_shows_the_model_what_it_returns() -> None:
    canvas = picture("red")

    def paint(color: str) -> Image.Image:
        canvas.paste(color, (0, 0, 64, 64))
        return canvas

    async def look() -> list[Any]:
        return [{"type": "text", "text": "left, right:"}, picture("white"), picture("black")]

    codec = seeing_codec()
    call = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
    calls = [call % ("paint", '{"color": "blue"}'), call % ("paint", '{"color": "green"}'), call % ("look", "{}")]
    policy = policy_of(ScriptedModel([*codec.encode("".join(calls)), END], [11, END]))

    done = await policy.act([shown(canvas)], [paint, look])

    colors = ["red", "blue", "green", "white", "black"]
    assert [image.sha256 for image in policy.turns[1].images] == [taken(color).sha256 for color in colors]
    assert [result.text for result in done.results] == [
        "[image of 64 x 64]",
        "[image of 64 x 64]",
        "left, right:\n[image of 64 x 64]\n[image of 64 x 64]",
    ]
    assert len(merge_turns(policy.turns)) == 1


async def test_tool_whose_image_cannot_be_shown_has_failed_and_the_model_is_told_why() -> None:
    def crop() -> Image.Image:
        return picture("red", 4000, 1)

    codec = seeing_codec()
    call = codec.encode('<tool_call>{"name": "crop", "arguments": {}}</tool_call>')
    policy = policy_of(ScriptedModel([*call, END], [11, END]))

    done = await policy.act([USER], [crop])

    assert done.results[0].is_error
    assert done.results[0].text.startswith("error: crop: image: got 4000 x 1 pixels")


async def test_image_for_a_model_that_does_not_see_is_refused_in_one_sentence() -> None:
    def paint() -> Image.Image:
        return picture("red")

    call = [*b'{"name": "paint", "arguments": {}}', 256]
    policy = policy_of(model := ScriptedModel(call), codec=blind_codec())

    with pytest.raises(WorkflowError, match="place 1: got an image, which the model .* cannot see, need text"):
        await policy.chat([shown(picture("red"))])
    with pytest.raises(WorkflowError, match="cannot see"):
        async for _ in policy.stream([shown(picture("red"))]):
            pass
    with pytest.raises(WorkflowError, match="tool paint: returned an image, which the model cannot see, need text"):
        await policy.act([{"role": "user", "content": "Paint!"}], [paint])
    assert len(model.calls) == 1


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": f"Look: {PLACEHOLDER}"},
        {"role": "user", "content": [{"type": "text", "text": PLACEHOLDER}, {"type": "image", "image": png("red")}]},
    ],
    ids=["alone", "beside an image"],
)
async def test_text_that_would_be_read_as_an_image_is_refused(message: dict[str, Any]) -> None:
    policy = policy_of(model := ScriptedModel())

    with pytest.raises(WorkflowError, match=r"got the text <\|image_pad\|> in place 1, which stands for an image"):
        await policy.chat([message])
    assert model.calls == []


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no image": ({"type": "image", "image": b"GIF8"}, "messages: place 1: image: got no whole image"),
    "nothing": ({"type": "image"}, "messages: place 1: image: got a part of type image without an image"),
    "address": (
        {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        "messages: place 1: image: got the image_url 'https://example.org/a.png', need a data: URL",
    ),
    "file of ours": (
        {"type": "image_url", "image_url": {"url": "/etc/passwd"}},
        "messages: place 1: image: got the image_url '/etc/passwd', need a data: URL",
    ),
    "number": ({"type": "image_url", "image_url": 3}, "got an image_url of type int, need a data: URL"),
}


@pytest.mark.parametrize("name", BAD)
async def test_what_is_no_image_is_refused_in_one_sentence(name: str) -> None:
    part, sentence = BAD[name]
    policy = policy_of(ScriptedModel())

    with pytest.raises(WorkflowError) as caught:
        await policy.chat([{"role": "user", "content": [part]}])
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_template_that_leaves_an_image_out_is_refused() -> None:
    blind = HERMES.replace("+ message.content", "+ (message.content | string)")
    policy = policy_of(ScriptedModel(), codec=seeing_codec(blind))

    with pytest.raises(WorkflowError, match="chat template: wrote 0 placeholders for 1 images, need one for each"):
        await policy.chat([shown(picture("red"))])


async def test_part_of_a_row_is_text_though_its_column_has_a_place_for_an_image() -> None:
    policy = policy_of(ScriptedModel([10, END]))
    parts = [
        {"type": "image", "text": None, "image": {"bytes": png("red"), "path": None}},
        {"type": "text", "text": "What is it?", "image": None},
    ]

    await policy.chat([{"role": "user", "content": parts}])

    assert num_placeholders(policy.turns[0].prompt_ids) == 4


async def test_image_that_siblings_share_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[object] = []

    def take(source: object, *rest: Any) -> TakenImage:
        decoded.append(source)
        return take_image(source, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(images_module, "take_image", take)
    monkeypatch.setattr(images_module, "MAX_KEPT_BYTES", 2 * len(taken("red").data))
    intake = ImageIntake(vision(), model="m")

    async def show(color: str) -> TakenImage:
        part = await intake.take_part({"type": "image", "image": png(color)}, what="test")
        return part["image"]

    first = await show("red")
    assert await show("red") is first
    for color in ("blue", "lime"):
        await show(color)
    assert await show("red") == first

    assert [source == png("red") for source in decoded] == [True, False, False, True], "more than is kept"


async def test_image_of_another_model_is_brought_to_the_size_of_this_one() -> None:
    policy = policy_of(ScriptedModel([10, END]))
    large = TakenImage(png("red", 512, 512), 512, 512)

    await policy.chat([shown(large)])

    (image,) = policy.turns[0].images
    assert (image.width, image.height) == (256, 256)


async def test_what_a_row_has_in_the_place_of_an_image_is_told_where_it_is_shown() -> None:
    policy = policy_of(ScriptedModel([10, END]))

    with pytest.raises(WorkflowError, match="messages: place 1: row 3, column image: it is damaged"):
        await policy.chat([shown(ImageError("row 3, column image: it is damaged"))])
