"""What the model said keeps the tokens it was said with, whatever the template and wherever the conversation goes."""

import json
from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.errors import WorkflowError
from areal_async.protocol.types import Turn, VersionSpan
from areal_async.rollout.policy.conversation import Conversations, RecordedReply, RenderedPrompt
from areal_async.rollout.policy.merge import merge_turns
from areal_async.rollout.policy.text import TextCodec
from tests.unit.rollout.chat_templates import TEMPLATES, codec_with, tokenizer_with

END = 2
QUESTION = {"role": "user", "content": "What is 2 and 3?"}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
APPENDING = ["hermes", "json"]
EVERY = list(TEMPLATES)

Message = Mapping[str, Any]


class Mode(str, Enum):  # noqa: UP042 - what users have, which is written otherwise than it is compared
    FAST = "fast"


@dataclass
class Talk:
    """Conversations of one trajectory, with a model that says what it is told."""

    codec: TextCodec
    conversations: Conversations = field(init=False)
    turns: list[Turn] = field(default_factory=list)
    recorded: list[RecordedReply] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.conversations = Conversations(self.codec, self.recorded)

    def open(self, messages: list[Message], tools: list[Message] | None = None) -> RenderedPrompt:
        return self.conversations.open(messages, tools or [])

    def say(self, opening: RenderedPrompt, output_ids: list[int], message: Message | None = None) -> Message:
        turn = Turn(
            prompt_ids=opening.prompt_ids,
            output_ids=output_ids,
            logprobs=[-float(len(self.turns) + 1)] * len(output_ids),
            spans=[VersionSpan(version="1-0", start=0, end=len(output_ids))],
            oldest="1-0",
            finish_reason="stop",
        )
        self.turns.append(turn)
        message = message or {"role": "assistant", "content": self.codec.decode(output_ids)}
        said = [*opening.messages, deepcopy(message)]
        self.recorded.append(RecordedReply(messages=said, message=message, tools=opening.tools, turn=turn))
        return message

    def ask(self, messages: list[Message], output_ids: list[int], tools: list[Message] | None = None) -> Message:
        return self.say(self.open(messages, tools), output_ids)

    def begins_with(self, opening: RenderedPrompt, number: int) -> bool:
        turn = self.turns[number]
        said = turn.prompt_ids + turn.output_ids
        return opening.prompt_ids[: len(said)] == said


def letters(text: str) -> list[int]:
    """One token a letter: no tokenizer would write it so."""
    codec = codec_with("hermes")
    return [token for letter in text for token in codec.encode(letter)]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def holds(ids: list[int], part: list[int]) -> bool:
    return any(ids[start : start + len(part)] == part for start in range(len(ids) - len(part) + 1))


def called(content: str = "", **arguments: int) -> Message:
    call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def test_the_letters_are_tokens_that_the_tokenizer_would_not_choose() -> None:
    codec = codec_with("hermes")

    assert codec.decode(letters("Tom has")) == "Tom has"
    assert codec.encode("Tom has") != letters("Tom has")


@pytest.mark.parametrize("template", APPENDING)
def test_conversation_goes_on_from_the_tokens_that_were_said(template: str) -> None:
    talk = Talk(codec_with(template))
    first = talk.ask([SYSTEM, QUESTION], [*letters("Tom has"), END])

    opening = talk.open([SYSTEM, QUESTION, first, user("And 4?")])

    assert talk.begins_with(opening, 0)
    assert not opening.is_break
    text = talk.codec.decode(opening.prompt_ids, skip_special_tokens=False)
    assert text == talk.codec.render([SYSTEM, QUESTION, first, user("And 4?")])


@pytest.mark.parametrize("template", EVERY)
def test_call_and_its_answer_stay_in_one_sequence_however_the_template_spells_the_call(template: str) -> None:
    talk = Talk(codec_with(template))
    said = [*letters('<tool_call>{"name":"add","arguments":{"a":2}}</tool_call>'), END]
    opening = talk.open([SYSTEM, QUESTION], TOOLS)
    call = talk.say(opening, said, called(a=2))
    answer = {"role": "tool", "tool_call_id": "call00001", "content": "5"}

    opening = talk.open([SYSTEM, QUESTION, call, answer], TOOLS)
    talk.say(opening, [*letters("five"), END])

    assert talk.begins_with(opening, 0)
    assert not opening.is_break
    assert len(merge_turns(talk.turns)) == 1


