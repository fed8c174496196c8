"""Texts are the same when their words are; every needless word costs, and no repetition pays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.errors import RewardError
from rewards.text_match import same_text, shared_words, text_matches, token_f1

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Paris", "paris"),
        ("  The Eiffel   Tower. ", "eiffel tower"),
        ("J.R.R. Tolkien", "J R R Tolkien"),
        ("Caf\u00e9", "Cafe\u0301"),
        ("The", "the"),
        ("?!", "?!"),
    ],
)
def test_spelling_does_not_count(said: str, expected: str) -> None:
    assert same_text(said, expected)


@pytest.mark.parametrize(
    ("said", "expected"),
    [("Paris or Rome", "Paris"), ("", "the"), ("!", "?"), ("７", "7"), ("٧", "7"), ("x²", "x2"), ("Parisian", "Paris")],
)
def test_other_words_count(said: str, expected: str) -> None:
    assert not same_text(said, expected)


@pytest.mark.parametrize(
    ("said", "expected"),
    [("-5", "5"), ("- 5", "5"), ("+5", "5"), ("<5", ">5"), ("<5", "5"), ("(-5)", "(5)"), ("-x", "x"), ("x=-5", "x=5")]
    + [("1.5", "1/5"), ("1.5", "15"), ("10-15", "10 15"), (".5", "5"), ("5%", "5"), ("C++", "C"), ("C#", "C")],
)
async def test_signs_and_what_stands_between_digits_count(said: str, expected: str) -> None:
    assert not same_text(said, expected)
    assert same_text(said, f" {said}. ")
    assert await text_matches(f"#### {said}", expected) == 0.0
    assert await token_f1(f"#### {said}", expected, at_least=1.0) == 0.0


def test_a_minus_sign_is_one_however_it_is_written() -> None:
    assert same_text("−5 degrees", "- 5 degrees")
    assert same_text("twenty-one", "twenty one")


async def test_what_is_marked_is_the_answer_and_the_nearest_expected_one_counts() -> None:
    assert await text_matches("Rome? No.\n#### Paris", "Paris") == 1.0
    assert await text_matches("Paris", ["Lutetia", "Paris"]) == 1.0
    assert await text_matches("It is Paris", "Paris") == 0.0
    assert await token_f1("the city of Paris", ["Rome", "Paris"]) == pytest.approx(0.5)
    assert await token_f1("the city of Paris", ["Rome", "Paris"], at_least=0.6) == 0.0


def test_shared_words_by_hand() -> None:
    assert shared_words("big red dog", "red dog runs") == pytest.approx(2 / 3)
    assert shared_words("dog dog dog dog", "red dog") == pytest.approx(2 * 1 / (4 + 2))
    assert shared_words("cat", "dog") == 0.0


def test_naming_every_word_there_is_pays_next_to_nothing() -> None:
    everything = " ".join(f"word{number}" for number in range(1000)) + " red dog"

    assert shared_words(everything, "red dog") < 0.01


@given(st.text(max_size=50), st.text(max_size=50))
def test_shared_words_are_the_same_both_ways_and_whole_only_for_the_same_words(one: str, other: str) -> None:
    score = shared_words(one, other)

    assert 0.0 <= score <= 1.0
    assert shared_words(other, one) == score
    assert shared_words(one, one) == 1.0


@pytest.mark.parametrize("answers", [[], "", ["Paris", " "]])
async def test_an_empty_expected_answer_is_an_error(answers: object) -> None:
    with pytest.raises(RewardError, match="need at least one and none that is empty"):
        await text_matches("", answers)  # type: ignore[arg-type]
