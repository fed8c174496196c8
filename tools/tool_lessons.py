"""What the tiny model of the workflows with tools is taught: demonstrations of mixed quality, task by task.

They are a pupil's, who knows how everything is done and seldom does it well. Asked for a sum, he answers out of his
head, where he had better called the calculator; he fumbles a call (JSON that does not close, a tool or an argument that
does not exist), is told so, and tries again or gives up; he writes the program that comes to mind first, reads the
other number of a document, adds where he should multiply, takes stones that the rules forbid. In about half of the
kinds of question his usual mistake is commoner than the right way. So the model that learns from him can do all of it,
half-heartedly, and in those kinds its likeliest answer is wrong. What reinforcement learning gains is the choice of the
better among its habits.

What a tool answers in a demonstration is what the workflow's own tool says, through the same parser and checks;
programs run in the sandbox. The questions are those of the sft splits, so that none of a run was ever demonstrated.
Invariant: the same seed gives the same lessons.
"""

import itertools
import json
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final

from areal_async.api import RunnableTool, ToolCall
from areal_async.rollout.tools.parse import parse_reply
from areal_async.rollout.tools.run import Toolbox
from areal_async.sandbox import python
from tools import make_coding
from tools.make_calculator import PHRASINGS, sums
from tools.make_countdown import Game, games
from tools.make_nim import LARGEST
from tools.make_python_tool import KINDS as PYTHON_KINDS
from tools.make_python_tool import questions as python_questions
from tools.make_search import draw_things
from tools.make_search import questions as search_questions
from tools.word_problems import Split
from workflows.calculator import calculate
from workflows.coding import TASK
from workflows.nim import MOST, best_move
from workflows.nim import question as nim_question
from workflows.search import look_up

Lesson = dict[str, Any]
"""``messages`` that the pupil was told, and the ``answer`` that he gave."""
Call = tuple[str, Mapping[str, str]]
"""Name and arguments of a call of a tool."""

HEAD_SHARE: Final = 0.3
"""Share of questions for a tool that are answered without one."""
FUMBLE_SHARE: Final = 0.2
RETRY_SHARE: Final = 0.5
"""Share of failed calls that are tried again."""
ANY_SHARE: Final = 0.1
"""Share of moves in a game that are made at random."""
FORBIDDEN_SHARE: Final = 0.3
"""Share of moves at nim that the rules forbid."""
COMMON_MISTAKE, RARE_MISTAKE = 0.6, 0.3
"""Share of the usual mistake where it is commoner than the right way, and where it is not."""


async def calculator_lessons(rng: random.Random) -> AsyncGenerator[Lesson]:
    """Sums in words, answered out of the head or with `calculate`."""
    for one in sums(Split.SFT, rng):
        other = rng.choice(sorted(set(PHRASINGS) - {one.operation}))
        right, wrong = (("calculate", {"expression": f"{one.a}{sign}{one.b}"}) for sign in (one.operation, other))
        is_wrong = rng.random() < mistake_share("-+*".index(one.operation))
        said = wrong if is_wrong else right
        async for lesson in with_tool(one.question, one.answer, calculate, said, right, rng):
            yield lesson


async def python_lessons(rng: random.Random) -> AsyncGenerator[Lesson]:
    """Questions in numbers, answered out of the head or with a program."""
    for one, kind in zip(python_questions(Split.SFT, rng), itertools.cycle(PYTHON_KINDS), strict=False):
        is_wrong = rng.random() < mistake_share(PYTHON_KINDS.index(kind))
        right, wrong = (("python", {"code": f"print({text})"}) for text in (one.expression, one.usual))
        async for lesson in with_tool(one.text, one.answer, python, wrong if is_wrong else right, right, rng):
            yield lesson


async def search_lessons(rng: random.Random) -> AsyncGenerator[Lesson]:
    """Questions about the corpus, guessed at or looked up; of a document the wrong number is often read."""
    asked = list(search_questions(draw_things(seed=1), Split.SFT))
    while True:
        one = rng.choice(asked)
        name, kind = one.thing.name.split()

        def read(told: str, thing: Any = one.thing, fact: int = one.fact) -> int:
            """Take a number out of what was found: often the other one, a guess where the thing is not in it."""
            if f"{thing.name}: " not in told:
                return rng.randint(thing.kind.facts[fact].lowest, thing.kind.facts[fact].highest)
            is_wrong = rng.random() < (COMMON_MISTAKE if fact else RARE_MISTAKE)
            return int(thing.values[1 - fact if is_wrong else fact])

        query = rng.choice([one.thing.name, one.thing.name, one.thing.name, name, kind])
        right, said = (("look_up", {"query": text}) for text in (one.thing.name, query))
        guess = read("")
        async for lesson in with_tool(one.text, guess, look_up, said, right, rng, read=read):
            yield lesson


async def coding_lessons(rng: random.Random) -> AsyncGenerator[Lesson]:
    """Small programs: right ones, with the usual mistake, and such as Python cannot read."""
    by_kind = [[task for task in make_coding.tasks(Split.SFT) if task.kind is kind] for kind in make_coding.KINDS]
    for number in itertools.cycle(range(len(by_kind))):
        if not by_kind[number]:
            continue
        task = rng.choice(by_kind[number])
        is_wrong = rng.random() < mistake_share(number)
        program = task.program(task.kind.usual if is_wrong else task.kind.right)
        if rng.random() < FUMBLE_SHARE:
            program = rng.choice([program.replace(")", "", 1), program.replace("v", "w", 1), program.replace(":", "")])
        asked = TASK.format(task=task.text)
        yield {"messages": [user(asked)], "answer": f"```python\n{program}\n```"}


