"""The page of a comparison shows both answers to the rows that differ, and nothing of them acts on the page."""

import re

import msgspec

from areal_async.monitor.report import comparison as page
from areal_async.versions.comparison import Comparison, Side, changed_rows
from tests.unit.versions.test_comparison import answer

EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">\x1b[2J'


def render(num_rows: int = 1, *, text: str = EVIL) -> str:
    given = [answer("a", row, 0, text=text) for row in range(num_rows)]
    given += [answer("b", row, 1, text=text) for row in range(num_rows)]
    failed = msgspec.structs.replace(answer("a", num_rows, None), error=f"too late {EVIL}")
    given += [failed, answer("b", num_rows, 1)]
    sides = Side(name=EVIL), Side(name="b", model=EVIL, settings={"rollout.x": EVIL})
    made = Comparison.of(*sides, num_samples=1, rows={"w": num_rows + 1}, question=None, by=EVIL).with_result(given)
    return page.render(made, changed_rows(given), {("w", row): EVIL for row in range(num_rows)})


def test_nothing_that_it_is_given_is_markup() -> None:
    text = render()

    assert not re.search(r"<script|<img|onerror=\"|\x1b", text)
    assert text.count("&lt;script&gt;") >= 6, "sides, their settings, the row, both answers"


def test_it_shows_both_answers_and_why_there_is_none() -> None:
    text = render(text="4+4=8")

    assert text.count(">4+4=8</div>") == 2
    assert "reward 0, 4 tokens" in text
    assert "reward 1, 4 tokens" in text
    assert "too late" in text
    assert "Rows that differ: 1<" in text


def test_of_many_rows_it_shows_the_first_and_says_how_many_more_there_are() -> None:
    text = render(page.MAX_ROWS + 3, text="x" * (page.MAX_CHARACTERS + 9))

    assert text.count("<details>") == page.MAX_ROWS
    assert "3 more are in answers.jsonl" in text
    assert "x" * (page.MAX_CHARACTERS + 1) not in text


def test_it_fetches_nothing() -> None:
    assert not re.search(r"https?:|<link|@import|url\(", render(text="plain"))
