"""Requests of the three APIs ask the same of the policy, and what cannot be had is refused with the field's name."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.rollout.endpoint import anthropic_messages, openai_chat, openai_responses
from areal_async.rollout.endpoint.calls import Call, Exchange, Refusal, Said

Parse = Callable[[bytes], Exchange]

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Add.", "parameters": PARAMETERS}
CALLED = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":2,"b":3}'}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 and 3?\nQuick."},
    {"role": "assistant", "content": "I add.", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "5"},
    {"role": "user", "content": "So?"},
]
CHAT = {
    "model": "m",
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "2 and 3?"}, {"type": "text", "text": "Quick."}]},
        {
            "role": "assistant",
            "content": "I add.",
            "refusal": None,
            "audio": None,
            "tool_calls": [{**CALLED, "index": 0}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "5"}]},
        {"role": "user", "content": "So?"},
    ],
    "tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}],
    "tool_choice": "auto",
    "temperature": 0.5,
    "top_p": 0.9,
    "max_completion_tokens": 7,
    "stream": True,
    "seed": 3,
    "user": "me",
}
RESPONSES = {
    "model": "m",
    "instructions": "Be brief.",
    "input": [
        {"role": "user", "content": [
            {"type": "input_text", "text": "2 and 3?"}, {"type": "input_text", "text": "Quick."}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "message", "role": "assistant", "id": "msg_x", "status": "completed",
         "content": [{"type": "output_text", "text": "I add.", "annotations": []}]},
        {"type": "function_call", "id": "fc_x_0", "call_id": "c1", "name": "add", "arguments": '{"a":2,"b":3}'},
        {"type": "function_call_output", "call_id": "c1", "output": "5"},
        {"role": "user", "content": "So?"},
    ],
    "tools": [{"type": "function", "strict": True, **FUNCTION}],
    "temperature": 0.5,
    "top_p": 0.9,
    "max_output_tokens": 7,
    "stream": True,
}  # fmt: skip
MESSAGES = {
    "model": "m",
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "2 and 3?"}, {"type": "text", "text": "Quick."}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "text", "text": "I add."},
            {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 2, "b": 3}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "5"}]},
            {"type": "text", "text": "So?"}]},
    ],
    "tools": [{"name": "add", "description": "Add.", "input_schema": PARAMETERS}],
    "tool_choice": {"type": "auto"},
    "temperature": 0.5,
    "top_p": 0.9,
    "max_tokens": 7,
    "stream": True,
}  # fmt: skip


def parse_responses(body: bytes) -> Exchange:
    return openai_responses.parse(body, {})


APIS: dict[str, tuple[Parse, dict[str, Any]]] = {
    "chat": (openai_chat.parse, CHAT),
    "responses": (parse_responses, RESPONSES),
    "messages": (anthropic_messages.parse, MESSAGES),
}


@pytest.mark.parametrize("api", APIS)
def test_one_conversation_is_the_same_call_in_every_api(api: str) -> None:
    parse, request = APIS[api]

    assert parse(json.dumps(request).encode()).call == Call(
        messages=CONVERSATION,
        tools=[{"type": "function", "function": FUNCTION}],
        sampling={"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 7},
        is_streamed=True,
    )


def test_chat_takes_several_replies_stop_strings_and_logprobs() -> None:
    call = openai_chat.parse(
        json.dumps(CHAT | {"n": 3, "stop": "x", "logprobs": True, "tool_choice": "none"}).encode()
    ).call

    assert (call.n, call.stop, call.wants_logprobs, call.tools) == (3, ("x",), True, [])


def test_items_of_different_replies_stay_apart() -> None:
    items = [
        {"type": "message", "role": "assistant", "id": "msg_x", "content": "One."},
        {"type": "function_call", "id": "fc_y_0", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call", "id": "fc_y_1", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call", "call_id": "c3", "name": "add", "arguments": "{}"},
        {"role": "user", "content": "x"},
        {"type": "function_call", "call_id": "c4", "name": "add", "arguments": "{}"},
    ]

    messages = parse_responses(json.dumps({"input": items}).encode()).call.messages

    ids = [[call["id"] for call in message.get("tool_calls", [])] for message in messages]
    assert ids == [[], ["c1", "c2", "c3"], [], ["c4"]]


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
CHAT_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "5"}]}, "messages[0].tool_call_id"),
    ({"messages": IMAGE}, "messages[0].content[0]"),
    ({"n": 0}, "n"),
    ({"n": 100000}, "n"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop": ["a", ""]}, "stop"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "no name"}}]}, "tools[0].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
    ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"frequency_penalty": 0.5}, "frequency_penalty"),
    ({"functions": [{}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"stream": "yes"}, "stream"),
]
RESPONSES_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    ({"input": [{"type": "function_call", "name": "add"}]}, "input[0]"),
    ({"input": [{"type": "function_call_output", "output": "5"}]}, "input[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "add"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"top_logprobs": 2}, "top_logprobs"),
]
MESSAGES_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice"),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_choice.disable_parallel_tool_use"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"top_k": 0}, "top_k"),
]
REFUSED = [
    (api, change, param)
    for api, cases in (("chat", CHAT_REFUSED), ("responses", RESPONSES_REFUSED), ("messages", MESSAGES_REFUSED))
    for change, param in cases
]


@pytest.mark.parametrize(("api", "change", "param"), REFUSED)
def test_what_cannot_be_had_is_refused_with_the_name_of_its_field(api: str, change: dict[str, Any], param: str) -> None:
    parse, request = APIS[api]

    with pytest.raises(Refusal) as caught:
        parse(json.dumps(request | change).encode())

    assert caught.value.kind == "bad_request"
    assert (caught.value.param or "").startswith(param)
    assert caught.value.message.startswith(param)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "id", "x"]), inner),
    max_leaves=6,
)


def changed(value: Any, path: list[int], new: Any) -> Any:
    """Put something else into one place of a request."""
    if not path or not isinstance(value, (dict, list)) or not value:
        return new
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = keys[path[0] % len(keys)]
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = changed(value[key], path[1:], new)
    return copy


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(APIS)), st.lists(st.integers(0, 30), min_size=1, max_size=6), JSON)
def test_malformed_request_is_refused_and_nothing_else(api: str, path: list[int], new: Any) -> None:
    parse, request = APIS[api]
    try:
        exchange = parse(json.dumps(changed(request, path, new)).encode())
    except Refusal:
        pass
    else:
        msgspec.json.encode(exchange.answer([SAID]))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b"\xff", b'{"a":' * 10_000, b'{"messages":"\\ud800"}'])
@pytest.mark.parametrize("api", APIS)
def test_what_is_no_request_is_refused(api: str, body: bytes) -> None:
    with pytest.raises(Refusal):
        APIS[api][0](body)


SAID = Said(
    content="I add.",
    tool_calls=[CALLED],
    finish="tool_calls",
    stop_sequence=None,
    num_prompt_tokens=5,
    num_output_tokens=4,
    logprobs=None,
)


@pytest.mark.parametrize("api", APIS)
def test_whole_answer_and_its_stream_tell_the_same_when_they_come_back(api: str) -> None:
    """What an answer holds, sent back as it is, is the message that the memory knows."""
    parse, request = APIS[api]
    exchange = parse(json.dumps(request).encode())
    answer = json.loads(msgspec.json.encode(exchange.answer([SAID])))

    back: dict[str, Any]
    match api:
        case "chat":
            back = request | {"messages": [*request["messages"], answer["choices"][0]["message"]]}
        case "responses":
            back = request | {"input": [*request["input"], *answer["output"]]}
        case _:
            said = {"role": "assistant", "content": answer["content"]}
            back = request | {"messages": [*request["messages"], said, {"role": "user", "content": "x"}]}

    messages = parse(json.dumps(back).encode()).call.messages
    assert messages[len(CONVERSATION)] == SAID.message