def test_reply_that_was_cut_short_gets_the_end_of_turn_that_the_template_writes() -> None:
    talk = Talk(codec_with("hermes"))
    first = talk.ask([QUESTION], letters("Tom"))

    opening = talk.open([QUESTION, first, user("x")])

    added = talk.codec.encode("<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n")
    assert opening.prompt_ids == talk.turns[0].prompt_ids + letters("Tom") + added


def test_reasoning_that_the_template_leaves_out_breaks_the_prefix_and_the_answer_keeps_its_tokens() -> None:
    talk = Talk(codec_with("reasoning"))
    answer = letters("five has")
    reply = talk.ask([QUESTION], [*letters("<think>Tom has</think>\n\n"), *answer, END])

    opening = talk.open([QUESTION, reply, user("And 4?")])
    talk.say(opening, [*letters("nine"), END])

    assert opening.is_break
    assert not talk.begins_with(opening, 0)
    assert holds(opening.prompt_ids, answer)
    assert "think" not in talk.codec.decode(opening.prompt_ids)
    assert len(merge_turns(talk.turns)) == 2


def test_reasoning_stays_while_tools_are_used() -> None:
    talk = Talk(codec_with("reasoning"))
    said = [*letters("<think>Tom</think>\n\ncall"), END]
    call = talk.ask([QUESTION], said)

    opening = talk.open([QUESTION, call, {"role": "tool", "content": "5"}])

    assert talk.begins_with(opening, 0)
    assert not opening.is_break


def test_only_what_follows_the_last_unbroken_reply_is_written_anew() -> None:
    talk = Talk(codec_with("reasoning"))
    first = talk.ask([QUESTION], [*letters("two has"), END])
    messages = [QUESTION, first, user("more")]
    second = talk.ask(messages, [*letters("<think>Tom</think>\n\nfive has"), END])

    opening = talk.open([*messages, second, user("last")])

    assert opening.is_break
    assert talk.begins_with(opening, 0)
    assert not talk.begins_with(opening, 1)
    assert holds(opening.prompt_ids, letters("five has"))


def test_template_that_moves_the_system_message_along_breaks_with_every_question() -> None:
    talk = Talk(codec_with("moving"))
    first = talk.ask([SYSTEM, QUESTION], [*letters("Tom has"), END])

    opening = talk.open([SYSTEM, QUESTION, first, user("And 4?")])

    assert opening.is_break
    assert holds(opening.prompt_ids, letters("Tom has"))
    assert not talk.open([SYSTEM, QUESTION]).is_break


@pytest.mark.parametrize("template", EVERY)
def test_changed_system_message_is_a_break_and_the_replies_keep_their_tokens(template: str) -> None:
    talk = Talk(codec_with(template))
    reply = talk.ask([SYSTEM, QUESTION], [*letters("Tom has"), END])

    opening = talk.open([{"role": "system", "content": "Be kind."}, QUESTION, reply, user("And 4?")])

    assert opening.is_break
    assert not talk.begins_with(opening, 0)
    assert holds(opening.prompt_ids, letters("Tom has"))


def test_change_that_the_template_does_not_write_is_no_break() -> None:
    talk = Talk(codec_with("json"))
    reply = talk.ask([QUESTION], [*letters("Tom has"), END])

    opening = talk.open([{**QUESTION, "content": f" {QUESTION['content']}\n"}, reply, user("And 4?")])

    assert talk.begins_with(opening, 0)
    assert not opening.is_break


def test_other_tools_are_a_break() -> None:
    talk = Talk(codec_with("hermes"))
    reply = talk.ask([QUESTION], [*letters("Tom has"), END], TOOLS)

    assert talk.open([QUESTION, reply, user("And 4?")]).is_break
    same = talk.open([QUESTION, reply, user("And 4?")], deepcopy(TOOLS))
    assert not same.is_break
    assert same.tools is talk.recorded[0].tools  # one copy, however long the conversation


def test_reply_that_the_workflow_changed_is_its_own_text_and_a_break() -> None:
    talk = Talk(codec_with("hermes"))
    reply = talk.ask([QUESTION], [*letters("Tom has"), END])

    opening = talk.open([QUESTION, {**reply, "content": "Tom has!"}, user("x")])

    assert opening.is_break
    assert not holds(opening.prompt_ids, letters("Tom has"))


