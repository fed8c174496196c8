"""The policy records every call token for token; what the model said is never tokenized again."""

import pytest

from areal_async.errors import WorkflowError
from areal_async.rollout.merge import merge_turns
from areal_async.rollout.policy import RecordingPolicy
from areal_async.settings import SamplingSettings
from tests.unit.rollout.byte_model import END, ScriptedModel, codec

pytestmark = pytest.mark.anyio

QUESTION = [{"role": "user", "content": "q"}]


def policy_of(model: ScriptedModel) -> RecordingPolicy:
    return RecordingPolicy(model, codec(), SamplingSettings(max_new_tokens=8, top_p=0.9), name="uid")


async def test_chat_renders_the_template_and_returns_the_text_without_special_tokens() -> None:
    model = ScriptedModel([104, 105, END])

    reply = await policy_of(model).chat(QUESTION)

    (prompt_ids, params) = model.calls[0]
    assert prompt_ids == [*b"user:q", END, *b"assistant:"]
    assert params == {
        "temperature": 1.0, "top_p": 0.9, "top_k": -1, "max_new_tokens": 8, "ignore_eos": False,
        "stop_token_ids": [END],
    }  # fmt: skip
    assert (reply.text, reply.message) == ("hi", {"role": "assistant", "content": "hi"})
    assert (reply.token_ids, reply.logprobs, reply.finish_reason) == ([104, 105, END], [-1.0] * 3, "stop")


async def test_conversation_goes_on_from_the_tokens_that_were_said() -> None:
    said = [201, 105, END]  # decodes to "ai", which would be tokenized as [97, 105]
    policy = policy_of(model := ScriptedModel(said, [98, END], [99, END]))

    first = await policy.chat(QUESTION)
    messages = [*QUESTION, first.message, {"role": "user", "content": "more"}]
    second = await policy.chat(messages)
    await policy.chat([*messages, second.message, {"role": "user", "content": "last"}])

    assert model.calls[1][0] == [*model.calls[0][0], *said, *b"user:more", END, *b"assistant:"]
    assert len(merge_turns(policy.turns)) == 1
    assert model.preferred == [None, model.server, model.server]


async def test_truncated_reply_gets_the_end_of_turn_that_the_template_writes() -> None:
    policy = policy_of(model := ScriptedModel([98], [99, END]))

    reply = await policy.chat(QUESTION)
    await policy.chat([*QUESTION, reply.message, {"role": "user", "content": "x"}])

    assert model.calls[1][0] == [*model.calls[0][0], 98, END, *b"user:x", END, *b"assistant:"]


async def test_conversation_that_was_changed_is_tokenized_anew() -> None:
    policy = policy_of(model := ScriptedModel([201, END], [99, END]))

    await policy.chat(QUESTION)
    await policy.chat([*QUESTION, {"role": "assistant", "content": "b"}, {"role": "user", "content": "x"}])

    assert model.calls[1][0] == [*b"user:q", END, *b"assistant:b", END, *b"user:x", END, *b"assistant:"]
    assert len(merge_turns(policy.turns)) == 2


async def test_complete_takes_text_or_token_ids() -> None:
    policy = policy_of(model := ScriptedModel([98, END], [99, END]))

    await policy.complete("ab")
    await policy.complete([7, 8])

    assert [prompt_ids for prompt_ids, _ in model.calls] == [[0, 97, 98], [7, 8]]


async def test_sampling_is_overridden_by_name_for_one_call() -> None:
    policy = policy_of(model := ScriptedModel([98], [98]))

    await policy.chat(QUESTION, temperature=0.0, max_new_tokens=3, stop=["\n"], ignore_eos=True)
    await policy.chat(QUESTION)

    assert model.calls[0][1] == {
        "temperature": 0.0, "top_p": 0.9, "top_k": -1, "max_new_tokens": 3, "stop": ["\n"],
        "ignore_eos": True, "stop_token_ids": [],
    }  # fmt: skip
    assert model.calls[1][1]["temperature"] == 1.0


@pytest.mark.parametrize("bad", [{"temprature": 0.5}, {"temperature": -1}, {"max_new_tokens": 0}])
async def test_unknown_or_impossible_sampling_is_refused_before_a_call(bad: dict[str, float]) -> None:
    policy = policy_of(model := ScriptedModel([98]))

    with pytest.raises(WorkflowError, match=f"bad sampling .*{next(iter(bad))}.*need any of temperature, top_p"):
        await policy.chat(QUESTION, **bad)

    assert not model.calls
