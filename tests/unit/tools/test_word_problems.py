"""The tiny task: its solutions are right where they should be, its splits share nothing, and its answers are short."""

import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from tools.word_problems import (
    FAMILIES,
    LARGEST_NUMBER,
    Mistake,
    Problem,
    Split,
    demonstration,
    mistaken_solution,
    problems,
    right_solution,
)

DATA = Path(__file__).parents[3] / "configs" / "data"


def draw(split: Split, count: int, seed: int = 1) -> list[Problem]:
    return list(itertools.islice(problems(FAMILIES, split, random.Random(seed)), count))


def shipped(split: Split) -> list[dict[str, str]]:
    lines = (DATA / f"gsm8k_tiny_{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def sums_hold(answer: str) -> bool:
    """Whether every line `a+b=c` of a worked answer is right arithmetic and the last result is the one given."""
    *sums, final = answer.split("\n")
    results = [line.split("=") for line in sums]
    return all(eval(left) == int(right) for left, right in results) and final == f"#### {results[-1][1]}"


def test_splits_share_no_numbers_within_a_family() -> None:
    seen = {
        split: {(p.family.name, tuple(sorted(p.numbers.items()))) for p in draw(split, 1500, seed)}
        for seed, split in enumerate(Split)
    }

    for one, other in itertools.combinations(Split, 2):
        assert not seen[one] & seen[other]


def test_shipped_splits_share_no_question() -> None:
    questions = {split: [row["question"] for row in shipped(split)] for split in Split}

    assert all(len(set(asked)) == len(asked) for asked in questions.values())
    assert len(set().union(*questions.values())) == sum(map(len, questions.values()))


@pytest.mark.parametrize("split", [Split.TRAIN, Split.TEST])
def test_answers_that_rewards_compare_with_are_right(split: Split) -> None:
    assert all(sums_hold(row["answer"]) for row in shipped(split))
    assert all(set(row) == {"question", "answer"} for row in shipped(split))


def test_shipped_demonstrations_name_their_mistakes() -> None:
    rows = shipped(Split.SFT)
    shares = Counter(row["mistake"] for row in rows)

    assert 0.4 < shares[None] / len(rows) < 0.6
    assert all(not sums_hold(row["answer"]) for row in rows if row["mistake"] == Mistake.SLIP)
    assert all(sums_hold(row["answer"]) for row in rows if row["mistake"] != Mistake.SLIP)


def test_a_right_solution_uses_every_number_asked_about() -> None:
    for problem in draw(Split.TRAIN, 200):
        asked = set(re.findall(r"\d+", problem.question))
        used = {str(number) for one in right_solution(problem).sums for number in (one.left, one.right)}

        assert asked <= used


@pytest.mark.parametrize("mistake", list(Mistake))
def test_a_mistake_never_leads_to_the_right_answer(mistake: Mistake) -> None:
    rng = random.Random(1)

    for problem in draw(Split.SFT, 500):
        assert mistaken_solution(problem, mistake, rng).answer != right_solution(problem).answer


def test_numbers_stay_within_two_digits_whoever_solves() -> None:
    rng = random.Random(1)

    for problem in draw(Split.SFT, 1000):
        for solution in (right_solution(problem), *(mistaken_solution(problem, mistake, rng) for mistake in Mistake)):
            assert all(max(one.left, one.right, one.result) <= LARGEST_NUMBER for one in solution.sums)
            assert all(min(one.left, one.right, one.result) >= 0 for one in solution.sums)


def test_no_problem_is_drawn_twice() -> None:
    questions = [problem.question for problem in draw(Split.TEST, 3000)]

    assert len(set(questions)) == len(questions)


def test_same_seed_draws_the_same_problems() -> None:
    assert draw(Split.TEST, 100, seed=3) == draw(Split.TEST, 100, seed=3)
    assert draw(Split.TEST, 100, seed=3) != draw(Split.TEST, 100, seed=4)


def test_half_of_the_families_are_mostly_solved_wrongly() -> None:
    mostly_wrong = [family for family in FAMILIES if family.mistake_share > 0.5]

    assert len(mostly_wrong) == len(FAMILIES) / 2


def test_demonstrations_make_their_familys_mistake_as_often_as_it_says() -> None:
    rng = random.Random(1)
    drawn = draw(Split.SFT, 4000)
    made = Counter(p.family.name for p in drawn if demonstration(p, rng, slip_share=0.06)[1] is Mistake.USUAL)
    asked = Counter(p.family.name for p in drawn)

    for family in FAMILIES:
        assert abs(made[family.name] / asked[family.name] - family.mistake_share) < 0.1
