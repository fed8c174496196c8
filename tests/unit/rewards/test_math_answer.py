r"""What counts as the final answer of a text, and when two of them are equal.

Plain numbers are compared exactly and never raise; everything else is left to computer algebra, where it can be killed.
"""

from fractions import Fraction

import pytest
from anyio import to_thread
from hypothesis import given
from hypothesis import strategies as st

from areal_async.errors import RewardError
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


@pytest.mark.parametrize(
    "text",
    [
        "#### 3+4",
        "#### 3 + 4",
        "#### 42/6",
        "#### 7 * 1",
        "#### 3+4=7",
        "#### 7+",
        "#### 7!",
        r"\boxed{\frac{14}{2}}",
        r"\boxed{\sqrt{49}}",
        r"\boxed{2^3-1}",
        r"\boxed{\frac{3+4}{1}}",
        r"\boxed{\log_2 128}",
        r"\boxed{7x}",
        r"\boxed{3\frac{8}{2}}",
    ],
)
def test_a_sum_left_undone_is_no_answer(text: str) -> None:
    assert numbers_match(text, "7") is False


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"#### \frac{1}{2}", "0.5"),
        (r"\boxed{\frac{1}{2}}", "1/2"),
        (r"\boxed{-\dfrac{1}{2}}", "-0.5"),
        (r"\boxed{\frac12}", "0.5"),
        (r"\boxed{1\frac{1}{2}}", "1.5"),
        (r"\boxed{-2\frac{1}{4}}", "-9/4"),
        (r"It is \frac{1}{2}", "0.5"),
        (r"so $x = \frac{1}{2}$.", "0.5"),
        (r"so $x_1 = 7$.", "7"),
        (r"so \(x_1 = 7\)", "7"),
        (r"#### 7\text{ apples}", "7"),
        (r"#### $7$", "7"),
        (r"\boxed{\left(7\right)}", "7"),
        (r"\boxed{3 \times 10^5}", "300000"),
        (r"\boxed{3\cdot 10^{-2}}", "0.03"),
        (r"\boxed{300000}", r"3 \times 10^{5}"),
        (r"\boxed{12^\circ}", "12"),
        ("#### 1,080 m", "1080 m"),
    ],
)
def test_a_plain_number_is_read_however_it_is_written(text: str, answer: str) -> None:
    assert numbers_match(text, answer) is True


@pytest.mark.parametrize(
    ("text", "answer", "matches"),
    [
        ("#### 5 cm", "5 cm", True),
        ("#### 5cm", "5", True),
        ("#### 5", "5 cm", True),
        (r"#### 5\text{ cm}", "5 cm", True),
        (r"\boxed{5\,\mathrm{cm}}", "50 mm", True),
        ("#### 500 cm", "5 m", True),
        ("#### 5 m", "5 cm", False),
        ("#### 5 kg", "5 m", False),
        ("#### 5 g", "5 m", False),
        ("#### 2 hours", "120 minutes", True),
        ("#### 2 hours", "2 minutes", False),
        ("#### 12 cm^2", r"12\text{ cm}^2", True),
        ("#### 12 cm²", "0.0012 square meters", True),
        ("#### 12 cm", "12 cm^2", False),
        ("#### 12 cm^3", "12 cm^2", False),
        ("#### 36 km/h", "10 m/s", True),
        ("#### 150 cents", "1.5 dollars", True),
        ("#### 5 apples", "5 pears", True),
        ("#### 5 in all", "5 cm", True),
        ("#### 12 inches", "1 foot", True),
        ("#### 50%", "50%", True),
        (r"#### 50\%", "0.5", True),
        ("#### 0.5", "50%", True),
        ("#### 50 percent", "1/2", True),
        ("#### 50", "50%", True),
        ("#### 50%", "5%", False),
        ("#### 5000", "50%", False),
        ("#### 0.005", "50%", False),
    ],
)
def test_units_and_percent_count_where_both_tell_them(text: str, answer: str, *, matches: bool) -> None:
    assert numbers_match(text, answer) is matches


