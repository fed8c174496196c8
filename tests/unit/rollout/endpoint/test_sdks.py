"""The official clients talk to a policy as they do to their own services, and the policy keeps every token."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest

from areal_async.inference.call_parser import FoundCall, FoundCalls
from areal_async.inference.pool import ServerHandle
from areal_async.rollout.endpoint.policy import ServedPolicy
from areal_async.rollout.policy.merge import merge_turns
from tests.unit.rollout.byte_model import ScriptedModel
from tests.unit.rollout.endpoint.scripted_endpoint import CALL, END, PARAMETERS, QUESTION, said, served, speaker

pytestmark = pytest.mark.anyio

CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
RESPONSES_TOOLS: Any = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}]
MESSAGES_TOOLS: Any = [{"name": "add", "input_schema": PARAMETERS}]
QUESTIONS: Any = QUESTION


@asynccontextmanager
async def openai_client(policy: ServedPolicy) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
        yield client


@asynccontextmanager
async def anthropic_client(policy: ServedPolicy) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=policy.base_url, api_key=policy.api_key) as client:
        yield client


def assert_one_sequence(policy: ServedPolicy, *texts: str) -> None:
    """Everything that was said is trained, as it was said, and in one sequence."""
    (row,) = merge_turns(policy.turns)
    assert row.token_ids[row.loss_mask].tolist() == [token for text in texts for token in said(text)]
    assert policy.record.num_breaks == 0


# OpenAI Chat Completions


async def test_chat_answers_with_usage_logprobs_and_several_choices() -> None:
    async with served(speaker("It is 5.", "5")) as policy, openai_client(policy) as client:
        completion = await client.chat.completions.create(model="m", messages=QUESTIONS, n=2, logprobs=True)

    assert [choice.message.content for choice in completion.choices] == ["It is 5.", "5"]
    assert [choice.finish_reason for choice in completion.choices] == ["stop", "stop"]
    for choice, turn in zip(completion.choices, policy.turns, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [item.logprob for item in choice.logprobs.content] == turn.logprobs
        assert "".join(item.token for item in choice.logprobs.content) == f"{choice.message.content}<|im_end|>"
    usage = completion.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(policy.turns[0].prompt_ids), 9 + 2)


async def test_chat_ends_before_a_stop_string_and_goes_on_from_the_tokens_that_hold_it() -> None:
    async with served(speaker("2+3=5\nObs", "5")) as policy, openai_client(policy) as client:
        messages: Any = list(QUESTION)
        for stop in ("\nObs", None):
            completion = await client.chat.completions.create(model="m", messages=messages, stop=stop)
            messages += [completion.choices[0].message, {"role": "user", "content": "so?"}]

    assert messages[1].content == "2+3=5"
    assert_one_sequence(policy, "2+3=5\nObs", "5")


async def test_chat_says_that_a_reply_was_cut_short() -> None:
    model = speaker("It is")
    model.finish_reason = "length"
    async with served(model) as policy, openai_client(policy) as client:
        completion = await client.chat.completions.create(model="m", messages=QUESTIONS)

    assert completion.choices[0].finish_reason == "length"


@pytest.mark.parametrize("text", [f"I add.\n{CALL}", f"{CALL}{CALL.replace('2', '7')}", f"I {CALL} add."])
async def test_chat_streams_tool_calls_in_three_turns(text: str) -> None:
    async with served(speaker(text, CALL, "It is 5.")) as policy, openai_client(policy) as client:
        messages: Any = list(QUESTION)
        for _ in range(3):
            async with client.chat.completions.stream(model="m", messages=messages, tools=CHAT_TOOLS) as stream:
                async for _event in stream:
                    pass
                choice = (await stream.get_final_completion()).choices[0]
            messages.append(choice.message.to_dict())
            for call in choice.message.tool_calls or []:
                assert choice.finish_reason == "tool_calls"
                numbers = json.loads(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(sum(numbers.values()))})

    assert messages[-1]["content"] == "It is 5."
    assert_one_sequence(policy, text, CALL, "It is 5.")


class AtSigns:
    """A server's parser of another way of writing calls."""

    async def find(
        self, text: str, tools: Sequence[Mapping[str, Any]], *, preferred: ServerHandle | None = None
    ) -> FoundCalls:
        content, found, arguments = text.partition("@add")
        return FoundCalls(content, [FoundCall("add", arguments)] if found else [])


