"""The tiny model with tools is taught what its workflows ask for, of questions that no run asks, and not too well."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anyio
import pytest
from transformers import AutoConfig, AutoTokenizer

from areal_async.rollout.tools.parse import parse_reply
from areal_async.sandbox import tool
from rewards.code_tests import passes_all
from rewards.countdown import target_reached
from tools.make_calculator import rows
from tools.make_coding import tasks
from tools.make_search import DATA
from tools.make_tiny_tools import MODEL, TAGS
from tools.tool_lessons import LESSONS, Lesson, first
from tools.word_problems import Split

NUM_LESSONS = 150
"""Of each task: enough to meet every kind of it, good and bad."""


def taught(name: str) -> list[Lesson]:
    make, _ = LESSONS[name]

    async def some() -> list[Lesson]:
        return await first(make(random.Random("test")), NUM_LESSONS)

    return anyio.run(some)


@pytest.fixture(autouse=True, scope="module")
def patience() -> Iterator[None]:
    """Programs of lessons are ended by their processor time alone: a busy machine changes no answer of theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tool, "LIMITS", replace(tool.LIMITS, wall_s=120.0))
        yield


@pytest.fixture(scope="module")
def lessons() -> dict[str, list[Lesson]]:
    return {name: taught(name) for name in LESSONS}


def shipped(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def asked_first(lesson: Lesson) -> str:
    return str(lesson["messages"][0]["content"])


def test_no_question_of_a_run_is_ever_demonstrated(lessons: dict[str, list[Lesson]]) -> None:
    for name in ("calculator", "python_tool", "search", "coding", "countdown"):
        demonstrated = {asked_first(lesson).partition("\n")[0] for lesson in lessons[name]}
        for split in (Split.TRAIN, Split.TEST):
            asked = {row.get("question", row.get("task")) for row in shipped(f"{name}_{split}")}

            assert not asked & demonstrated, (name, split)


def test_same_seed_gives_the_same_lessons(lessons: dict[str, list[Lesson]]) -> None:
    for name, before in lessons.items():
        assert taught(name) == before, name


def test_tools_are_called_well_and_badly_and_left_alone(lessons: dict[str, list[Lesson]]) -> None:
    tools = {"calculator": "calculate", "python_tool": "python", "search": "look_up"}
    for name, wanted in tools.items():
        said = [parse_reply(one["answer"], "hermes").calls for one in lessons[name] if len(one["messages"]) == 1]
        good = [calls for calls in said if calls and not calls[0].error and calls[0].name == wanted]

        assert 0.15 < sum(not calls for calls in said) / len(said) < 0.45, name
        assert 0.4 < len(good) / len(said) < 0.7, name


def test_a_tool_answers_in_lessons_as_in_a_run(lessons: dict[str, list[Lesson]]) -> None:
    for lesson in lessons["python_tool"]:
        for call, told in zip(lesson["messages"][1::2], lesson["messages"][2::2], strict=True):
            assert (call["role"], told["role"]) == ("assistant", "tool")
            if "print(sum(range(" in call["content"] and not told["content"].startswith("error"):
                (written,) = parse_reply(call["content"], "hermes").calls
                first_number, last = json.dumps(written.arguments).split("range(")[1].split(")")[0].split(",")
                end = sum(map(int, last.split("+")))
                assert told["content"] == str(sum(range(int(first_number), end)))


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_right_programs_pass_their_tests_and_usual_mistakes_do_not() -> None:
    for number, task in enumerate(tasks(Split.TEST)):
        if number % 8:
            continue  # each is six programs to run
        row = task.row(random.Random(number))
        scores = [
            await passes_all(f"```python\n{task.program(expression)}\n```", json.loads(row["tests"]))
            for expression in (task.kind.right, task.kind.usual)
        ]

        assert scores == [1.0, 0.0], task


def test_games_are_won_and_lost(lessons: dict[str, list[Lesson]]) -> None:
    won = []
    for lesson in lessons["countdown"]:
        numbers, target = asked_first(lesson).removeprefix("There are ").removesuffix("?").split(". How do they make ")
        won.append(target_reached(lesson["answer"], [int(number) for number in numbers.split(" and ")], int(target)))

    assert 0.3 < sum(won) / len(won) < 0.7


def test_another_seed_asks_other_questions() -> None:
    others = {row["question"] for row in rows(Split.TEST, seed=2)}

    assert len(others & {row["question"] for row in shipped("calculator_test")}) < len(others) / 2


def test_each_tag_is_a_token_that_is_written_out_and_the_model_knows_every_token() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    for tag in TAGS:
        (token,) = tokenizer.encode(tag)
        assert tokenizer.decode([token], skip_special_tokens=True) == tag
    assert max(tokenizer.get_vocab().values()) < AutoConfig.from_pretrained(MODEL).vocab_size
