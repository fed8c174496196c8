"""The policy records every call token for token; what the model said is never tokenized again."""

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import pytest

from areal_async.api import Reply
from areal_async.config.settings import SamplingSettings
from areal_async.errors import ContextFull, GenerationError, WorkflowError
from areal_async.inference.call_parser import FoundCall, FoundCalls
from areal_async.inference.pool import ServerHandle
from areal_async.rollout.policy.merge import merge_turns
from areal_async.rollout.policy.policy import RecordingPolicy
from areal_async.rollout.policy.stream import RecordingStream, TakeTokens
from tests.unit.rollout.byte_model import END, ByteTokenizer, ScriptedModel, codec
from tests.unit.rollout.chat_templates import codec_with

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


async def test_a_prompt_that_fills_a_packed_row_is_refused_and_one_that_nearly_does_is_answered_as_far() -> None:
    policy = policy_of(model := ScriptedModel([98, END], [98], [99, END]))
    prompt_ids = list(range(20))
    policy.record.max_sequence_tokens = 20

    with pytest.raises(ContextFull, match=r"got 20 tokens, .* length of 20 tokens \(trainer.token_budget\)"):
        await policy.complete(prompt_ids)
    with pytest.raises(ContextFull, match="got 36 tokens"):
        await policy.chat([{"role": "user", "content": "q" * 20}])
    with pytest.raises(ContextFull, match="got 36 tokens"):
        async for _ in policy.stream([{"role": "user", "content": "q" * 20}]):
            pass
    assert model.calls == []

    assert (await policy.complete(prompt_ids[1:])).token_ids == [98, END]
    async for _ in policy.stream([{"role": "user", "content": "q"}]):
        pass
    assert (await policy.complete(prompt_ids[:4])).token_ids == [99, END]
    assert [params["max_new_tokens"] for _, params in model.calls] == [1, 3, 8]


async def test_act_that_outgrows_the_context_returns_what_there_is() -> None:
    def add(left: int, right: int) -> int:
        return left + right

    call = [*b'{"name": "add", "arguments": {"left": 2, "right": 3}}', END]
    policy = policy_of(ScriptedModel(call, call))
    policy.record.max_sequence_tokens = 75

    done = await policy.act(QUESTION, [add])
    assert (done.is_finished, len(done.replies), [one.text for one in done.results]) == (False, 1, ["5"])
    assert done.messages[-1]["role"] == "tool"

    policy.record.max_sequence_tokens = 10
    with pytest.raises(ContextFull):
        await policy.act(QUESTION, [add])


async def test_call_within_a_thought_that_the_template_began_is_not_run() -> None:
    ran: list[int] = []

    def note(number: int) -> None:
        ran.append(number)

    call = '<tool_call>{"name": "note", "arguments": {"number": %d}}</tool_call>'
    codec = codec_with("thinking")
    end = codec.stop_token_ids[0]
    answers = [codec.encode(f"First {call % 1}? No.</think>{call % 2}"), codec.encode("That was it.</think>Done.")]
    policy = RecordingPolicy(
        ScriptedModel(*[[*ids, end] for ids in answers]), codec, SamplingSettings(max_new_tokens=8), name="uid"
    )

    done = await policy.act(QUESTION, [note])

    assert (ran, done.text) == ([2], "That was it.</think>Done.")
    assert done.replies[0].message["content"] == f"First {call % 1}? No.</think>"
    assert len(merge_turns(policy.turns)) == 1


async def test_tools_for_a_template_whose_calls_are_unknown_are_refused_at_once() -> None:
    policy = RecordingPolicy(model := ScriptedModel(), codec_with("glm"), SamplingSettings(), name="uid")

    with pytest.raises(WorkflowError, match="inference.tool_call_parser"):
        await policy.act(QUESTION, [print_nothing])
    assert model.calls == []


def print_nothing() -> None:
    """Do nothing."""


async def test_act_whose_last_reply_is_cut_off_is_not_finished() -> None:
    policy = policy_of(ScriptedModel([*b"It is"], finish_reason="length"))

    assert not (await policy.act(QUESTION, [])).is_finished


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


