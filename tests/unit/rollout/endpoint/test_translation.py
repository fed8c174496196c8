"""Requests of the three APIs ask the same of the policy; what cannot be had is refused by its name, or counted.

No field is passed over in silence: each is honoured, a hint that is named in the documents, or heard of.
"""

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.rollout.endpoint import anthropic_messages, openai_chat, openai_completions, openai_responses
from areal_async.rollout.endpoint.calls import ApiExchange, CompletionRequest, Form, ReportedReply, ToolChoice
from areal_async.rollout.endpoint.reading import UNHAD, Unsupported
from areal_async.rollout.endpoint.refusals import Refusal

Parse = Callable[[bytes], ApiExchange]

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


def parse_chat(body: bytes, unsupported: Unsupported | None = None) -> ApiExchange:
    return openai_chat.parse(body, unsupported or Unsupported())


def parse_responses(body: bytes, unsupported: Unsupported | None = None) -> ApiExchange:
    return openai_responses.parse(body, {}, unsupported or Unsupported())


def parse_messages(body: bytes, unsupported: Unsupported | None = None) -> ApiExchange:
    return anthropic_messages.parse(body, unsupported or Unsupported())


APIS: dict[str, tuple[Parse, dict[str, Any]]] = {
    "chat": (parse_chat, CHAT),
    "responses": (parse_responses, RESPONSES),
    "messages": (parse_messages, MESSAGES),
}


def asked(api: str, **fields: Any) -> CompletionRequest:
    """The call of a request with more or other fields."""
    parse, request = APIS[api]
    return parse(json.dumps(request | fields).encode()).call


@pytest.mark.parametrize("api", APIS)
def test_one_conversation_is_the_same_call_in_every_api(api: str) -> None:
    parse, request = APIS[api]

    assert parse(json.dumps(request).encode()).call == CompletionRequest(
        messages=CONVERSATION,
        tools=[{"type": "function", "function": FUNCTION}],
        sampling={"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 7},
        is_streamed=True,
    )


SHOWN = "data:image/png;base64,aa=="
SOURCE = {"type": "base64", "media_type": "image/png", "data": "aa=="}
SEEN_CONVERSATION = [
    {"role": "user", "content": [
        {"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": SHOWN}}]},
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "c1", "name": "add", "content": [
        {"type": "image_url", "image_url": {"url": SHOWN}}, {"type": "text", "text": "closer"}]},
]  # fmt: skip
SEEN: dict[str, dict[str, Any]] = {
    "chat": {"messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "What is it?"},
            {"type": "image_url", "image_url": {"url": SHOWN, "detail": "low"}}]},
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "c1", "content": [
            {"type": "image_url", "image_url": {"url": SHOWN}}, {"type": "text", "text": "closer"}]},
    ]},
    "responses": {"instructions": None, "input": [
        {"role": "user", "content": [
            {"type": "input_text", "text": "What is it?"},
            {"type": "input_image", "image_url": SHOWN, "detail": "auto"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":2,"b":3}'},
        {"type": "function_call_output", "call_id": "c1", "output": [
            {"type": "input_image", "image_url": SHOWN}, {"type": "input_text", "text": "closer"}]},
    ]},
    "messages": {"system": None, "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "What is it?"},
            {"type": "image", "source": SOURCE, "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 2, "b": 3}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [
            {"type": "image", "source": SOURCE}, {"type": "text", "text": "closer"}]}]},
    ]},
}  # fmt: skip


@pytest.mark.parametrize("api", APIS)
def test_images_of_a_question_and_of_a_result_are_the_same_call_in_every_api(api: str) -> None:
    assert asked(api, **SEEN[api]).messages == SEEN_CONVERSATION


def test_chat_takes_several_replies_stop_strings_and_logprobs() -> None:
    call = asked("chat", n=3, stop="x", logprobs=True, top_logprobs=5, tool_choice="none")

    assert (call.n, call.stop, call.wants_logprobs, call.num_top_logprobs, call.tools) == (3, ("x",), True, 5, [])


