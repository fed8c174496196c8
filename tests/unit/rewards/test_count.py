"""What is counted is the number that an answer settles on, in digits or in words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.count import WORDS, count_matches


@pytest.mark.parametrize(
    "text",
    [
        "3",
        " 3\n",
        "There are 3.",
        "There are 3 items in the image.",
        "**3**",
        "[3]",
        "The answer is [3].",
        r"\boxed{3}",
        "#### 3",
        "<answer> 3 </answer>",
        "<think>I see 4. No, 3.</think> <answer>3</answer>",
        "<think>4</think>\nThree",
        "A red disc, a green one.\nSo there are three things.",
        "three",
        "<answer>three</answer>",
        "Items: 3",
        "There are 3 things, one of them red.",
    ],
)
def test_the_right_number_is_worth_one(text: str) -> None:
    assert count_matches(text, "3") == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4",
        "33",
        "-3",
        "3 or 4",
        "three or four",
        "1, 2, 3",
        "one two three",
        "at least 3",
        "not 3",
        "3.5",
        "twenty-three",
        "threesome",
        "Three? No, 4.",
        "[3] or [4]",
        "<think>3</think>",
        "<think>3",
        "<answer>3",
        "３",
        "things",
    ],
)
def test_anything_else_is_worth_nothing(text: str) -> None:
    assert count_matches(text, "3") == 0.0


@pytest.mark.parametrize("answer", ["12", 12, "<answer> 12 </answer>"])
def test_rows_say_it_in_each_way_of_the_public_sets(answer: str | int) -> None:
    assert count_matches("There are twelve items.", answer) == 1.0
    assert count_matches("There are 11 items.", answer) == 0.0


@pytest.mark.parametrize("answer", ["", "many", "-1", "2.5", "３", "<answer></answer>"])
def test_an_answer_that_is_no_count_is_the_rows_mistake(answer: str) -> None:
    with pytest.raises(ValueError, match="need a whole number"):
        count_matches("1", answer)


def test_each_word_is_its_number() -> None:
    assert [count_matches(f"There are {word}.", number) for number, word in enumerate(WORDS)] == [1.0] * len(WORDS)


@given(st.text(alphabet="0123456789-.,[]\\{}#<>/ threoneanswerboxed\n", max_size=60))
def test_no_text_makes_it_raise(text: str) -> None:
    assert count_matches(text, "3") in (0.0, 1.0)
