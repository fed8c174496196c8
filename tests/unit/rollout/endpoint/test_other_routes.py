"""A text is gone on from without a template, a prompt is counted as it is sent, and calls come in other formats."""

import json
from typing import Any

import anthropic
import openai
import pytest

from areal_async.rollout.policy.merge import merge_turns
from tests.unit.rollout.chat_templates import codec_with
from tests.unit.rollout.endpoint.scripted_endpoint import END, PARAMETERS, QUESTION, client, said, served, speaker

pytestmark = pytest.mark.anyio

TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
CALLS = {
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 2, "b": 3}<|tool_call_end|><|tool_calls_section_end|>',
    "deepseek": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 2, "b": 3}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "harmony": "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    '<|constrain|>json<|message|>{"a": 2, "b": 3}',
}
ANSWERS = {"harmony": "<|channel|>final<|message|>5"}


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_completions_go_on_from_a_text_as_it_stands(is_streamed: bool) -> None:
    async with served(speaker(" and 5.", " six")) as policy:
        async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as sdk:
            asked: Any = {"model": "m", "prompt": ["2, 3"], "n": 2, "logprobs": 0, "stop": ".", "stream": is_streamed}
            got: Any = await sdk.completions.create(**asked)
            choices = [choice async for event in got for choice in event.choices] if is_streamed else got.choices

    assert [(one.index, one.text, one.finish_reason) for one in choices] == [(0, " and 5", "stop"), (1, " six", "stop")]
    assert [turn.prompt_ids for turn in policy.turns] == 2 * [codec_with("hermes").encode("2, 3")]
    assert [turn.output_ids for turn in policy.turns] == [said(" and 5."), said(" six")]
    assert [choice.logprobs.token_logprobs for choice in choices] == [turn.logprobs for turn in policy.turns]
    assert [choice.logprobs.text_offset[:3] for choice in choices] == [[0, 1, 2], [0, 1, 2]]


async def test_completions_go_on_from_ids_and_take_one_prompt() -> None:
    async with served(speaker("x")) as policy, client(policy) as http:
        one = (await http.post("/v1/completions", json={"prompt": [[7, 8]]})).json()
        refused = [
            (await http.post("/completions", json={"prompt": prompt} | more)).json()["error"]["param"]
            for prompt, more in ((["a", "b"], {}), ("", {}), ("a", {"echo": True}), ("a", {"suffix": "b"}))
        ]

    assert (one["object"], one["choices"][0]["text"], one["choices"][0]["logprobs"]) == ("text_completion", "x", None)
    assert one["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    assert policy.turns[0].prompt_ids == [7, 8]
    assert refused == ["prompt", "prompt", "echo", "suffix"]


async def test_tokens_are_counted_as_they_would_be_sent_and_nothing_is_said() -> None:
    async with served(speaker("5", "6")) as policy:
        async with anthropic.AsyncAnthropic(base_url=policy.base_url, api_key=policy.api_key) as sdk:
            messages: Any = list(QUESTION)
            about: Any = {"model": "m", "tools": [{"name": "add", "input_schema": PARAMETERS}], "system": "Be brief."}
            for _ in range(2):
                counted = await sdk.messages.count_tokens(messages=messages, **about)
                num_turns = len(policy.turns)
                answer = await sdk.messages.create(messages=messages, max_tokens=9, **about)
                assert counted.input_tokens == answer.usage.input_tokens == len(policy.turns[-1].prompt_ids)
                assert len(policy.turns) == num_turns + 1
                messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "So?"}]

        assert policy.failures == []
        assert policy.record.num_breaks == 0


async def test_what_cannot_be_counted_is_refused_in_the_words_of_the_api() -> None:
    async with served(speaker()) as policy, client(policy) as http:
        answer = await http.post("/v1/messages/count_tokens", json={"messages": []})

    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("template", CALLS)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_calls_between_special_tokens_reach_the_agent_and_the_turns_stay_one_sequence(
    template: str, is_streamed: bool
) -> None:
    answer = ANSWERS.get(template, "5")
    async with served(speaker(CALLS[template], answer), template=template) as policy:
        async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as sdk:
            messages: Any = list(QUESTION)
            for _ in range(2):
                message = await _message(sdk, messages, is_streamed)
                messages.append(message)
                messages += [
                    {"role": "tool", "tool_call_id": call["id"], "content": "5"}
                    for call in message.get("tool_calls") or ()
                ]

    called, _, told = messages[1:]
    (call,) = called["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 2, "b": 3}
    assert call["id"] == ("functions.add:0" if template == "kimi" else "call00001")
    assert not called["content"]
    assert told["content"] == "5"
    assert [turn.output_ids for turn in policy.turns] == [said(CALLS[template], template), said(answer, template)]
    (row,) = merge_turns(policy.turns)
    assert row.token_ids[row.loss_mask].tolist() == [*policy.turns[0].output_ids, *policy.turns[1].output_ids]


async def _message(sdk: openai.AsyncOpenAI, messages: Any, is_streamed: bool) -> dict[str, Any]:
    """Ask once; return what the model said as the SDK writes it."""
    if not is_streamed:
        answer = await sdk.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        return answer.choices[0].message.to_dict()
    async with sdk.chat.completions.stream(model="m", messages=messages, tools=TOOLS) as stream:
        async for _event in stream:
            pass
        return (await stream.get_final_completion()).choices[0].message.to_dict()


async def test_channel_for_the_reader_is_all_that_an_agent_without_tools_is_told() -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>5"
    async with served(speaker(thought), template="harmony") as policy, client(policy) as http:
        answer = (await http.post("/v1/chat/completions", json={"messages": QUESTION})).json()

    assert answer["choices"][0]["message"]["content"] == "5"
    assert policy.turns[0].output_ids[-1] == END
