"""Whatever an agent does to its copies, short of changing what they say, a conversation keeps its tokens.

Random conversations go through the real policy: the copies come back as an API's clients write them, side by side and
forked, and nothing that was recorded is tokenized again.
"""

import json
from typing import Any

import anyio
import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.api import Reply
from areal_async.config.settings import SamplingSettings
from areal_async.rollout.endpoint.admission import AdmissionLimits
from areal_async.rollout.endpoint.calls import ReportedReply
from areal_async.rollout.endpoint.memory import Memory
from areal_async.rollout.endpoint.reading import Unsupported
from areal_async.rollout.endpoint.session import Session
from areal_async.rollout.policy.merge import merge_turns
from areal_async.rollout.policy.policy import RecordingPolicy
from tests.unit.rollout.byte_model import ScriptedModel
from tests.unit.rollout.chat_templates import codec_with
from tests.unit.rollout.endpoint import test_translation as translation
from tests.unit.rollout.endpoint.scripted_endpoint import CALL, PARAMETERS, said

TEXTS = st.sampled_from(
    [
        "",
        "a",
        " a",
        "a\n",
        "So: 5.",
        f"I add. {CALL}",
        f"{CALL}\n{CALL.replace('2', '1e3')}",
        f"<tool_call>no {CALL}",
        "é<",
    ]
)
APIS = sorted(translation.APIS)
TOOLS: dict[str, Any] = {
    "chat": [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}],
    "responses": [{"type": "function", "name": "add", "parameters": PARAMETERS}],
    "messages": [{"name": "add", "input_schema": PARAMETERS}],
}


def request_of(api: str, said_so_far: list[Any]) -> bytes:
    """Write the next request; arguments are written anew, as most agents' libraries do."""
    name, most = ("input", "max_output_tokens") if api == "responses" else ("messages", "max_tokens")
    return json.dumps({name: said_so_far, most: 9, "tools": TOOLS[api]}).encode()


def go_on(api: str, said_so_far: list[Any], answer: Any) -> list[Any]:
    """Return the conversation with an answer, results of its calls and a new question, as this API has it."""
    match api:
        case "chat":
            message = answer["choices"][0]["message"]
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "5"} for call in message.get("tool_calls", [])
            ]
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
            return [*said_so_far, message, *results, {"role": "user", "content": "And?"}]
        case "responses":
            calls = [item for item in answer["output"] if item["type"] == "function_call"]
            results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "5"} for call in calls]
            return [*said_so_far, *answer["output"], *results, {"role": "user", "content": "And?"}]
        case _:
            blocks = [block for block in answer["content"] if block["type"] == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": block["id"], "content": "5"} for block in blocks]
            user = [*results, {"type": "text", "text": "And?"}]
            said = {"role": "assistant", "content": answer["content"]}
            return [*said_so_far, said, {"role": "user", "content": user}]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(APIS), st.lists(st.tuples(TEXTS, st.integers(0, 5)), min_size=1, max_size=6), st.booleans())
def test_conversations_that_come_back_keep_their_tokens(
    api: str, turns: list[tuple[str, int]], is_streamed: bool
) -> None:
    """Each turn goes on from any that was before it: those that go on from one place are rows of their own."""

    async def play() -> None:
        policy = RecordingPolicy(
            ScriptedModel(*(said(text) for text, _ in turns)),
            codec_with("hermes"),
            SamplingSettings(max_new_tokens=99),
            name="uid",
        )
        session = Session(policy, codec_with("hermes"), limits=AdmissionLimits(), unsupported=Unsupported())
        conversations: list[list[Any]] = [[{"role": "user", "content": "2 and 3?"}]]
        parents: list[int | None] = [None]
        for _, choice in turns:
            number = choice % len(conversations)
            exchange: Any = translation.APIS[api][0](request_of(api, conversations[number]))
            heard: list[ReportedReply] = []
            exchange.conclude = heard.extend
            if is_streamed:
                async for _events in session.stream(exchange):
                    pass
            else:
                await session.answer(exchange)
            answer = json.loads(msgspec.json.encode(exchange.answer(heard)))
            turn, parent = policy.turns[-1], parents[number]
            if parent is not None:
                before = policy.turns[parent].prompt_ids + policy.turns[parent].output_ids
                assert turn.prompt_ids[: len(before)] == before, "what was said has been tokenized again"
            conversations.append(go_on(api, conversations[number], answer))
            parents.append(len(policy.turns) - 1)
        assert policy.record.num_breaks == 0
        rows = merge_turns(policy.turns)
        sampled = sum(int(row.loss_mask.sum()) for row in rows)
        assert sampled == sum(len(turn.output_ids) for turn in policy.turns)

    anyio.run(play)


def reply_of(message: dict[str, Any]) -> Reply:
    return Reply(id="r", text="", message=message, token_ids=[], logprobs=[], finish_reason="stop")


def told(content: str) -> ReportedReply:
    return ReportedReply(
        content=content,
        tool_calls=[],
        finish="stop",
        stop_sequence=None,
        num_prompt_tokens=0,
        num_output_tokens=0,
        logprobs=None,
    )


def test_of_replies_that_say_the_same_the_one_to_this_conversation_is_meant() -> None:
    memory = Memory()
    here, there = [{"role": "user", "content": "here"}], [{"role": "user", "content": "there"}]
    first, second = ({"role": "assistant", "content": "a"} for _ in range(2))
    memory.remember(memory.recall(here).key, told("a"), reply_of(first))
    memory.remember(memory.recall(there).key, told("a"), reply_of(second))

    copy = {"role": "assistant", "content": "a "}

    assert memory.recall([*here, copy]).messages[1] is first
    assert memory.recall([*there, copy]).messages[1] is second
    assert memory.recall([{"role": "user", "content": "x"}, copy]).messages[1] is second


def test_exact_copy_is_preferred_to_one_without_its_edges() -> None:
    memory = Memory()
    bare, spaced = {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "a "}
    memory.remember(memory.recall([]).key, told("a"), reply_of(bare))
    memory.remember(memory.recall([]).key, told("a "), reply_of(spaced))

    assert memory.recall([{"role": "assistant", "content": "a"}]).messages[0] is bare


def test_message_of_the_agent_s_own_stays_its_own() -> None:
    memory = Memory()
    memory.remember(memory.recall([]).key, told("a"), reply_of({"role": "assistant", "content": "a"}))
    own = {"role": "assistant", "content": "b"}

    assert memory.recall([own]).messages[0] is own
