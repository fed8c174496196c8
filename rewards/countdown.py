"""Score a game of numbers: reach the target by sums over the given numbers, each used at most once.

The answer is one expression, `(8-2)*4`, or one equation, `(8-2)*4=24`: what is marked by `####` or a box, else the last
line. It is read by a grammar of four operations and brackets and worked out in exact fractions; nothing of it is ever
run as code.

Invariant: no text makes anything here raise; the time taken grows no faster than the text.
"""

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from rewards.final_answer import MARK, marked_answer
from rewards.thought import after_thought

MOST_CHARACTERS: Final = 120
MOST_DIGITS: Final = 6
"""Of one number of an answer: so no value grows beyond what is computed at once."""

_SPELLINGS: Final = (
    ("×", "*"),
    ("·", "*"),
    ("÷", "/"),
    ("−", "-"),
    (r"\times", "*"),
    (r"\cdot", "*"),
    (r"\div", "/"),
    ("$", ""),
)
_TOKEN: Final = re.compile(r"\s*(?:(?P<number>[0-9]+)|(?P<sign>[-+*/()]))")


def target_reached(text: str, numbers: Sequence[int], target: int) -> float:
    """Return 1.0 when the answer comes to the target and uses no number more often than it is given, else 0.0.

    Raises:
        ValueError: there are no numbers.
    """
    if not numbers:
        raise ValueError("numbers: got none, need at least one")
    text = after_thought(text).rstrip().removesuffix(MARK)  # a reply ends with what it was told to stop at
    marked = marked_answer(text)
    answer = text[-2 * MOST_CHARACTERS :].rstrip().rpartition("\n")[2] if marked is None else marked
    for spelled, plain in _SPELLINGS:
        answer = answer.replace(spelled, plain)
    expression, equals, result = answer.strip().rstrip(".").partition("=")
    try:
        value, used = worked_out(expression)
        if equals and worked_out(result)[0] != value:
            return 0.0
    except (ValueError, ZeroDivisionError):
        return 0.0
    return float(value == target and Counter(used) <= Counter(numbers))


def worked_out(expression: str) -> tuple[Fraction, list[int]]:
    """Return what an expression comes to, and the numbers it uses.

    Raises:
        ValueError: it is no expression of whole numbers, the four operations and brackets.
        ZeroDivisionError: it divides by zero.
    """
    if len(expression) > MOST_CHARACTERS:
        raise ValueError(f"expression: got {len(expression)} characters, need at most {MOST_CHARACTERS}")
    reader = _Reader(_tokens(expression))
    value = reader.read_sum()
    if reader.next is not None:
        raise ValueError(f"expression: got {reader.next!r} after its end")
    return value, reader.used


def _tokens(expression: str) -> list[str]:
    tokens, index = [], 0
    text = expression.rstrip()
    while index < len(text):
        token = _TOKEN.match(text, index)
        if token is None or len(token["number"] or "") > MOST_DIGITS:
            raise ValueError(f"expression: got {text[index : index + 10]!r}, need numbers, + - * / and brackets")
        tokens.append(token["number"] or token["sign"])
        index = token.end()
    return tokens


class _Reader:
    """Reads tokens from left to right; brackets nest no deeper than an expression is long."""

    def __init__(self, tokens: list[str]) -> None:
        self._rest = tokens[::-1]
        self.used: list[int] = []

    @property
    def next(self) -> str | None:
        return self._rest[-1] if self._rest else None

    def read_sum(self) -> Fraction:
        value = self._read_product()
        while self.next in ("+", "-"):
            value += self._read_product() if self._rest.pop() == "+" else -self._read_product()
        return value

    def _read_product(self) -> Fraction:
        value = self._read_operand()
        while self.next in ("*", "/"):
            value = value * self._read_operand() if self._rest.pop() == "*" else value / self._read_operand()
        return value

    def _read_operand(self) -> Fraction:
        token = self._rest.pop() if self._rest else ""
        if token == "(":
            value = self.read_sum()
            if self.next != ")":
                raise ValueError("expression: a bracket is not closed")
            self._rest.pop()
            return value
        if not token.isdecimal():
            raise ValueError(f"expression: got {token!r}, need a number or a bracket")
        self.used.append(int(token))
        return Fraction(self.used[-1])