async def test_what_a_single_call_may_ask_for_is_said_as_sglang_says_it_and_only_where_it_asks() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    table: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"min_p": 0.1}, {"min_p": 0.1}),
        ({"frequency_penalty": 0.5, "presence_penalty": -1}, {"frequency_penalty": 0.5, "presence_penalty": -1.0}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"logit_bias": {5: -3, 7: 2.5}}, {"logit_bias": {"5": -3.0, "7": 2.5}}),
        ({"min_new_tokens": 2}, {"min_new_tokens": 2}),
        ({"stop_token_ids": [3, END, 1]}, {"stop_token_ids": [1, 3, END]}),
        ({"seed": -4}, {"sampling_seed": -4}),
        ({"top_logprobs": 3}, {"top_logprobs_num": 3}),
        ({"json_schema": schema}, {"json_schema": json.dumps(schema)}),
        ({"json_schema": {}}, {"json_schema": "{}"}),
        ({"json_schema": "$$ANY$$"}, {"json_schema": "$$ANY$$"}),
        ({"regex": "a|b"}, {"regex": "a|b"}),
        ({"ebnf": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
        ({"structural_tag": {"format": {}}}, {"structural_tag": '{"format": {}}'}),
        ({"regex": "", "ebnf": None, "logit_bias": {}, "min_new_tokens": 0, "top_logprobs": 0}, {}),
    ]
    policy = policy_of(model := ScriptedModel(*([98, END] for _ in range(len(table) + 1))))

    await policy.chat(QUESTION)
    plain = model.calls[0][1]
    for sampling, said in table:
        await policy.chat(QUESTION, **sampling)
        assert model.calls[-1][1] == {**plain, **said}, sampling


async def test_replies_to_one_call_with_a_seed_each_have_their_own() -> None:
    policy = policy_of(model := ScriptedModel(*([98, END] for _ in range(3))))

    await policy.chat(QUESTION, n=3, seed=7)

    assert sorted(params["sampling_seed"] for _, params in model.calls) == [7, 8, 9]


async def test_sampling_that_cannot_be_is_refused_with_its_name() -> None:
    policy = policy_of(model := ScriptedModel())
    table: list[tuple[dict[str, Any], str]] = [
        ({"json_schema": {}, "regex": "a"}, "got json_schema and regex, need at most one grammar"),
        ({"regex": "a", "min_new_tokens": 1}, "got min_new_tokens with a grammar"),
        ({"regex": "a", "ignore_eos": True}, "got ignore_eos with a grammar"),
        ({"min_new_tokens": 9}, "got min_new_tokens=9, need at most max_new_tokens=8"),
        ({"ignore_eos": True, "stop_token_ids": [1]}, "got stop_token_ids with ignore_eos"),
        ({"frequency_penalty": 2.1}, "frequency_penalty: .*less than or equal to 2"),
        ({"presence_penalty": -2.1}, "presence_penalty: .*greater than or equal to -2"),
        ({"repetition_penalty": 0}, "repetition_penalty: .*greater than 0"),
        ({"min_p": 1.1}, "min_p: .*less than or equal to 1"),
        ({"logit_bias": {-1: 1}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logit_bias": {1: -1e10}}, "logit_bias.1: .*greater than or equal to -1000000000"),
        ({"top_logprobs": 21}, "top_logprobs: .*less than or equal to 20"),
        ({"seed": 1 << 63}, "seed: .*less than or equal to"),
        ({"json_schema": 5}, "json_schema"),
    ]

    for sampling, problem in table:
        with pytest.raises(WorkflowError, match=f"bad sampling .*{problem}.*need any of"):
            await policy.chat(QUESTION, **sampling)
    assert model.calls == []


async def test_what_is_trained_is_not_cut_unless_that_is_accepted() -> None:
    policy = RecordingPolicy(model := ScriptedModel([98, END]), codec(), SamplingSettings(max_new_tokens=8), name="uid")
    policy.record.refuses_truncation = True

    for cut in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0.0}, {"temperature": 0.0, "top_p": 1}):
        name, value = next(iter(cut.items()))
        with pytest.raises(WorkflowError, match=f"got {name}={value:g}; .*rollout.accept_truncation_bias=true"):
            await policy.chat(QUESTION, **cut)
    assert model.calls == []

    assert (await policy.chat(QUESTION, temperature=0.3, top_p=1.0, top_k=-1, min_p=0.0)).token_ids == [98, END]


@pytest.mark.parametrize(
    "bad", [{"temprature": 0.5}, {"temperature": -1}, {"temperature": math.inf}, {"top_k": 0}, {"max_new_tokens": 0}]
)
async def test_unknown_or_impossible_sampling_is_refused_before_a_call(bad: dict[str, float]) -> None:
    policy = policy_of(model := ScriptedModel([98]))

    with pytest.raises(WorkflowError, match=f"bad sampling .*{next(iter(bad))}.*need any of temperature, top_p"):
        await policy.chat(QUESTION, **bad)

    assert not model.calls


async def test_replies_to_one_question_are_said_side_by_side_and_each_can_be_gone_on_from() -> None:
    policy = policy_of(model := ScriptedModel([97, END], [201, END], [98, END], [99, END]))

    replies = await policy.chat(QUESTION, n=3)
    await policy.chat([*QUESTION, replies[1].message, {"role": "user", "content": "x"}])

    assert [reply.id for reply in replies] == ["uid.1", "uid.2", "uid.3"]
    assert [reply.text for reply in replies] == ["a", "a", "b"]
    assert model.calls[0] == model.calls[1] == model.calls[2]
    assert model.calls[3][0] == [*model.calls[0][0], 201, END, *b"user:x", END, *b"assistant:"]
    assert len(merge_turns(policy.turns)) == 3
    assert policy.record.num_breaks == 0


async def test_single_reply_asked_for_by_number_comes_in_a_list() -> None:
    replies = await policy_of(ScriptedModel([98, END])).chat(QUESTION, n=1)

    assert [reply.text for reply in replies] == ["b"]


async def test_no_replies_at_once_are_refused() -> None:
    with pytest.raises(WorkflowError, match="got n=0, need 1 to"):
        await policy_of(ScriptedModel()).chat(QUESTION, n=0)


async def test_conversation_that_was_changed_is_counted_as_a_break() -> None:
    policy = policy_of(ScriptedModel([98, END], [99, END]))

    await policy.chat(QUESTION)
    await policy.chat([*QUESTION, {"role": "assistant", "content": "mine"}, {"role": "user", "content": "x"}])

    assert policy.record.num_breaks == 1


# Streams


async def test_stream_gives_the_text_in_pieces_and_the_recorded_reply_at_their_end() -> None:
    policy, model = actor("a€b", "c")
    assert len(model.answers[0]) == 6  # the one character is three tokens

    stream = policy.stream(QUESTION, temperature=0.5)
    pieces = [piece async for piece in stream]

    assert (pieces, stream.reply.text) == (["a", "€", "b"], "a€b")
    assert model.calls[0][1]["temperature"] == 0.5
    assert policy.turns[0].output_ids == stream.reply.token_ids
    await policy.chat([*QUESTION, stream.reply.message, {"role": "user", "content": "x"}])
    assert len(merge_turns(policy.turns)) == 1


async def test_stream_that_is_left_is_not_recorded() -> None:
    policy = policy_of(ScriptedModel([97, 98, 99, END]))

    async with policy.stream(QUESTION) as stream:
        async for _ in stream:
            break

    with pytest.raises(WorkflowError, match="asked for the reply before its end"):
        _ = stream.reply
    assert policy.turns == []


async def test_streams_a_workflow_left_open_end_with_it() -> None:
    policy = policy_of(ScriptedModel([97, 98, 99, END]))
    stream = policy.stream(QUESTION)
    await anext(stream)

    policy.close()
    await anyio.wait_all_tasks_blocked()

    assert policy.turns == []


async def test_a_reader_of_a_stream_that_is_cancelled_takes_no_other_along() -> None:
    may_say = asyncio.Event()

    async def generate(take: TakeTokens) -> Reply:
        await may_say.wait()
        take([97])
        raise WorkflowError("enough")

    stream = RecordingStream(generate, ByteTokenizer())
    one, other = (asyncio.ensure_future(stream.__anext__()) for _ in range(2))
    await anyio.wait_all_tasks_blocked()
    one.cancel()
    await anyio.wait_all_tasks_blocked()
    may_say.set()
    assert await other == "a"


async def test_error_of_a_stream_is_raised_where_it_is_heard() -> None:
    class Broken(ScriptedModel):
        async def generate(self, *args: object, **kwargs: object) -> object:
            raise GenerationError("gone")

    with pytest.raises(GenerationError, match="gone"):
        async for _ in policy_of(Broken()).stream(QUESTION):
            pass


async def test_empty_reply_is_a_stream_without_pieces() -> None:
    stream = policy_of(ScriptedModel([END])).stream(QUESTION)

    assert [piece async for piece in stream] == []
    assert stream.reply.text == ""


# Tools


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


CALL = '<tool_call>{"name":"add","arguments":{"a":2,"b":3}}</tool_call>'


def actor(*texts: str) -> tuple[RecordingPolicy, ScriptedModel]:
    """A policy on a real chat template, and the model that says these texts, a letter a token."""
    hermes = codec_with("hermes")
    answers = [[*(token for letter in text for token in hermes.encode(letter)), 2] for text in texts]
    model = ScriptedModel(*answers)
    return RecordingPolicy(model, hermes, SamplingSettings(max_new_tokens=99), name="uid"), model


async def test_reply_to_a_question_with_tools_tells_its_calls() -> None:
    policy, _ = actor(f"I add.{CALL}")

    reply = await policy.chat(QUESTION, tools=[add])

    (call,) = reply.tool_calls
    assert (call.id, call.name, call.arguments, call.error) == ("call00001", "add", {"a": 2, "b": 3}, "")
    function = {"name": "add", "arguments": '{"a":2,"b":3}'}
    calls = [{"id": "call00001", "type": "function", "function": function}]
    assert reply.message == {"role": "assistant", "content": "I add.", "tool_calls": calls}
    assert reply.text == f"I add.{CALL}"


async def test_call_that_the_workflow_changed_in_its_message_is_its_own_and_a_break() -> None:
    policy, _ = actor(CALL, "five", "six")
    answer = {"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "5"}
    reply = await policy.chat(QUESTION, tools=[add])
    await policy.chat([*QUESTION, reply.message, answer], tools=[add])
    assert policy.record.num_breaks == 0

    reply.message["tool_calls"][0]["function"]["arguments"] = "{}"
    await policy.chat([*QUESTION, reply.message, answer], tools=[add])

    assert policy.record.num_breaks == 1


async def test_what_looks_like_a_call_is_text_where_there_are_no_tools() -> None:
    policy, _ = actor(CALL)

    reply = await policy.chat(QUESTION)

    assert (reply.tool_calls, reply.message) == ([], {"role": "assistant", "content": CALL})


async def test_act_runs_tools_until_the_model_calls_none_and_keeps_one_sequence() -> None:
    policy, model = actor(CALL, "It is 5.")

    done = await policy.act(QUESTION, [add])

    assert (done.text, done.is_finished, len(done.replies)) == ("It is 5.", True, 2)
    assert [result.text for result in done.results] == ["5"]
    assert [message["role"] for message in done.messages] == ["user", "assistant", "tool", "assistant"]
    (row,) = merge_turns(policy.turns)
    sampled = policy.turns[0].output_ids + policy.turns[1].output_ids
    assert row.token_ids[row.loss_mask].tolist() == sampled
    text = codec_with("hermes").decode(model.calls[1][0], skip_special_tokens=False)
    assert text.endswith(
        f"{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert (policy.record.num_tool_calls, policy.record.num_tool_errors, policy.record.num_breaks) == (1, 0, 0)


async def test_bad_calls_are_told_to_the_model_which_may_try_again() -> None:
    policy, model = actor("<tool_call>add 2 3</tool_call>", CALL.replace("add", "sum"), CALL, "5")

    done = await policy.act(QUESTION, [add])

    assert [(result.is_error, result.text[:13]) for result in done.results] == [
        (True, "error: not va"), (True, "error: there "), (False, "5"),
    ]  # fmt: skip
    assert done.messages[1] == {"role": "assistant", "content": "<tool_call>add 2 3</tool_call>"}
    assert len(merge_turns(policy.turns)) == 1
    assert (policy.record.num_tool_calls, policy.record.num_tool_errors) == (3, 2)


async def test_act_ends_after_its_turns_and_does_not_run_what_the_last_one_calls() -> None:
    policy, _ = actor(CALL, CALL)

    done = await policy.act(QUESTION, [add], max_turns=2)

    assert (done.is_finished, len(done.replies), len(done.results)) == (False, 2, 1)


async def test_workflow_may_run_tools_itself_and_name_them_by_schema() -> None:
    policy, _ = actor(CALL, "5")
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

    reply = await policy.chat(QUESTION, tools=[schema])
    answer = {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "5"}
    messages = json.loads(json.dumps([*QUESTION, reply.message, answer]))
    last: Reply = await policy.chat(messages, tools=[schema])

    assert last.text == "5"
    assert len(merge_turns(policy.turns)) == 1


class ScriptedParser:
    """A server's parser, which knows another way of writing calls than ours."""

    def __init__(self, *found: FoundCalls) -> None:
        self.found = list(found)
        self.texts: list[str] = []

    async def find(
        self, text: str, tools: Sequence[Mapping[str, Any]], *, preferred: ServerHandle | None = None
    ) -> FoundCalls:
        assert [tool["function"]["name"] for tool in tools] == ["add"]
        assert preferred is not None
        self.texts.append(text)
        return self.found.pop(0)


async def test_calls_are_found_by_the_servers_parser_where_it_is_to() -> None:
    _, model = actor("I add. @add(2,3)", "@add(", "5")
    parser = ScriptedParser(
        FoundCalls("I add.", [FoundCall("add", '{"a":2,"b":3}')]),
        FoundCalls("", [FoundCall("add", "[2, 3]")]),
        FoundCalls("5", []),
    )
    policy = RecordingPolicy(
        model, codec_with("hermes"), SamplingSettings(max_new_tokens=99), name="uid", call_parser=parser
    )

    done = await policy.act(QUESTION, [add])

    assert parser.texts == ["I add. @add(2,3)", "@add(", "5"]
    assert done.messages[1]["content"] == "I add."
    assert [result.is_error for result in done.results] == [False, True]
    assert "the arguments of 'add' are no object" in done.results[1].text
    assert (done.text, policy.tool_format, len(merge_turns(policy.turns))) == ("5", None, 1)