def test_message_changed_in_place_after_the_call_does_not_pass_for_what_was_asked() -> None:
    talk = Talk(codec_with("hermes"))
    question = dict(QUESTION)
    reply = talk.ask([question], [*letters("Tom has"), END])
    question["content"] = "Another?"

    opening = talk.open([question, reply, user("x")])

    assert opening.is_break
    assert "Another?" in talk.codec.decode(opening.prompt_ids)


def test_copy_of_a_reply_is_known_whatever_keys_were_filled_with_nothing() -> None:
    talk = Talk(codec_with("hermes"))
    call = talk.say(talk.open([QUESTION], TOOLS), [*letters("add"), END], called(a=1))
    copied = {**json.loads(json.dumps(call)), "content": None, "refusal": None, "audio": None}

    opening = talk.open([QUESTION, copied, {"role": "tool", "content": "5"}], TOOLS)

    assert talk.begins_with(opening, 0)


def test_of_two_replies_with_one_text_the_one_that_is_appended_goes_on() -> None:
    talk = Talk(codec_with("hermes"))
    opening = talk.open([QUESTION])
    first = talk.say(opening, [*letters("Tom has"), END])
    second = talk.say(opening, [*talk.codec.encode("Tom has"), END])

    assert talk.begins_with(talk.open([QUESTION, first, user("x")]), 0)
    assert talk.begins_with(talk.open([QUESTION, second, user("x")]), 1)


def test_reply_of_half_a_character_keeps_its_tokens() -> None:
    codec = codec_with("hermes")
    whole = codec.encode("€")
    assert len(whole) == 3
    talk = Talk(codec)
    reply = talk.ask([QUESTION], [*whole[:2], END])

    changed = talk.open([SYSTEM, QUESTION, reply, user("x")])

    assert talk.begins_with(talk.open([QUESTION, reply, user("x")]), 0)
    assert holds(changed.prompt_ids, whole[:2])


def test_conversation_that_the_template_refuses_is_the_workflows_fault() -> None:
    with pytest.raises(WorkflowError, match="chat template: "):
        Talk(codec_with("hermes")).open([{"role": "user", "content": 5}])


def test_what_is_no_conversation_is_told_in_one_sentence() -> None:
    talk = Talk(codec_with("hermes"))
    for messages, got in (
        ("2 and 3?", "got a str"),
        (QUESTION, "got a dict"),
        (None, "got a NoneType"),
        ([], "got none"),
        (["2 and 3?"], "got a str in place 1"),
        ([QUESTION, {"content": "x"}], "got no role in place 2"),
        ([{"role": ["user"], "content": "x"}], "got no role in place 1"),
        ([QUESTION, {"role": "user", "text": "x"}], r"got \['role', 'text'\] without content in place 2"),
        ([{"role": "system", "content": None}], r"got \['content', 'role'\] without content in place 1"),
    ):
        with pytest.raises(WorkflowError, match=f"^messages: {got}, need a list of messages"):
            talk.open(messages)  # type: ignore[arg-type]


def test_role_that_the_template_does_not_write_is_refused_at_once() -> None:
    human, developer = {"role": "human", "content": "x"}, {"role": "developer", "content": "Be brief."}
    for template, messages, role in (
        ("hermes", [human], "human"),
        ("json", [QUESTION, {"role": "human", "content": "x"}], "human"),
        ("moving", [developer, QUESTION], "developer"),
        ("silent", [SYSTEM, QUESTION], "system"),
        ("silent", [QUESTION, {"role": "tool", "content": "5"}], "tool"),
    ):
        with pytest.raises(WorkflowError, match=f"got the role '{role}', which the model's chat template does not"):
            Talk(codec_with(template)).open(messages)
    Talk(codec_with("silent")).open([developer, QUESTION])


def test_model_without_a_chat_template_says_so() -> None:
    tokenizer = copy(tokenizer_with("hermes"))
    tokenizer.chat_template = None
    codec = TextCodec(tokenizer, stop_token_ids=[END], vocab_size=512)

    with pytest.raises(WorkflowError, match="tokenizer has none; name a Jinja file, rollout.template.path"):
        Talk(codec).open([QUESTION])


