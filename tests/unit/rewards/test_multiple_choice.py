"""A letter counts where an answer is given, and only when it is one letter."""

import pytest

from rewards.multiple_choice import choice_matches

CAPITALS = {"A": "London", "B": "Rome", "C": "Paris", "D": "A town"}


@pytest.mark.parametrize(
    "text",
    [
        "C",
        "(C)",
        "C.",
        "#### C",
        "####C)",
        "#### c",
        r"\boxed{C}",
        r"\boxed{\text{C}}",
        r"so it is \boxed{(C)}.",
        "**C**",
        "It is not A.\nThe answer is C.",
        "The answer is (C).",
        "Answer: C",
        'Answer: "C"',
        "Answer: “C”",
        "Answer: 'C'",
        'Answer: **"C"**',
        '"C"',
        '#### "C"',
        "Answer is C.",
        "So A is wrong and the answer is C",
        "Therefore the correct option is C",
        "A long way to go.\nI choose (C)",
        r"The answer is $\boxed{C}$",
        "#### C) Paris",
        "C. Paris",
        "The answer is B.\nNo.\n#### C",
    ],
)
def test_the_letter_that_an_answer_settles_on_counts(text: str) -> None:
    assert choice_matches(text, "C") == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "B",
        "A B C D",
        "ABCD",
        "A, B, C, D",
        "#### A or C",
        "#### C or D",
        "(A)(B)(C)(D)",
        r"\boxed{A, C}",
        r"\boxed{A} \boxed{B}",
        "C\nD",
        "The answer is A. The answer is C.",
        "The answer is C. The answer is D.",
        "The answer is C or D.",
        "The answer is either B or C",
        "The answer is Canada",
        "Consider the case",
        "Cats are nice",
        "C is wrong",
        "vitamin C",
        "#### E",
        "#### С",
        "#### Ｃ",
        "The answer is " + "C " * 400,
        "#### not C",
        "C) Paris or D) Rome",
        "Answer: C, unless it is B",
        '"C" or "D"',
        "Answer: 'C' or 'D'",
        "I don't think the answer is C",
        "The wrong answer is C",
        "The answer: C is wrong",
        "Answer: C?",
        "The answer is C's",
    ],
)
def test_what_settles_on_no_letter_or_another_does_not(text: str) -> None:
    assert choice_matches(text, "C") == 0.0


def test_a_letter_with_another_choices_text_does_not_count() -> None:
    assert choice_matches("#### C) Paris", "C", CAPITALS) == 1.0
    assert choice_matches("#### C) Rome", "C", CAPITALS) == 0.0
    assert choice_matches("#### D) A town", "D", CAPITALS) == 1.0


def test_letters_beyond_the_choices_are_no_answer() -> None:
    assert choice_matches("#### D", "C", "ABC") == 0.0
    assert choice_matches("#### E", "E", "ABCDE") == 1.0


def test_an_expected_letter_that_is_no_choice_is_the_rows_mistake() -> None:
    with pytest.raises(ValueError, match="got 'E', need one of the choices A, B, C, D"):
        choice_matches("#### E", "E")
