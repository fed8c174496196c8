r"""Score a mathematical answer by what it comes to, not by how it is written.

The answer is what follows the last `####`, else the last `\boxed{}`, else the last number. A plain number is expected
most of the time: that is compared here, exactly, with thousands separators, currency and percent signs, units and
trailing zeros set aside; it takes microseconds. Units count where both answers have one. Only where the expected answer
is no plain number (a root, an interval, a set, a formula) a worker process that can be killed compares structures
(`rewards/math_structure.py`) and, part by part, expressions (`rewards/math_algebra.py`).

An answer that leaves the work undone (`3+4`, `42/6`, `2^3` for 8, an integral instead of its value) is none.

Invariant: no text, however long or odd, makes the comparison of plain numbers raise.
"""

import re
from fractions import Fraction
from typing import Final

from areal_async import reward
from rewards import plain_number as plain
from rewards.math_algebra import load
from rewards.math_structure import same_answer

MARK: Final = "####"
_EQUALS: Final = re.compile(r"(?<![<>!])=")


async def final_number_matches(text: str, answer: str) -> float:
    """Return 1.0 when the final answer of `text` equals that of `answer`, else 0.0.

    `answer` may be a worked solution, a bare number or LaTeX.

    Raises:
        RewardError: `answer` is empty, or the comparison took too long.
    """
    verdict = numbers_match(text, answer)
    return await latex_equivalent(text, answer) if verdict is None else float(verdict)


@reward(timeout_s=10.0, prepare=load)
def latex_equivalent(text: str, answer: str) -> float:
    """Return 1.0 when the two final answers are the same mathematics, else 0.0.

    Raises:
        ValueError: there is no expected answer to compare with.
    """
    expected = marked_answer(answer) or answer.strip()
    if not expected:
        raise ValueError("answer: got none, need what is expected; else every row would score zero")
    said = marked_answer(text)
    return float(same_answer(_last_statement(text) if said is None else said, expected))


def numbers_match(text: str, answer: str) -> bool | None:
    """Compare the final answers as plain numbers; None when the expected one is none and has to be worked out."""
    expected = plain.plain_quantity(marked_answer(answer) or answer)
    if expected is None:
        return None
    said = marked_answer(text)
    if said is None:
        said = _last_statement(text)
        if not plain.is_mathematics(said):
            number = plain.last_number(said) if plain.NUMBER.search(said) else plain.last_number(text)
            return number == expected.value
    quantity = plain.plain_quantity(said)
    return quantity is not None and plain.same_quantity(quantity, expected)


def marked_answer(text: str) -> str | None:
    r"""Return what follows the last `####` on its line, else the inside of the last `\boxed{}`, else None."""
    _, mark, after = text.rpartition(MARK)
    if mark:
        return after.strip().partition("\n")[0].strip()
    _, mark, after = text.rpartition(r"\boxed{")
    if not mark:
        return None
    depth = 1
    for index, character in enumerate(after[: plain.MOST_CHARACTERS]):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return after[:index].strip()
    return None  # cut off before the brace was closed, or no answer


def plain_number(text: str) -> Fraction | None:
    """Read a text that holds one number and no sum, whatever words stand around it; None for any other text."""
    quantity = plain.plain_quantity(text)
    return None if quantity is None else quantity.value


def last_number(text: str) -> Fraction | None:
    """Return the last number in a text, or None; it is looked for near the end."""
    return plain.last_number(text)


def _last_statement(text: str) -> str:
    """Return how a text without a mark ends: the last formula of its last line, after its last equals sign."""
    line = text[-plain.MOST_CHARACTERS :].rstrip().rpartition("\n")[2]
    before, _, formula = line.rstrip("$. ").rpartition("$")
    if before.count("$") % 2 == 0:  # else the last dollar sign ends a formula, and words follow it
        line = formula
    return _EQUALS.split(line)[-1].strip() or line
