"""A reward of parts is their weighted sum, tells every part, and fails as its part fails."""

import math
from typing import Any

import anyio
import pytest

from areal_async.errors import RewardError
from rewards.answer_format import has_sections, sections
from rewards.combination import weighted
from rewards.length import overlong_penalty
from rewards.text_match import text_matches

pytestmark = pytest.mark.anyio


async def worth(value: Any, *, after_s: float = 0.0) -> Any:
    await anyio.sleep(after_s)
    return value


async def test_the_sum_is_weighted_and_every_part_is_told() -> None:
    info = {"num_turns": 1.0}

    score = await weighted({"right": (1.0, worth(1.0)), "short": (0.5, -0.4), "neat": (0.1, True)}, info=info)

    assert score == pytest.approx(1.0 - 0.2 + 0.1)
    assert info == {"num_turns": 1.0, "reward_right": 1.0, "reward_short": -0.4, "reward_neat": 1.0}


async def test_parts_run_beside_each_other() -> None:
    met = anyio.Event()

    async def waiting() -> float:
        with anyio.fail_after(60):
            await met.wait()
        return 1.0

    async def meeting() -> float:
        met.set()
        return 1.0

    assert await weighted({"first": (1.0, waiting()), "second": (1.0, meeting())}) == 2.0


async def test_a_part_that_fails_fails_the_whole_as_itself_and_tells_nothing() -> None:
    info: dict[str, float] = {}

    with pytest.raises(RewardError, match="need at least one and none that is empty"):
        await weighted({"bad": (1.0, text_matches("", "")), "slow": (1.0, worth(1.0, after_s=60))}, info=info)

    assert info == {}


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "1.0"])
async def test_a_part_that_is_no_number_is_an_error(value: Any) -> None:
    with pytest.raises(RewardError, match="reward part odd: got .*, need a finite number"):
        await weighted({"odd": (1.0, worth(value))})


@pytest.mark.parametrize("parts", [{}, {"right": (math.nan, 1.0)}])
async def test_no_parts_or_no_weight_is_refused(parts: Any) -> None:
    with pytest.raises(ValueError, match="need at least one, each with a finite weight"):
        await weighted(parts)


@pytest.mark.parametrize(("num_tokens", "penalty"), [(0, 0.0), (768, 0.0), (896, -0.5), (1024, -1.0), (9999, -1.0)])
def test_the_penalty_falls_evenly_over_the_slack(num_tokens: int, penalty: float) -> None:
    assert overlong_penalty(num_tokens, limit=1024, slack=256) == pytest.approx(penalty)


@pytest.mark.parametrize("slack", [0, 11])
def test_a_slack_of_nothing_or_beyond_the_limit_is_refused(slack: int) -> None:
    with pytest.raises(ValueError, match="need more than 0 and no more than the limit"):
        overlong_penalty(1, limit=10, slack=slack)


def test_sections_are_found_in_their_order() -> None:
    assert sections("<think>\nso\n</think>\n<answer> 7 </answer>\n") == {"think": "so", "answer": "7"}
    assert has_sections("<a>1</a>", tags=("a",)) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<think>so</think>",
        "<answer>7</answer><think>so</think>",
        "<think>so</think><answer></answer>",
        "<think> </think><answer>7</answer>",
        "<think>so</think><answer>7</answer><answer>8</answer>",
        "<think>so<think></think></think><answer>7</answer>",
        "<think>so</think> and <answer>7</answer>",
        "<think>so</think><answer>7</answer> or 8",
        "<think>so <answer>7</answer></think>",
        "</think><think>so<answer>7</answer>",
        "<THINK>so</THINK><ANSWER>7</ANSWER>",
    ],
)
def test_any_other_layout_is_none(text: str) -> None:
    assert has_sections(text) == 0.0
