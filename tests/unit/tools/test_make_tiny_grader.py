"""The lessons of the grader are asked as the workflow asks, and graded by the rule that the run is scored by."""

import itertools
from typing import Any

from rewards.judge import TEN, parse_score, score_request
from rewards.math_answer import numbers_match
from tools import make_tiny_grader
from tools.word_problems import FAMILIES, Split
from workflows.judge import TEMPLATE


def lessons(split: Split, number: int) -> list[dict[str, Any]]:
    return list(itertools.islice(make_tiny_grader.lessons(split, seed=1), number))


def parts(lesson: dict[str, Any]) -> tuple[str, str]:
    """Return the right answer and the one to grade."""
    text = lesson["messages"][0]["content"]
    reference = text.partition("Right answer:\n")[2].partition("\n\nAnswer to grade:")[0]
    return reference, text.partition("<answer>\n")[2].partition("\n</answer>")[0]


def test_half_of_the_lessons_are_right_answers_by_the_run_s_own_rule() -> None:
    rows = lessons(Split.SFT, 200)

    for row in rows:
        reference, answer = parts(row)
        expected = TEN.high if numbers_match(answer, reference) is True else TEN.low
        assert parse_score(row["answer"], TEN) == expected, row
        asked = score_request(TEMPLATE, question="", answer=answer, reference=reference)
        assert row["messages"] == [{"role": "user", "content": asked}]
    assert 70 < sum(parse_score(row["answer"], TEN) == TEN.high for row in rows) < 130
    by_family = [parse_score(row["answer"], TEN) for row in rows[:: len(FAMILIES)]]
    assert len(set(by_family)) == 2, "the kind of problem tells nothing"


def test_same_seed_gives_the_same_lessons() -> None:
    assert lessons(Split.SFT, 50) == lessons(Split.SFT, 50)


def test_shipped_grader_tells_right_from_wrong() -> None:
    shares = make_tiny_grader.shares_agreed(make_tiny_grader.MODEL, num_answers=64, seed=2)

    assert min(shares.values()) >= 0.75, shares  # of 1,024: 0.99 of the right ones, 0.85 of the wrong ones
