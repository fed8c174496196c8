r"""Score a mathematical answer by what it comes to, not by how it is written.

The answer is the last one marked (`####`, a box), else what the last line states (`rewards/final_answer.py`). A plain
number is expected most of the time: that is read as a whole and compared exactly, in microseconds, where the workflow
runs (`rewards/math_quantity.py`). Only where the expected answer is something else (a root, an interval, a set, a
formula) a worker process that can be killed takes it apart (`rewards/math_parts.py`) and compares expressions by value
(`rewards/math_algebra.py`, on math-verify's parser). `rewards/README.md` says what counts as the same.

Invariant: no text, however long or odd, makes the comparison of plain numbers raise.
"""

from fractions import Fraction
from functools import lru_cache

from areal_async import reward
from rewards.final_answer import expected_answer, last_number, marked_answer, said_quantity, stated_answer
from rewards.math_algebra import load
from rewards.math_parts import same_answer
from rewards.math_quantity import Quantity, plain_quantity, same_quantity

__all__ = ["final_number_matches", "last_number", "latex_equivalent", "marked_answer", "numbers_match", "plain_number"]


async def final_number_matches(text: str, answer: str) -> float:
    """Return 1.0 when the final answer of `text` equals that of `answer`, else 0.0.

    `answer` may be a worked solution, a bare number or LaTeX.

    Raises:
        RewardError: `answer` is empty, or a worked solution that does not say which number is its answer.
    """
    verdict = numbers_match(text, answer)
    return await latex_equivalent(text, answer) if verdict is None else float(verdict)


@reward(timeout_s=10.0, prepare=load)
def latex_equivalent(text: str, answer: str) -> float:
    """Return 1.0 when the two final answers are the same mathematics, else 0.0.

    Raises:
        ValueError: there is no expected answer to compare with.
    """
    expected = expected_answer(answer)
    verdict, said = numbers_match(text, answer), marked_answer(text)
    if verdict is not None:
        return float(verdict)
    if said is None:
        said = stated_answer(text, is_equation="=" in expected)
    return float(same_answer(said, expected))


def numbers_match(text: str, answer: str) -> bool | None:
    """Compare the final answers as plain numbers; None when the expected one is none and has to be worked out."""
    expected = _expected_quantity(answer)
    if expected is None:
        return None
    said = said_quantity(text)
    if said is None:
        return None if expected.may_be_variable else False
    return same_quantity(said, expected)


@lru_cache(maxsize=1024)
def _expected_quantity(answer: str) -> Quantity | None:
    """Read what a row expects, once for all its answers; None for what is no plain number, or not understood."""
    try:
        return plain_quantity(expected_answer(answer))
    except ValueError:
        return None


def plain_number(text: str) -> Fraction | None:
    """Read a text that is one number, with what it counts; None for any other text."""
    quantity = plain_quantity(text)
    return None if quantity is None else quantity.value
