"""A game is won by a sum that comes to the target and uses only the numbers given."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.countdown import target_reached, worked_out

NUMBERS, TARGET = [8, 2, 4, 4], 24


@pytest.mark.parametrize(
    "text",
    [
        "(8-2)*4",
        "First I try 8*4=32.\n(8 - 2) * 4 = 24",
        "#### (8-2)*4=24",
        r"\boxed{(8-2)\times 4}",
        r"$(8-2)\cdot4=24$",
        "(8−2)×4.",
        "8*2+4+4",
        "8*4-4*2",
        "((((8-2))))*4",
        "(8-2)*4\n####",
        "4*4+8",
    ],
)
def test_a_sum_over_the_given_numbers_wins(text: str) -> None:
    assert target_reached(text, NUMBERS, TARGET) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "24",
        "#### 24",
        "8*3",
        "8+8+8",
        "(8-2)*4=25",
        "(8-2)*4=",
        "=24",
        "(8-2)*4=24=24",
        "(8-2)*4 or 8*3",
        "(8-2)*4+0",
        "(8-2)*4*1",
        "-8+32",
        "8-2*4",
        "(8-2)4",
        "(8-2)*4)",
        "((8-2)*4",
        "8/(2-2)",
        "8//2",
        "2**4+8",
        "2^4+8",
        "24.0",
        "8.0*4-4*2",
        "0x18",
        "1e1",
        "int('24')",
        "(lambda: 24)()",
        "8*4-4*2 # yes",
        "８*4-4*2",
        "(8-2)*4\nor so",
        "(" * 100 + "8",
        "9" * 1000,
    ],
)
def test_anything_else_loses(text: str) -> None:
    assert target_reached(text, NUMBERS, TARGET) == 0.0


def test_a_number_given_twice_may_be_used_twice() -> None:
    assert target_reached("4+4", [4, 4], 8) == 1.0
    assert target_reached("4+4", [4, 8], 8) == 0.0


def test_thirds_are_exact() -> None:
    assert target_reached("8/(3-8/3)", [8, 8, 3, 3], 24) == 1.0


def test_a_game_without_numbers_is_the_rows_mistake() -> None:
    with pytest.raises(ValueError, match="numbers: got none"):
        target_reached("1", [], 1)


@given(
    st.recursive(
        st.integers(0, 99).map(str),
        lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: f"({''.join(parts)})"),
        max_leaves=8,
    )
)
def test_expressions_come_to_what_python_makes_of_them(expression: str) -> None:
    assert worked_out(expression)[0] == eval(expression)


@given(st.text(alphabet="0123456789+-*/()= ", max_size=130))
def test_no_text_makes_it_raise(text: str) -> None:
    assert target_reached(text, [1, 2, 3], 6) in (0.0, 1.0)
