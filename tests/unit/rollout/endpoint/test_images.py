"""Agents show images as they do to the services whose APIs they speak, and the policy records what the model saw."""

import base64
import io
from typing import Any

import anthropic
import openai
import pytest

from areal_async.inference.request import ref_of
from areal_async.rollout.policy.merge import merge_turns
from areal_async.vision.images import take_image
from tests.unit.rollout.byte_model import ScriptedModel
from tests.unit.rollout.endpoint.scripted_endpoint import chat, client, said, served, speaker
from tests.unit.rollout.seeing import picture, seeing_codec, vision

pytestmark = pytest.mark.anyio

CHAT = "v1/chat/completions"


def png(color: str) -> bytes:
    buffer = io.BytesIO()
    picture(color).save(buffer, "PNG")
    return buffer.getvalue()


def url(color: str) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(color)).decode()}"


def shown(color: str) -> dict[str, Any]:
    return {"role": "user", "content": [
        {"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url(color)}}]}  # fmt: skip


def colors_of(model: ScriptedModel) -> list[list[str]]:
    taken = {take_image(png(color), vision()).sha256: color for color in ("red", "blue", "lime")}
    return [[taken[image.sha256] for image in images] for images in model.seen]


async def test_conversation_of_images_in_openais_api_is_one_sequence() -> None:
    async with served(model := speaker("Red.", "Blue."), codec=seeing_codec()) as policy:
        async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as agent:
            messages: list[Any] = [shown("red")]
            first = await agent.chat.completions.create(model="m", messages=messages)
            messages += [first.choices[0].message, shown("blue")]
            second = await agent.chat.completions.create(model="m", messages=messages)

    assert colors_of(model) == [["red"], ["red", "blue"]]
    (row,) = merge_turns(policy.turns)
    assert row.images == [ref_of(take_image(png(color), vision())) for color in ("red", "blue")]
    assert row.token_ids[row.loss_mask].tolist() == said("Red.") + said("Blue.")
    assert second.usage is not None
    assert second.usage.prompt_tokens == len(policy.turns[1].prompt_ids), "with every token of its images"


async def test_conversation_of_images_in_openais_responses_goes_on_from_one_that_is_kept() -> None:
    async with served(model := speaker("Red.", "Still."), codec=seeing_codec()) as policy:
        async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as agent:
            content: Any = [{"type": "input_image", "image_url": url("red"), "detail": "auto"}]
            first = await agent.responses.create(model="m", input=[{"role": "user", "content": content}])
            await agent.responses.create(model="m", input="And now?", previous_response_id=first.id)

    assert colors_of(model) == [["red"], ["red"]]
    assert len(merge_turns(policy.turns)) == 1


async def test_conversation_of_images_in_anthropics_api_is_one_sequence() -> None:
    def part(color: str) -> Any:
        data = base64.b64encode(png(color)).decode()
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    async with served(model := speaker("Red.", "Blue."), codec=seeing_codec()) as policy:
        async with anthropic.AsyncAnthropic(base_url=policy.base_url, api_key=policy.api_key) as agent:
            messages: list[Any] = [{"role": "user", "content": [part("red"), {"type": "text", "text": "What?"}]}]
            first = await agent.messages.create(model="m", messages=messages, max_tokens=9)
            messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [part("blue")]}]
            await agent.messages.create(model="m", messages=messages, max_tokens=9)

    assert colors_of(model) == [["red"], ["red", "blue"]]
    assert len(merge_turns(policy.turns)) == 1


async def test_stream_is_shown_images_too() -> None:
    async with served(model := speaker("Red."), codec=seeing_codec()) as policy, client(policy) as http:
        response = await http.post(CHAT, json=chat(messages=[shown("red")], stream=True))

    assert response.status_code == 200
    assert colors_of(model) == [["red"]]


async def test_image_for_a_model_that_does_not_see_and_one_that_is_none_are_bad_requests() -> None:
    broken = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}]}
    sentences = []
    for codec, message in ((None, shown("red")), (seeing_codec(), broken)):
        async with served(speaker(), codec=codec) as policy, client(policy) as http:
            response = await http.post(CHAT, json=chat(messages=[message]))
            sentences.append((response.status_code, response.json()["error"]["message"]))

    (blind, cannot_see), (damaged, no_image) = sentences
    assert (blind, damaged) == (400, 400)
    assert "cannot see" in cannot_see
    assert "got no whole image" in no_image
