"""The calculator works sums out exactly and nothing else, and a conversation with it is scored by its last answer."""

from contextlib import suppress
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.config.settings import SamplingSettings
from areal_async.errors import ToolError
from areal_async.protocol.types import Prompt
from areal_async.rollout.policy.policy import RecordingPolicy
from tests.unit.rollout.byte_model import ScriptedModel
from tests.unit.rollout.chat_templates import codec_with
from workflows.calculator import calculate, calculator, mental

pytestmark = pytest.mark.anyio

CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "12*12"}}</tool_call>'
PROMPT = Prompt(epoch=0, index=0, row={"question": "What is 12 times 12?", "answer": "#### 144"})


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("12*12", "144"),
        (" 1 + 2 * 3 ", "7"),
        ("(1+2)*3", "9"),
        ("-5+2", "-3"),
        ("0.1+0.2", "0.3"),
        ("1/4", "0.25"),
        ("6/3", "2"),
        ("1e2", "100"),
        ("999999999999*999999999999", "999999999998000000000001"),
    ],
)
async def test_sum_is_worked_out_exactly(expression: str, result: str) -> None:
    assert await calculate(expression) == result


NO_SUMS = ["", "12 and 12", "2**9", "a+1", "True+1", "'a'*9", "1e999+1", "f(1)", "1,2", "1//2", "9" * 101, "1\0"]
NO_SUMS += ["1e308*" * 15 + "1", "1e308*1e308+0.5"]


@pytest.mark.parametrize("expression", NO_SUMS)
async def test_what_is_no_sum_is_told_so(expression: str) -> None:
    with pytest.raises(ToolError, match="cannot work out|need at most 100"):
        await calculate(expression)


async def test_nothing_is_divided_by_nothing() -> None:
    with pytest.raises(ToolError, match="divided by 0"):
        await calculate("1/(2-2)")


@given(st.text(max_size=120))
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_any_text_ends_in_a_number_or_in_words_for_the_model(text: str) -> None:
    with suppress(ToolError):
        Fraction(await calculate(text))


async def play(workflow: Any, *said: str) -> tuple[float, RecordingPolicy]:
    codec = codec_with("hermes")
    model = ScriptedModel(*([*codec.encode(text), codec.stop_token_ids[0]] for text in said))
    policy = RecordingPolicy(model, codec, SamplingSettings(), name="uid")
    return await workflow(PROMPT, policy), policy


@pytest.mark.parametrize(
    ("said", "reward", "num_errors"),
    [
        ([CALL, "#### 144"], 1.0, 0),
        ([CALL, "#### 143"], 0.0, 0),
        (["<tool_call>12*12</tool_call>", CALL, "#### 144"], 1.0, 1),
        (["#### 144"], 1.0, 0),
        ([CALL] * 4, 0.0, 0),
    ],
)
async def test_conversation_is_scored_by_its_last_answer(said: list[str], reward: float, num_errors: int) -> None:
    scored, policy = await play(calculator, *said)

    assert (scored, policy.record.num_tool_errors, policy.record.num_breaks) == (reward, num_errors, 0)


async def test_without_the_tool_a_call_answers_nothing() -> None:
    assert (await play(mental, "#### 144"))[0] == 1.0
    assert (await play(mental, CALL))[0] == 0.0
