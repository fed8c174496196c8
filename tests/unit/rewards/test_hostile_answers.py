"""No reward pays for what is no answer, and none takes long over it."""

import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio
import pytest

from areal_async.errors import RewardError
from areal_async.sandbox import SandboxLimits
from rewards.answer_format import has_sections
from rewards.code_tests import passes_all, program_in
from rewards.count import count_matches
from rewards.countdown import target_reached
from rewards.json_schema import json_matches
from rewards.math_answer import final_number_matches
from rewards.multiple_choice import choice_matches
from rewards.text_match import text_matches, token_f1
from tests.unit.rewards.hostile import MALFORMED

pytestmark = pytest.mark.anyio

MOST_S: Final = 60.0
"""The limit of the slowest reward and room for a worker to start on a busy machine."""

AWAITED: Final[dict[str, Callable[[str], Awaitable[float]]]] = {
    "a number": lambda text: final_number_matches(text, "#### 7"),
    "a root": lambda text: final_number_matches(text, r"\sqrt{7}"),
    "an interval": lambda text: final_number_matches(text, r"[1, \infty)"),
    "a set": lambda text: final_number_matches(text, r"\{1, \sqrt{2}\}"),
    "a text": lambda text: text_matches(text, ["seven", "7"]),
    "shared words": lambda text: token_f1(text, "the seven hills", at_least=0.5),
    "a program": lambda text: passes_all(text, [{"stdin": "", "stdout": "7"}], limits=SandboxLimits(wall_s=2.0)),
    "a document": lambda text: json_matches(text, {"type": ["object", "array", "number"], "items": {"type": "array"}}),
}
PLAIN: Final[dict[str, Callable[[str], Any]]] = {
    "a choice": lambda text: choice_matches(text, "C"),
    "a count": lambda text: count_matches(text, 7),
    "a game": lambda text: target_reached(text, [3, 4], 7),
    "a layout": has_sections,
}


@pytest.fixture(scope="module")
def anyio_backend() -> object:
    return "asyncio", {"use_uvloop": True}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", AWAITED)
async def test_no_reward_in_a_worker_pays_for_it(kind: str) -> None:
    for name, text in MALFORMED.items():
        try:
            with anyio.fail_after(MOST_S):
                outcome: float | str = await AWAITED[kind](text)
        except RewardError as exc:
            outcome = str(exc)

        may_take_too_long = kind == "a program" and "was killed" in str(outcome)
        assert outcome == 0.0 or may_take_too_long, f"{name}: it may not break a reward"


@pytest.mark.parametrize("kind", PLAIN)
def test_no_reward_in_the_loop_pays_for_it_or_holds_the_loop_up(kind: str) -> None:
    for name, text in MALFORMED.items():
        started = time.process_time()

        assert PLAIN[kind](text) == 0.0, name

        assert time.process_time() - started < 0.5, name


def test_finding_a_program_takes_no_time() -> None:
    for name, text in MALFORMED.items():
        started = time.process_time()

        program_in(text)

        assert time.process_time() - started < 0.5, name
