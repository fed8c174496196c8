"""No wrong answer of the table scores, and next to no right one is missed."""

import time
from collections import defaultdict
from itertools import groupby

from rewards.math_algebra import load
from rewards.math_answer import latex_equivalent, numbers_match
from tests.unit.rewards.corpus import Pair, pairs

FEWEST_PAIRS = 600
LEAST_RECALL = 0.97


def score(pair: Pair) -> bool:
    """Score one pair as a workflow's reward does, in this process instead of a worker."""
    verdict = numbers_match(pair.text, pair.expected)
    if verdict is None:
        verdict = latex_equivalent.__wrapped__(pair.text, pair.expected) == 1.0  # type: ignore[attr-defined]
    return verdict


def test_wrong_answers_never_score_and_right_ones_do_but_for_those_listed() -> None:
    table = pairs()
    load()
    took_s: dict[str, list[float]] = defaultdict(list)
    scores = []
    for pair in table:
        started = time.process_time()
        scores.append(score(pair))
        took_s[pair.kind].append(time.process_time() - started)

    print(f"\n{'class':44} right  scored  wrong  scored  median ms   max ms")
    scored = list(zip(table, scores, strict=True))
    for kind, group in groupby(sorted(scored, key=lambda one: one[0].kind), key=lambda one: one[0].kind):
        members = list(group)
        right = [is_scored for pair, is_scored in members if pair.is_right]
        wrong = [is_scored for pair, is_scored in members if not pair.is_right]
        spent = sorted(took_s[kind])
        print(
            f"{kind:44} {len(right):5} {sum(right):7} {len(wrong):6} {sum(wrong):7}"
            f" {1000 * spent[len(spent) // 2]:10.2f} {1000 * spent[-1]:8.1f}"
        )
    assert len(set(table)) >= FEWEST_PAIRS
    assert [pair for pair, is_scored in scored if is_scored and not pair.is_right] == []
    assert [pair for pair, is_scored in scored if pair.is_right and is_scored is bool(pair.missed)] == [], (
        "or not listed"
    )
    num_right = sum(pair.is_right for pair in table)
    assert sum(is_scored for pair, is_scored in scored if pair.is_right) >= LEAST_RECALL * num_right
