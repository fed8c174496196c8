"""JSON of millions of values is refused before a decoder keeps the interpreter to itself for seconds; texts are not."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.rollout.policy.json_size import MAX_JSON_VALUES, has_too_many_values
from areal_async.rollout.policy.messages import for_template
from tests.unit.rollout.endpoint.scripted_endpoint import QUESTION, chat, client, served, speaker

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text() | st.text(alphabet='\\"[{,'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a\\"[{,'), inner),
)


def count(value: Any) -> int:
    if isinstance(value, str):
        return 1
    if not isinstance(value, list | dict):
        return 0
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    return 1 + max(len(value) - 1, 0) + sum(map(count, inner))


@given(JSON)
def test_values_are_counted_as_a_decoder_would_meet_them(value: Any) -> None:
    num_values = count(value)
    for text in (msgspec.json.encode(value), json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert not has_too_many_values(text, most=num_values)
        assert num_values == 0 or has_too_many_values(text, most=num_values - 1)


@pytest.mark.anyio
@pytest.mark.parametrize("part", ["[],", "{},", '"",', "1,"])
async def test_request_of_too_many_values_is_refused_unread(part: str) -> None:
    many = part * (MAX_JSON_VALUES + 1)
    body = f'{{"model":"m","messages":{json.dumps(QUESTION)},"metadata":[{many}1]}}'
    async with served(speaker("hi", "ho")) as policy, client(policy) as http:
        response = await http.post("/chat/completions", content=body)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
        for schema in (f"[{many}1]", f'{{"enum":[{many}1]}}'):
            response = await http.post("/chat/completions", json=chat(json_schema=schema))
            assert (response.status_code, response.json()["error"]["param"]) == (400, "json_schema")

        written = [{"role": "user", "content": f'{body}\\", [{{'}]
        assert (await http.post("/chat/completions", json=chat(messages=written))).status_code == 200
        called = {"role": "assistant", "content": "", "tool_calls": [call_with(f'{{"a":[{many}1]}}')]}
        response = await http.post("/chat/completions", json=chat(messages=[*QUESTION, called, *QUESTION]))
        assert response.status_code == 200


def call_with(arguments: str) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}


def test_arguments_of_too_many_values_stay_a_text_for_the_template() -> None:
    for num_values, kind in ((1, dict), (MAX_JSON_VALUES, str)):
        message = for_template({"role": "assistant", "tool_calls": [call_with(f'{{"a":[{"[]," * num_values}1]}}')]})
        assert isinstance(message["tool_calls"][0]["function"]["arguments"], kind)