async def test_chat_streams_nothing_that_the_servers_parser_may_take_for_a_call() -> None:
    text = 'I add. @add{"a":2,"b":3}'
    async with served(speaker(text), call_parser=AtSigns()) as policy, openai_client(policy) as client:
        async with client.chat.completions.stream(model="m", messages=QUESTIONS, tools=CHAT_TOOLS) as stream:
            told = [event.delta async for event in stream if event.type == "content.delta"]
            choice = (await stream.get_final_completion()).choices[0]

    assert "".join(told) == choice.message.content == "I add. "
    assert choice.message.tool_calls is not None
    assert [call.function.arguments for call in choice.message.tool_calls] == ['{"a":2,"b":3}']
    assert_one_sequence(policy, text)


async def test_chat_streams_several_choices_with_logprobs_and_usage() -> None:
    async with served(speaker("Yes", "No")) as policy, openai_client(policy) as client:
        stream = await client.chat.completions.create(
            model="m", messages=QUESTIONS, n=2, logprobs=True, stream=True, stream_options={"include_usage": True}
        )
        texts, numbers, usage = ["", ""], [0, 0], None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                numbers[choice.index] += len((choice.logprobs and choice.logprobs.content) or [])

    assert texts == ["Yes", "No"]
    assert numbers == [4, 3]
    assert usage is not None
    assert usage.completion_tokens == 7


async def test_chat_tells_what_has_the_form_and_not_the_thought_before_it() -> None:
    text = 'It is 5.</think>\n\n{"sum": 5}'
    model = ScriptedModel(*(said(text, "thinking") for _ in range(2)))
    wanted: Any = {"messages": QUESTIONS, "response_format": {"type": "json_object"}, "tools": CHAT_TOOLS}
    async with served(model, template="thinking") as policy, openai_client(policy) as client:
        completion = await client.chat.completions.create(model="m", **wanted)
        async with client.chat.completions.stream(model="m", **wanted) as stream:
            pieces = [event.delta async for event in stream if event.type == "content.delta"]

        assert completion.choices[0].message.content == "".join(pieces) == '{"sum": 5}'
        assert [turn.output_ids for turn in policy.turns] == [said(text, "thinking")] * 2


async def test_errors_are_the_sdk_s_own() -> None:
    async with served(speaker()) as policy, openai_client(policy) as client, anthropic_client(policy) as other:
        with pytest.raises(openai.BadRequestError, match=r"seed: .*on_unsupported") as caught:
            await client.chat.completions.create(model="m", messages=QUESTIONS, seed=1)
        about = (caught.value.param, caught.value.type, caught.value.code)
        assert about == ("seed", "invalid_request_error", "unsupported_parameter")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="m", messages=QUESTIONS, extra_body={"prompt_logprobs": 1})
        assert (caught.value.param, caught.value.code) == ("prompt_logprobs", "unknown_parameter")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="m", input="x", previous_response_id="resp_0")
        assert caught.value.code == "previous_response_not_found"
        with pytest.raises(anthropic.BadRequestError, match="seed: "):
            await other.messages.create(model="m", max_tokens=9, messages=QUESTIONS, extra_body={"seed": 1})
        policy.close()
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
        with pytest.raises(anthropic.AuthenticationError):
            await other.messages.create(model="m", max_tokens=9, messages=QUESTIONS)


# OpenAI Responses