def asked_anew(talk: Talk, messages: list[Message], tools: list[Message]) -> RenderedPrompt:
    """Open a conversation with a template that has told nothing yet of how it closes a reply."""
    usual, talk.codec.usual_closing = talk.codec.usual_closing, ""
    opening = talk.open(messages, tools)
    talk.codec.usual_closing = usual
    return opening


@pytest.mark.parametrize("template", APPENDING)
def test_template_is_asked_once_how_it_closes_a_reply(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = codec_with(template)
    rendered: list[bool] = []
    write = codec.render
    monkeypatch.setattr(codec, "render", lambda *said, **how: rendered.append(how == {}) or write(*said, **how))
    for _ in range(2):
        rendered.clear()  # the second trajectory of a node has nothing left to ask
        talk, messages = Talk(codec), [QUESTION]
        for number in range(3):
            call = talk.say(talk.open(messages, TOOLS), [*letters("add"), END], called(f"#{number}", a=number))
            messages += [call, {"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "5"}]

    assert rendered.count(True) == 2  # each prompt is written once, the first one for both
    assert rendered.count(False) == 2  # and each reply that was gone on from


@pytest.mark.parametrize(("said", "num_rendered"), [("", 1), ("{{ strftime_now('x') }}", 8)])
def test_siblings_beginning_is_rendered_once_unless_the_template_changes_its_mind(
    said: str, num_rendered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = copy(tokenizer_with("hermes"))
    tokenizer.chat_template = said + tokenizer.chat_template
    codec, rendered = TextCodec(tokenizer, stop_token_ids=[END], vocab_size=512), list[int]()
    write = codec.render
    monkeypatch.setattr(codec, "render", lambda *given, **how: rendered.append(1) or write(*given, **how))
    openings = [Talk(codec).open(deepcopy([QUESTION]), deepcopy(TOOLS)) for _ in range(8)]

    assert len(rendered) == num_rendered
    assert all(one == openings[0] for one in openings)


def test_beginnings_that_are_equal_and_not_the_same_are_rendered_each() -> None:
    codec = codec_with("hermes")
    most: tuple[Any, ...] = (1, True, 1.0, [1], (1,), np.str_("1"), Mode("fast"), "fast", 1 << 80, "\ud800")
    tools = [[{"type": "function", "function": {"name": "f", "most": one}}] for one in most]

    for one in tools:
        assert codec.render_beginning([QUESTION], one) == codec.render([QUESTION], one)
    for more in (None, np.int64(1), np.arange(1), np.arange(3)):
        asked = [{"role": "user", "content": np.str_("1"), "more": more}]
        assert codec.render_beginning(asked) == codec.render(asked)
    assert codec.render_beginning([QUESTION], [{"type": "function", "function": {"name": codec}}])


@pytest.mark.parametrize(
    ("early", "late", "reply"),
    [("<|im_end|>\\n", "", ""), ("<|im_end|>\\n", "<|im_end|>\\n<|im_end|>\\n", "has"), ("!", "", "has!")],
)
def test_template_that_closes_replies_in_several_ways_is_asked_about_each(early: str, late: str, reply: str) -> None:
    tokenizer = copy(tokenizer_with("hermes"))
    tokenizer.chat_template = (
        "{% for message in messages %}"
        f"{{{{ message.content + ('{early}' if loop.index < 4 else '{late}') }}}}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
    )
    talk, messages = Talk(TextCodec(tokenizer, stop_token_ids=[END], vocab_size=512)), [QUESTION]
    for text in ("Tom", reply):
        messages += [talk.ask(messages, [*letters(text), END]), user("x")]

        assert talk.open(messages) == asked_anew(talk, messages, [])


# Random conversations: side by side, branching, with calls, copies and changes.

thoughts = st.lists(st.integers(3, 511), min_size=1, max_size=6)
texts = st.text("ab cd\n€", max_size=6)
actions = st.lists(
    st.tuples(
        st.sampled_from(["go on", "go on", "go on", "fork", "new", "edit", "system"]),
        st.integers(0, 99),
        st.booleans(),
        st.sampled_from(["text", "reasoning", "call"]),
        thoughts,
        thoughts,
        st.booleans(),
        texts,
    ),
    min_size=1,
    max_size=8,
)


@dataclass
class Thread:
    """A conversation, with the number of the turn that said each message, where one did."""

    messages: list[Message]
    origins: list[int | None]
    tools: list[Message] = field(default_factory=list)
    edited: list[int] = field(default_factory=list)

    @property
    def is_edited(self) -> bool:
        """Whether a reply was changed, and none said since."""
        last = max((index for index, origin in enumerate(self.origins) if origin is not None), default=-1)
        return any(last < index < len(self.messages) for index in self.edited)

    def append(self, message: Message, origin: int | None = None) -> None:
        self.messages.append(message)
        self.origins.append(origin)

    def fork(self, length: int) -> "Thread":
        return Thread(self.messages[:length], self.origins[:length], self.tools, list(self.edited))


def what_must_stay(codec: TextCodec, template: str, said: list[int], *, is_past: bool) -> list[int]:
    """Return the tokens of a reply that must be in a later prompt as they are."""
    ids = said[:-1] if said[-1:] == [END] else said
    text = codec.decode(ids, skip_special_tokens=False)
    if template == "json" and text != text.strip():
        return []  # it trims; where its edge lies inside a token is the tokenizer's affair
    if template == "reasoning" and is_past and "</think>" in text:
        kept = text.split("</think>")[-1].lstrip("\n")
        for start in range(len(ids) + 1):
            if codec.decode(ids[start:], skip_special_tokens=False) == kept:
                return ids[start:]
        return []
    return ids


@pytest.mark.parametrize("template", EVERY)
@settings(max_examples=40, deadline=None)
@given(actions)
def test_no_token_is_ever_made_anew_and_no_mask_is_wrong(template: str, script: list[Any]) -> None:
    codec = codec_with(template)
    talk = Talk(codec)
    threads = [Thread([QUESTION], [None])]
    for action, choice, has_system, kind, thought, answer, is_cut, text in script:
        thread = threads[choice % len(threads)]
        match action:
            case "fork":
                thread = thread.fork(1 + choice % len(thread.messages))
                threads.append(thread)
            case "new":
                thread = Thread([SYSTEM, user(text)] if has_system else [user(text)], [], TOOLS if is_cut else [])
                thread.origins = [None] * len(thread.messages)
                threads.append(thread)
            case "edit" if thread.origins[-1] is not None:
                thread.messages[-1] = {"role": "assistant", "content": f"edited {text}"}
                thread.origins[-1] = None
                thread.edited.append(len(thread.messages) - 1)
            case "system":
                thread.messages[0] = {**thread.messages[0], "content": text}
        if thread.messages[-1]["role"] == "assistant":
            follow = {"role": "tool", "content": text} if kind == "call" else user(text)
            thread.append(follow)

        opening = talk.open(thread.messages, thread.tools)

        assert opening == asked_anew(talk, thread.messages, thread.tools)
        origins = [origin for origin in thread.origins if origin is not None]
        questions = [index for index, message in enumerate(thread.messages) if message["role"] == "user"]
        ids = opening.prompt_ids
        for index, origin in enumerate(thread.origins):
            if origin is not None:
                is_past = index < max(questions, default=0)
                kept = what_must_stay(codec, template, talk.turns[origin].output_ids, is_past=is_past)
                assert holds(ids, kept)
        if origins:
            assert opening.is_break == (thread.is_edited or not talk.begins_with(opening, origins[-1]))

        said = codec.encode("<think>") + thought + codec.encode("</think>\n\n") if kind == "reasoning" else []
        said += letters(f"#{len(talk.turns)}") + answer + [END] * (not is_cut)  # each text is another
        message = called(f"#{len(talk.turns)}", a=choice) if kind == "call" else None
        message = talk.say(opening, said, message)
        thread.append(json.loads(json.dumps(message)) if is_cut else message, len(talk.turns) - 1)

    rows = merge_turns(talk.turns)
    assert sum(int(row.loss_mask.sum()) for row in rows) == sum(len(turn.output_ids) for turn in talk.turns)
    for number, turn in enumerate(talk.turns):
        row = next(row for row in rows if (row.logprobs == -float(number + 1)).any())
        at = np.flatnonzero(row.logprobs == -float(number + 1))
        assert row.loss_mask[at].all()
        assert row.token_ids[at].tolist() == turn.output_ids
        assert row.token_ids[: at[0]].tolist() == turn.prompt_ids
        assert at.tolist() == list(range(at[0], at[0] + len(turn.output_ids)))