@pytest.mark.parametrize(
    ("text", "answer"), [("#### 7", r"\sqrt{49}"), ("#### 7", "[1, 2)"), ("#### 7", "x+1"), ("#### 7", "")]
)
def test_only_an_expected_answer_that_is_no_number_is_left_undecided(text: str, answer: str) -> None:
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
        # expressions
        (r"#### \frac{1}{2}", "0.5", 1.0),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1.0),
        (r"\boxed{3\sqrt{2}}", r"\sqrt{8}", 0.0),
        (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}", 1.0),
        (r"\boxed{x+1}", "1+x", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+1", 0.0),
        (r"\boxed{y = 2x+1}", "1+2x", 1.0),
        (r"\boxed{2\pi}", r"2 \pi", 1.0),
        (r"\boxed{6.283185}", r"2 \pi", 1.0),
        (r"\boxed{6.28}", r"2 \pi", 0.0),
        (r"so the area is $4\pi$.", r"4\pi", 1.0),
        (r"\boxed{\text{Monday}}", r"\text{Monday}", 1.0),
        (r"\boxed{\text{Sunday}}", r"\text{Monday}", 0.0),
        (r"\boxed{", r"\sqrt{8}", 0.0),
        ("", r"\sqrt{8}", 0.0),
        # intervals, tuples, sets
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        (r"\boxed{\left(1, \frac{4}{2}\cdot\sqrt{4}\right)}", r"(1, \sqrt{16})", 1.0),
        (r"\boxed{[1, 2)}", "[1,2)", 1.0),
        (r"\boxed{(1, 2)}", "[1,2)", 0.0),
        (r"\boxed{[1, 2]}", "[1,2)", 0.0),
        (r"\boxed{(2, 1)}", "(1,2)", 0.0),
        (r"\boxed{x \in (-\infty, \sqrt{8}]}", r"(-\infty, 2\sqrt{2}]", 1.0),
        (r"\boxed{(2,3) \cup (0,1)}", r"(0,1)\cup(2,3)", 1.0),
        (r"\boxed{(0,1) \cup (2,3]}", r"(0,1)\cup(2,3)", 0.0),
        (r"\boxed{(0,1)}", r"(0,1)\cup(2,3)", 0.0),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}", 1.0),
        (r"\boxed{2, 1}", r"\{1,2\}", 1.0),
        (r"\boxed{2 \text{ and } 1}", "1, 2", 1.0),
        ("#### x = 2 or x = 1", "1, 2", 1.0),
        (r"\boxed{1, 1, 2}", r"\{1,2\}", 1.0),
        (r"\boxed{1}", r"\{1,2\}", 0.0),
        (r"\boxed{1, 2, 3}", r"\{1,2\}", 0.0),
        (r"\boxed{\{3\}}", r"x = 3, x = 3", 1.0),
        (r"\boxed{(1, 2, 3)}", "(1,2,3)", 1.0),
        (r"\boxed{(1, 3, 2)}", "(1,2,3)", 0.0),
        (r"\boxed{((1,2),(3,4))}", "((1,2),(3,4))", 1.0),
        # many guesses, the question itself, or an answer left for the reader to find
        (r"\boxed{\sqrt{2}, \sqrt{3}, \sqrt{5}}", r"\sqrt{3}", 0.0),
        (r"\boxed{\sqrt{2} \text{ or } \sqrt{3}}", r"\sqrt{3}", 0.0),
        (r"\boxed{\int_0^1 2\pi x\,dx}", r"\pi", 0.0),
        (r"\boxed{\sum_{i=1}^{2} \sqrt{2}}", r"2\sqrt{2}", 0.0),
        (r"\boxed{\max(\sqrt{2}, \sqrt{3})}", r"\sqrt{3}", 0.0),
        (r"\boxed{\sqrt{3} = \sqrt{3}}", r"\sqrt{2}", 0.0),
        (r"\boxed{x}", r"\sqrt{2}", 0.0),
    ],
)
@pytest.mark.anyio
async def test_mathematics_is_compared_by_what_it_comes_to(text: str, answer: str, score: float) -> None:
    assert await latex_equivalent(text, answer) == score
    assert await final_number_matches(text, answer) == score


@pytest.mark.anyio
async def test_an_expected_answer_of_nothing_is_an_error_and_no_zero() -> None:
    with pytest.raises(RewardError, match="answer: got ' ', need what is expected"):
        await final_number_matches("#### 7", " ")


@pytest.mark.parametrize(
    "answer",
    ["He bought 3 apples, ate 1 of the 5 and gave 2 away, so some were left.", "So, add them.\nThen halve it.\n####"],
)
@pytest.mark.anyio
async def test_a_solution_that_does_not_say_its_answer_is_an_error_that_names_it(answer: str) -> None:
    with pytest.raises(RewardError, match=f"answer: got '{answer[:6]}.*need what is expected"):
        await final_number_matches("#### 4", answer)


@pytest.mark.anyio
async def test_plain_numbers_score_one_or_zero() -> None:
    assert await final_number_matches("3+4=7\n#### 7", "#### 7") == 1.0
    assert await final_number_matches("3+4=8\n#### 8", "#### 7") == 0.0


@pytest.mark.anyio
async def test_no_alarm_signal_is_used() -> None:
    """Only a main thread may set one, so it would raise here."""
    score = await to_thread.run_sync(latex_equivalent.__wrapped__, r"\boxed{\frac{1}{2}}", "0.5")

    assert score == 1.0