@pytest.mark.parametrize("is_stateful", [False, True])
async def test_responses_stream_tool_calls_in_three_turns(is_stateful: bool) -> None:
    async with served(speaker(f"I add.\n{CALL}", CALL, "It is 5.")) as policy, openai_client(policy) as client:
        items: Any = list(QUESTION)
        previous: Any = openai.omit
        for _ in range(3):
            async with client.responses.stream(
                model="m", input=items, tools=RESPONSES_TOOLS, instructions="Be brief.", previous_response_id=previous
            ) as stream:
                async for _event in stream:
                    pass
                response = await stream.get_final_response()
            results = [
                {"type": "function_call_output", "call_id": item.call_id, "output": "5"}
                for item in response.output
                if item.type == "function_call"
            ]
            if is_stateful:
                items, previous = results, response.id
            else:
                items = [*items, *(item.to_dict() for item in response.output), *results]

    assert (response.output_text, response.status) == ("It is 5.", "completed")
    assert response.usage is not None
    assert response.usage.output_tokens == 9
    assert_one_sequence(policy, f"I add.\n{CALL}", CALL, "It is 5.")


async def test_responses_answer_whole_with_logprobs_and_say_that_they_were_cut_short() -> None:
    model = speaker("It is")
    model.finish_reason = "length"
    async with served(model) as policy, openai_client(policy) as client:
        response = await client.responses.create(model="m", input="x", include=["message.output_text.logprobs"])

    (item,) = response.output
    assert item.type == "message"
    (part,) = item.content
    assert part.type == "output_text"
    assert [one.logprob for one in part.logprobs or []] == policy.turns[0].logprobs
    assert response.incomplete_details is not None
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_stream_that_never_began_is_an_error_with_a_status() -> None:
    async with served(speaker()) as policy, openai_client(policy) as client:
        with pytest.raises(openai.APIStatusError):  # the script has no answer: nothing was begun
            await client.responses.create(model="m", input="x", stream=True)


# Anthropic Messages


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_messages_call_tools_in_three_turns(is_streamed: bool) -> None:
    async with served(speaker(f"I add.\n{CALL}", CALL, "It is 5.")) as policy, anthropic_client(policy) as client:
        messages: Any = list(QUESTION)
        for _ in range(3):
            about: Any = {"model": "m", "max_tokens": 50, "messages": messages, "tools": MESSAGES_TOOLS}
            if is_streamed:
                async with client.messages.stream(**about) as stream:
                    async for _event in stream:
                        pass
                    message = await stream.get_final_message()
            else:
                message = await client.messages.create(**about)
            messages.append({"role": "assistant", "content": message.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": str(sum(block.input.values()))}
                for block in message.content
                if block.type == "tool_use"
            ]
            assert message.stop_reason == ("tool_use" if results else "end_turn")
            messages += [{"role": "user", "content": results}] if results else []
            assert message.usage.input_tokens == len(policy.turns[-1].prompt_ids)
            assert message.usage.output_tokens == len(policy.turns[-1].output_ids)

    assert [block.text for block in message.content if block.type == "text"] == ["It is 5."]
    assert_one_sequence(policy, f"I add.\n{CALL}", CALL, "It is 5.")


async def test_messages_tell_the_stop_sequence_and_the_lack_of_tokens() -> None:
    cut = speaker("It is")
    cut.finish_reason = "length"
    async with served(speaker("2+3=5\nObs")) as policy, anthropic_client(policy) as client:
        message = await client.messages.create(model="m", max_tokens=50, messages=QUESTIONS, stop_sequences=["\nObs"])
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "\nObs")
        assert [block.text for block in message.content if block.type == "text"] == ["2+3=5"]
    async with served(cut) as policy, anthropic_client(policy) as client:
        message = await client.messages.create(model="m", max_tokens=50, messages=QUESTIONS)
        assert message.stop_reason == "max_tokens"


async def test_silent_reply_is_a_reply() -> None:
    async with (
        served(speaker("", "", "")) as policy,
        openai_client(policy) as client,
        anthropic_client(policy) as other,
    ):
        completion = await client.chat.completions.create(model="m", messages=QUESTIONS)
        response = await client.responses.create(model="m", input=QUESTIONS)
        messages: Any = [*QUESTION, {"role": "assistant", "content": ""}, {"role": "user", "content": "x"}]
        message = await other.messages.create(model="m", max_tokens=9, messages=messages)

    assert (completion.choices[0].message.content, response.output_text, message.content) == ("", "", [])
    assert [turn.output_ids for turn in policy.turns] == [[END]] * 3
    assert len(merge_turns(policy.turns)) == 2
