"""Whatever is said to a mathematical reward is worth 0.0 or 1.0, soon, and takes no worker down."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.rollout.rewards import process
from rewards import math_algebra
from rewards.math_answer import final_number_matches, latex_equivalent, numbers_match
from tests.unit.rewards.hostile import MATHEMATICS

EXPECTED = (
    *("7", r"\sqrt{7}", r"[1, \infty)", r"\{1, \sqrt{2}\}", r"(x+1)^{1000}", "n!", r"\binom{5}{2}"),
    *(r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "y=2x+1", "x>3", "3 m"),
)
MOST_VALUES = 10_000
"""Of nodes of expressions, computed for one pair: at 0.1 ms a node, a second."""
SOUP = st.lists(
    st.sampled_from(
        [
            *(
                r"\frac",
                "{",
                "}",
                "(",
                ")",
                "[",
                "]",
                r"\{",
                r"\}",
                "^",
                "_",
                r"\sqrt",
                r"\boxed{",
                "####",
                "\n",
                "$",
                "1",
            ),
            *(
                "2",
                "10",
                "3.5",
                "99999",
                "x",
                "y",
                "n",
                "e",
                "i",
                "a_1",
                "f(x)",
                "+",
                "-",
                "*",
                "/",
                "=",
                "<",
                ">",
                r"\le",
            ),
            *(r"\in", r"\cup", ",", ";", ":", " ", r"\pi", r"\infty", r"\pm", "!", "|", r"\\", "&", r"\begin{pmatrix}"),
            *(
                r"\end{pmatrix}",
                r"\text{",
                "cm",
                " or ",
                " and ",
                r"\sin",
                r"\log_2",
                "%",
                r"^\circ",
                "'",
                '"',
                r"\cdot",
            ),
            *(r"\left", r"\right", r"\binom", r"\,", r"\ ", "the answer is ", "−", "½", "x=", r"\emptyset"),
        ]
    ),
    max_size=40,
).map("".join)


@pytest.fixture(scope="module")
def anyio_backend() -> object:
    return "asyncio", {"use_uvloop": True}


@pytest.mark.anyio
async def test_no_hostile_answer_scores_or_takes_its_worker_down() -> None:
    assert await latex_equivalent(r"\boxed{\sqrt{8}}", r"2\sqrt{2}") == 1.0
    workers = set(process._living)

    for expected in EXPECTED:
        for index, said in enumerate(MATHEMATICS):
            text = (r"so \boxed{{{}}}" if index % 2 else "#### {}").format(said)
            assert await final_number_matches(text, expected) == 0.0, (text[:100], expected)

    assert workers <= process._living, "none was killed"
    assert all(worker.is_alive for worker in workers), "and none died"


@given(SOUP | st.text(max_size=60), st.sampled_from(EXPECTED), st.sampled_from(["#### {}", r"\boxed{{{}}}", "{}"]))
def test_whatever_is_said_scores_one_or_zero_within_a_bound_of_work(said: str, expected: str, mark: str) -> None:
    num_values, computed = 0, math_algebra._value

    def counted(*arguments: object) -> object:
        nonlocal num_values
        num_values += 1
        return computed(*arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math_algebra, "_value", counted)
        score = latex_equivalent.__wrapped__(mark.format(said), expected)  # type: ignore[attr-defined]

    assert score in (0.0, 1.0)
    assert num_values <= MOST_VALUES
    assert numbers_match(mark.format(said), expected) in (None, bool(score))
