r"""Score a mathematical answer by what it comes to, not by how it is written.

The answer is what follows the last `####`, else the last `\boxed{}`, else the last number. Plain numbers are compared
here, exactly, with thousands separators, currency and percent signs, units and trailing zeros set aside; that takes
microseconds. Only what is no plain number (a root, an interval, `\frac{1}{2}`) goes to math-verify, in a worker process
that can be killed: computer algebra may think for hours about one line of model output.

Invariant: no text, however long or odd, makes the comparison of plain numbers raise.
"""

import logging
import re
from fractions import Fraction
from typing import Final

from areal_async import reward

_NUMBER: Final = re.compile(
    r"(?P<sign>(?<![0-9A-Za-z)])[-+])?"  # the minus of 9-7 takes away, it makes nothing negative
    r"[$€£¥]?"
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?=\.[0-9]))"
    r"(?:\.(?P<decimals>[0-9]+))?"
    r"(?:\s?/\s?(?P<divisor>[0-9]*[1-9][0-9]*))?"
)
_MOST_DIGITS: Final = 64
"""A longer number answers nothing, and Python refuses to read one of thousands of digits."""

_OPERATORS: Final = ("+", "-", "*", "/", "×", "÷")
_PLAIN_SPELLINGS: Final = (("−", "-"), (r"\$", "$"), (r"\%", "%"), ("{,}", ","), (r"\,", ""), (r"\!", ""))
_MATHEMATICS: Final = re.compile(r"[\\^_{}√π∞]|[0-9][A-Za-z]|[A-Za-z][0-9]")
"""What shows that an answer is more than one number with words around it."""


async def final_number_matches(text: str, answer: str) -> float:
    """Return 1.0 when the final answer of `text` equals that of `answer`, else 0.0.

    `answer` may be a worked solution, a bare number or LaTeX.
    """
    verdict = numbers_match(text, answer)
    return await latex_equivalent(text, answer) if verdict is None else float(verdict)


@reward(timeout_s=5.0)
def latex_equivalent(text: str, answer: str) -> float:
    """Return 1.0 when the two final answers are the same mathematics, else 0.0.

    math-verify's own time limits are alarm signals, which only a main thread may set; they are off, and the worker
    that runs this is killed instead.
    """
    from math_verify import parse, verify  # takes a second: paid in the worker, and only by runs that need it

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # else each worker warns that the limits are off
    expected = parse(_as_latex(marked_answer(answer) or answer), parsing_timeout=None)
    marked = marked_answer(text)
    said = parse(text if marked is None else _as_latex(marked), parsing_timeout=None)
    return float(verify(expected, said, timeout_seconds=None))


def numbers_match(text: str, answer: str) -> bool | None:
    """Compare the final answers as plain numbers; None when one of them is mathematics that must be worked out."""
    expected = plain_number(marked_answer(answer) or answer)
    if expected is None:
        return None
    said = marked_answer(text)
    deciding = text.rstrip().rpartition("\n")[2] if said is None else said
    if _MATHEMATICS.search(_plainly_spelled(deciding)):
        return None
    return (last_number(text) if said is None else plain_number(said)) == expected


def marked_answer(text: str) -> str | None:
    r"""Return what follows the last `####` on its line, else the inside of the last `\boxed{}`, else None."""
    _, mark, after = text.rpartition("####")
    if mark:
        return after.strip().partition("\n")[0].strip()
    _, mark, after = text.rpartition(r"\boxed{")
    if not mark:
        return None
    depth = 1
    for index, character in enumerate(after):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return after[:index].strip()
    return None  # cut off before the brace was closed


def plain_number(text: str) -> Fraction | None:
    """Read a text that holds one number and no sum, whatever words stand around it; None for any other text."""
    text = _plainly_spelled(text)
    numbers = list(_NUMBER.finditer(text))
    if len(numbers) != 1 or _MATHEMATICS.search(text):
        return None
    before, after = text[: numbers[0].start()].rstrip(), text[numbers[0].end() :].lstrip()
    return None if before.endswith(_OPERATORS) or after.startswith((*_OPERATORS, "=")) else _value(numbers[0])


def last_number(text: str) -> Fraction | None:
    """Return the last number in a text, or None."""
    *_, last = [None, *_NUMBER.finditer(_plainly_spelled(text))]
    return None if last is None else _value(last)


def _value(number: re.Match[str]) -> Fraction | None:
    """Compute a matched number exactly; None for a division left undone (42/7) or too many digits to be meant."""
    if len(number[0]) > _MOST_DIGITS:
        return None
    digits = f"{number['sign'] or ''}{number['whole'].replace(',', '') or '0'}.{number['decimals'] or '0'}"
    value = Fraction(digits) / int(number["divisor"] or 1)
    return None if number["divisor"] and value.denominator == 1 else value


def _plainly_spelled(text: str) -> str:
    """Replace LaTeX's and typography's ways to write plain signs."""
    for spelled, plain in _PLAIN_SPELLINGS:
        text = text.replace(spelled, plain)
    return text


def _as_latex(answer: str) -> str:
    """Mark an answer as mathematics, which is how math-verify finds it."""
    return answer if "$" in answer else f"${answer}$"