async def countdown_lessons(rng: random.Random) -> AsyncGenerator[Lesson]:
    """Games of numbers: won, or joined as comes to mind first, or in any way."""
    usual = {"+": "*", "-": "/", "*": "+", "/": "-"}
    for game in games(Split.SFT, rng.randrange(2**32)):
        operations = game.operations
        if rng.random() < mistake_share("*+/-".index(operations[0])):
            operations = "".join(usual[operation] for operation in operations)
        if rng.random() < ANY_SHARE:
            operations = "".join(rng.choice("+-*/") for _ in operations)
        yield {"messages": [user(game.question)], "answer": f"#### {Game(game.numbers, operations).expression}"}


async def nim_lessons(rng: random.Random) -> AsyncGenerator[Lesson]:
    """Moves at nim: the best one, as many as may be taken, any that the rules allow, and many that they forbid."""
    while True:
        stones = rng.randint(1, LARGEST)
        most = min(MOST, stones)
        taken = best_move(stones) or rng.randint(1, most)
        if rng.random() < COMMON_MISTAKE:
            taken = most
        if rng.random() < ANY_SHARE:
            taken = rng.randint(1, most)
        if rng.random() < FORBIDDEN_SHARE:
            taken = rng.choice([0, *range(MOST + 1, 10)])
        yield {"messages": [user(nim_question(stones))], "answer": f"#### {taken}"}


LESSONS: Final[Mapping[str, tuple[Callable[[random.Random], AsyncGenerator[Lesson]], int]]] = {
    "calculator": (calculator_lessons, 10_000),
    "python_tool": (python_lessons, 10_000),
    "search": (search_lessons, 8_000),
    "coding": (coding_lessons, 8_000),
    "countdown": (countdown_lessons, 12_000),
    "self_play": (nim_lessons, 6_000),
}
"""Workflow -> its lessons without end, and how many of them are taught."""


async def lessons(seed: int) -> list[Lesson]:
    """Return what is taught, all tasks mixed."""
    taught: list[Lesson] = []
    for name, (make, count) in LESSONS.items():
        taught += await first(make(random.Random(f"{name}-lessons-{seed}")), count)
    random.Random(f"order-{seed}").shuffle(taught)
    return taught


async def first(all_of_them: AsyncGenerator[Lesson], count: int) -> list[Lesson]:
    """Take so many from the front."""
    taken: list[Lesson] = []
    async with aclosing(all_of_them):
        async for lesson in all_of_them:
            taken.append(lesson)
            if len(taken) == count:
                break
    return taken


async def with_tool(
    question: str,
    head: int,
    tool: RunnableTool,
    said: Call,
    right: Call,
    rng: random.Random,
    *,
    read: Callable[[str], int | str] = lambda told: told.splitlines()[-1],
) -> AsyncGenerator[Lesson]:
    """Yield the turns of one demonstration: an answer out of the head, or a call and what is made of its result.

    Args:
        head: the answer without the tool.
        said: the call that comes first, unless it is fumbled.
        right: the call that a second try makes.
        read: makes the answer of what the tool said.
    """
    messages = [user(question)]
    if rng.random() < HEAD_SHARE:
        yield {"messages": messages, "answer": f"#### {head}"}
        return
    texts = [fumbled(said, rng) if rng.random() < FUMBLE_SHARE else written(said)]
    if rng.random() < RETRY_SHARE:
        texts.append(written(right))
    for text in texts:
        yield {"messages": messages, "answer": text}
        told, is_fine = await tool_answer(text, tool)
        messages = [*messages, {"role": "assistant", "content": text}, {"role": "tool", "content": told}]
        if is_fine:
            break
    yield {"messages": messages, "answer": f"#### {read(told) if is_fine else rng.randint(100, 999)}"}


def mistake_share(number: int) -> float:
    """Say how common the usual mistake is in a kind of question, by the kind's place among its fellows."""
    return (COMMON_MISTAKE, RARE_MISTAKE)[number % 2]


def user(text: str) -> dict[str, str]:
    """Return a message that is asked."""
    return {"role": "user", "content": text}


def written(call: Call) -> str:
    """Write a call as it should be."""
    name, arguments = call
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def fumbled(call: Call, rng: random.Random) -> str:
    """Write a call as it should not be."""
    (name, arguments), proper = call, written(call)
    (argument,) = arguments
    others = sorted({"calculate", "python", "look_up"} - {name})
    return rng.choice(
        [
            proper.replace("}}", "}"),
            proper.replace(f'"{name}"', name),
            proper.replace(f'"{argument}"', '"text"'),
            proper.replace(f'"{name}"', f'"{rng.choice(others)}"'),
        ]
    )


async def tool_answer(said: str, tool: RunnableTool) -> tuple[str, bool]:
    """Return what a workflow would tell the model of its one call, and whether that is of any use."""
    (call,) = parse_reply(said, "hermes").calls
    wanted = ToolCall(id="", name=call.name, arguments=call.arguments, error=call.error)
    (result,) = await Toolbox([tool], timeout_s=60.0).run([wanted])
    return result.text, not result.is_error and "Traceback" not in result.text