ADD, ONE, MANY = "add", ToolChoice(is_required=True, names=("add",), is_single=True), ToolChoice(is_required=True)
CHOICES: dict[str, list[tuple[dict[str, Any], ToolChoice]]] = {
    "chat": [
        ({"tool_choice": "required"}, MANY),
        ({"tool_choice": {"type": "function", "function": {"name": ADD}}}, ONE),
        ({"parallel_tool_calls": False}, ToolChoice(is_single=True)),
        ({"parallel_tool_calls": True}, ToolChoice()),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ToolChoice(is_required=True, is_single=True)),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": ADD}}]},
                }
            },
            ToolChoice(is_required=True, names=(ADD,)),
        ),
    ],
    "responses": [
        ({"tool_choice": "required"}, MANY),
        ({"tool_choice": {"type": "function", "name": ADD}}, ONE),
        ({"parallel_tool_calls": False}, ToolChoice(is_single=True)),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": ADD}]}},
            ToolChoice(names=(ADD,)),
        ),
    ],
    "messages": [
        ({"tool_choice": {"type": "any"}}, MANY),
        ({"tool_choice": {"type": "tool", "name": ADD}}, ONE),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, ToolChoice(is_single=True)),
        (
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
            ToolChoice(is_required=True, is_single=True),
        ),
    ],
}


@pytest.mark.parametrize("api", APIS)
def test_every_api_says_which_calls_an_answer_may_have(api: str) -> None:
    for fields, choice in CHOICES[api]:
        assert asked(api, **fields).choice == choice, fields


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ANY = Form("json_schema", {"type": "object", "additionalProperties": True})
OWN = Form("json_schema", SCHEMA)
FORMS: dict[str, list[tuple[dict[str, Any], Form | None]]] = {
    "chat": [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, ANY),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, OWN),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            Form("structural_tag", {"type": "structural_tag", "format": {"type": "any_text"}}),
        ),
    ],
    "responses": [
        ({"text": {"format": {"type": "json_object"}, "verbosity": "low"}}, ANY),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}}, OWN),
    ],
    "messages": [
        ({"output_format": {"type": "json_schema", "schema": SCHEMA}}, OWN),
        ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}}, OWN),
    ],
}
EXTRA_FORMS: list[tuple[dict[str, Any], Form]] = [
    ({"guided_json": SCHEMA}, OWN),
    ({"guided_json": json.dumps(SCHEMA)}, OWN),
    ({"json_schema": json.dumps(SCHEMA)}, OWN),
    ({"guided_regex": "a+"}, Form("regex", "a+")),
    ({"regex": "a+"}, Form("regex", "a+")),
    ({"ebnf": 'root ::= "a"'}, Form("ebnf", 'root ::= "a"')),
    ({"guided_grammar": 'root ::= "a"'}, Form("ebnf", 'root ::= "a"')),
    ({"guided_choice": ["a.b", "c"]}, Form("regex", "(a\\u002eb)|(c)")),
    ({"guided_choice": ["è 😀\n"]}, Form("regex", "(è\\u0020😀\\u000a)")),
    ({"structured_outputs": {"json": SCHEMA}}, OWN),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, Form("regex", "(yes)|(no)")),
    ({"structured_outputs": {"json_object": True}}, ANY),
    ({"structural_tag": {"format": {}}}, Form("structural_tag", {"format": {}})),
]


@pytest.mark.parametrize("api", APIS)
def test_every_api_says_what_an_answer_has_to_look_like(api: str) -> None:
    for fields, form in FORMS[api] + EXTRA_FORMS:
        assert asked(api, **fields).form == form, fields


@pytest.mark.parametrize("api", APIS)
def test_every_api_takes_what_open_models_servers_take(api: str) -> None:
    fields = {
        "top_k": 5,
        "min_p": 0.1,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"7": -100},
        "min_tokens": 2,
        "stop_token_ids": [3, 4],
        "ignore_eos": False,
    }

    sampling = asked(api, **fields).sampling

    wanted = {name: value for name, value in fields.items() if name not in ("min_tokens", "logit_bias")}
    wanted |= {"min_new_tokens": 2, "logit_bias": {7: -100.0}, "stop_token_ids": (3, 4)}
    assert {name: sampling[name] for name in wanted} == wanted
    assert sampling.keys() - wanted.keys() == {"temperature", "top_p", "max_new_tokens"}


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


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}]}]
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
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"functions": [{}]}, "functions"),
    ({"stream_options": {"x": 1}}, "stream_options.x"),
    ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "size": 9}]}]},
        "messages[0].content[0].size",
    ),
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
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        "input[0].content[0].file_id",
    ),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tool_choice": "required", "tools": None}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "sub"}}, "tool_choice"),
    ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"truncation": "auto"}, "truncation"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"text": {"mode": "x"}}, "text.mode"),
]
MESSAGES_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://a"}}]}]},
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tool_choice": {"type": "any"}, "tools": []}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"output_format": {"type": "xml"}}, "output_format"),
    (
        {"output_format": {"schema": {}}, "output_config": {"format": {"schema": {}}}},
        "output_format",
    ),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"context_management": {"edits": [1]}}, "context_management"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"top_k": 0}, "top_k"),
]
EVERYWHERE_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"top_k": 0}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"frequency_penalty": 3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"the": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": [1]}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": "a", "ebnf": "b"}, "guided_regex"),
    ({"structural_tag": {"begin": "x"}}, "structural_tag"),
    ({"seed": 1}, "seed"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
]
REFUSED = [
    (api, change, param)
    for api, cases in (("chat", CHAT_REFUSED), ("responses", RESPONSES_REFUSED), ("messages", MESSAGES_REFUSED))
    for change, param in cases + EVERYWHERE_REFUSED
]


