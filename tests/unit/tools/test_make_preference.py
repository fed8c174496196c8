"""Pairs are of a right and a worse answer to problems that no run is asked, and the shipped file is what is made."""

import itertools
import json

from rewards.math_answer import numbers_match
from tools.make_preference import NUM_PAIRS, PAIRS, pairs
from tools.word_problems import Split


def test_the_preferred_answer_is_right_and_the_other_is_wrong_or_unfinished() -> None:
    for row in itertools.islice(pairs(Split.TEST, 2), 400):
        assert numbers_match(row["chosen"], row["chosen"]) is True
        is_finished = row["kind"] != "cut short"
        assert ("####" in row["rejected"]) is is_finished
        assert not is_finished or numbers_match(row["rejected"], row["chosen"]) is False, row


def test_the_shipped_pairs_are_those_that_the_seed_makes() -> None:
    shipped = [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]

    assert len(shipped) == NUM_PAIRS
    assert shipped[:200] == list(itertools.islice(pairs(Split.SFT, 1), 200))


def test_no_question_of_a_run_was_judged_in_a_pair() -> None:
    folder = PAIRS.parent
    asked = {json.loads(line)["question"] for line in PAIRS.read_text(encoding="utf-8").splitlines()}
    for name in ("gsm8k_tiny_train.jsonl", "gsm8k_tiny_test.jsonl"):
        rows = (folder / name).read_text(encoding="utf-8").splitlines()
        assert asked.isdisjoint(json.loads(row)["question"] for row in rows)
