r"""What counts as the final answer of a text, and when two of them are equal.

Plain numbers are compared exactly and never raise; everything else is left to computer algebra, where it can be killed.
"""

from fractions import Fraction

import pytest
from anyio import to_thread
from hypothesis import given
from hypothesis import strategies as st

from rewards.math_answer import (
    final_number_matches,
    last_number,
    latex_equivalent,
    marked_answer,
    numbers_match,
    plain_number,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3+4=7\n#### 7", "3+4=7\n#### 7"),
        ("Tom has 3+4=<<3+4=7>>7 apples.\n#### 7", "7"),
        ("#### 7 apples", "7"),
        ("####7", "7"),
        ("#### 5\nNo, wait.\n#### 7", "7"),
        ("#### 7\n\nThat was easy, wasn't it, 8 year old?", "7"),
        ("#### 1,080", "#### 1080"),
        ("#### 1080", "#### 1,080"),
        ("#### $18.00 per day", "18"),
        (r"#### \$18", "18"),
        ("#### 18.50", "18.5"),
        ("#### .5", "0.5"),
        ("#### 0.5", "1/2"),
        ("#### 2 / 4", "0.5"),
        ("#### 50%", "50"),
        (r"#### 50\%", "50"),
        ("#### -3", "-3"),
        ("#### −3", "-3"),
        ("#### +3", "3"),
        ("#### x = 7", "7"),
        ("#### (7)", "7"),
        ("#### 007", "7"),
        (r"so \boxed{7}", "7"),
        (r"\boxed{5}, no, \boxed{7} it is", "7"),
        (r"\boxed{1{,}080}", "1080"),
        (r"\boxed{12} #### 7", "7"),
        ("The answer is 7.", "7"),
        ("She pays 10-3=7", "7"),
        ("It costs $1,234.50!", "1234.5"),
        ("#### 7", "  7\n"),
    ],
)
def test_equal_numbers_match(text: str, answer: str) -> None:
    assert numbers_match(text, answer) is True


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 8", "7"),
        ("", "7"),
        ("####", "7"),
        ("7\n####", "7"),
        ("I do not know", "7"),
        ("#### seven", "7"),
        ("#### 7 or 8", "7"),
        ("#### -7", "7"),
        ("#### 70", "7"),
        ("#### 7.01", "7"),
        ("#### 1,2", "12"),
        ("#### 1.2.3", "1.2"),
        ("first 7, then 8", "7"),
        (r"\boxed{8} although 7", "7"),
        ("#### 1/3", "0.333"),
        ("#### 7/0", "7"),
    ],
)
def test_different_numbers_do_not_match(text: str, answer: str) -> None:
    assert numbers_match(text, answer) is False


@pytest.mark.parametrize("text", ["#### 3+4", "#### 3 + 4", "#### 42/6", "#### 7 * 1", "#### 3+4=7", "#### 7+"])
def test_a_sum_left_undone_is_no_answer(text: str) -> None:
    assert numbers_match(text, "7") is False


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"#### \frac{1}{2}", "0.5"),
        (r"\boxed{\frac{1}{2}}", "1/2"),
        (r"It is \frac{1}{2}", "0.5"),
        (r"#### 7\text{ apples}", "7"),
        ("#### 5x", "5"),
        ("#### 2^3", "8"),
        ("#### 7", r"\sqrt{49}"),
        ("#### 7", "[1, 2)"),
        ("#### 7", "x+1"),
        ("#### 7", ""),
    ],
)
def test_mathematics_is_left_undecided(text: str, answer: str) -> None:
    assert numbers_match(text, answer) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#### 7", "7"),
        ("no mark 7", None),
        (r"\boxed{\frac{1}{2}} done", r"\frac{1}{2}"),
        (r"\boxed{cut off", None),
        (r"\boxed{a}} tail", "a"),
        ("#### ", ""),
    ],
)
def test_marked_answer_is_the_last_one_marked(text: str, expected: str | None) -> None:
    assert marked_answer(text) == expected


@given(st.fractions().filter(lambda value: value.denominator != 1 and len(str(value)) <= 64))
def test_every_fraction_is_read_exactly(value: Fraction) -> None:
    assert plain_number(str(value)) == value


@given(st.integers(min_value=-(10**15), max_value=10**15))
def test_thousands_separators_change_nothing(value: int) -> None:
    assert plain_number(f"{value:,}") == plain_number(str(value)) == value


@given(st.text(), st.text())
def test_no_text_makes_the_comparison_of_numbers_raise(text: str, answer: str) -> None:
    assert numbers_match(text, answer) in (True, False, None)
    assert numbers_match(f"#### {text}", answer) in (True, False, None)


def test_a_number_of_thousands_of_digits_is_no_answer() -> None:
    endless = "9" * 10_000

    assert last_number(endless) is None
    assert numbers_match(f"#### {endless}", "7") is False


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        (r"#### \frac{1}{2}", "0.5", 1.0),
        (r"\boxed{\frac{2}{4}}", r"$\frac{1}{2}$", 1.0),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1.0),
        (r"\boxed{3\sqrt{2}}", r"\sqrt{8}", 0.0),
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        (r"\boxed{x+1}", "1+x", 1.0),
        (r"\boxed{", r"\sqrt{8}", 0.0),
        (r"#### 7\text{ apples}", "7", 1.0),
    ],
)
@pytest.mark.anyio
async def test_mathematics_is_compared_by_what_it_comes_to(text: str, answer: str, score: float) -> None:
    assert await latex_equivalent(text, answer) == score
    assert await final_number_matches(text, answer) == score


@pytest.mark.anyio
async def test_plain_numbers_score_one_or_zero() -> None:
    assert await final_number_matches("3+4=7\n#### 7", "#### 7") == 1.0
    assert await final_number_matches("3+4=8\n#### 8", "#### 7") == 0.0


@pytest.mark.anyio
async def test_no_alarm_signal_is_used() -> None:
    """Only a main thread may set one, so it would raise here."""
    score = await to_thread.run_sync(latex_equivalent.__wrapped__, r"\boxed{\frac{1}{2}}", "0.5")

    assert score == 1.0