def test_what_cannot_be_had_is_refused_with_the_name_of_its_field() -> None:
    for api, change, param in REFUSED:
        with pytest.raises(Refusal) as caught:
            asked(api, **change)

        assert caught.value.kind == "bad_request", (api, change)
        assert (caught.value.param or "").startswith(param), (api, change)
        assert caught.value.message.startswith(param)
        assert caught.value.code is not None


def test_codes_are_openai_s_words() -> None:
    for change, code in (
        ({"prompt_logprobs": 1}, "unknown_parameter"),
        ({"seed": 1}, "unsupported_parameter"),
        ({"temperature": "hot"}, "invalid_type"),
        ({"temperature": -1}, "invalid_value"),
        ({"tools": [{"type": "function"}]}, "missing_required_parameter"),
    ):
        with pytest.raises(Refusal) as caught:
            asked("chat", **change)
        assert caught.value.code == code, change


UNHEEDED: dict[str, Any] = {"seed": 1, "echo": True, "new_thing": 5}
NEUTRAL: dict[str, Any] = {"seed": None, "best_of": 1, "echo": False, "functions": [], "new_thing": None}


@pytest.mark.parametrize("api", APIS)
def test_what_is_not_refused_is_counted_and_told_once(api: str) -> None:
    parse, request = APIS[api]
    unsupported = Unsupported("warn")
    messages = {"responses": {"input": request.get("input", [])}}.get(api, {"messages": request.get("messages", [])})
    ((name, items),) = messages.items()
    strange = {name: [{**items[0], "mood": "good"}, {**items[0], "mood": "bad"}, *items[1:]]}

    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            parse(json.dumps(request | UNHEEDED | strange).encode(), unsupported)
            parse(json.dumps(request | NEUTRAL).encode(), unsupported)

    assert unsupported.counts == {"seed": 2, "echo": 2, "new_thing": 2, f"{name}[].mood": 4}
    assert sorted(line["field"] for line in logs) == sorted(unsupported.counts)


def test_names_that_a_program_makes_up_are_bounded() -> None:
    unsupported = Unsupported("warn")
    for number in range(1000):
        parse_chat(json.dumps(CHAT | {f"{'x' * 500}{number}": 1, f"y{number}": 1}).encode(), unsupported)

    assert len(unsupported.counts) < 300
    assert max(map(len, unsupported.counts)) < 100
    assert unsupported.counts.total() == 2000


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


SAID = ReportedReply(
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


README = Path(openai_chat.__file__).with_name("README.md")
COLUMNS = {
    "chat": openai_chat._ChatRequest,
    "responses": openai_responses._ResponsesRequest,
    "messages": anthropic_messages._MessagesRequest,
    "completions": openai_completions._CompletionsRequest,
}


def table_below(mark: str) -> list[list[str]]:
    """Return the cells of the table of the documents behind a comment, without its head."""
    _, _, text = README.read_text(encoding="utf-8").partition(f"<!-- {mark} -->\n")
    lines = itertools.takewhile(lambda line: line.startswith("|"), text.splitlines())
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][2:]


def test_documents_say_of_every_field_what_becomes_of_it() -> None:
    told: dict[str, dict[str, str]] = {api: {} for api in COLUMNS}
    for names, *cells in table_below("fields"):
        for api, cell in zip(COLUMNS, cells, strict=False):
            if cell:
                told[api] |= dict.fromkeys(re.findall(r"`(\w+)`", names), cell)

    for api, request in COLUMNS.items():
        honoured = [field.encode_name for field in msgspec.structs.fields(request)]
        assert told[api] == dict.fromkeys(honoured, "honoured") | dict.fromkeys(request.HINTS, "hint")
    assert {name for names, _ in table_below("refused") for name in re.findall(r"`(\w+)`", names)} == UNHAD.keys()
