r"""Compare answers that have parts: sets, lists, tuples, intervals and unions of them.

    \{1, 2\}   1, 2   1 \text{ and } 2   x = 1, x = 2       the same set: the order of elements does not count
    (1, 2)   [1, 2)   (-\infty, 3]   (1, 2, 3)              parts in their order, and the brackets count
    (0, 1) \cup (2, 3)                                      a set of intervals

The parts are compared as plain numbers, else as expressions. A list of guesses equals no single answer. Runs in the
worker of a reward: expressions may take any time.

Invariant: whatever is said, nothing here raises.
"""

import re
from dataclasses import dataclass
from typing import Final

from rewards.math_algebra import same_expression
from rewards.plain_number import MOST_CHARACTERS, plain_quantity, same_quantity

MOST_PARTS: Final = 64
MOST_DEPTH: Final = 16

_OPENING, _CLOSING = "([{", ")]}"
_PAIRS: Final = ("{}", "()", "[]", "[)", "(]")
_SPELLINGS: Final = (
    ("$", ""),
    (r"\left", ""),
    (r"\right", ""),
    (r"\bigl", ""),
    (r"\bigr", ""),
    (r"\lbrace", r"\{"),
    (r"\rbrace", r"\}"),
    (r"\!", ""),
    (r"\,", " "),
    (r"\;", " "),
    (r"\:", " "),
    (r"\ ", " "),
    ("{,}", ""),
    ("∪", r"\cup "),
    ("∞", r"\infty "),
    ("∈", r"\in "),
    ("−", "-"),
)
_BETWEEN: Final = re.compile(
    r",\s?(?:and|or)\s|\s(?:and|or)\s|,\s?\\text\{\s?(?:and|or)\s?\}|\\text\{\s?(?:and|or)\s?\}"
)
_MEMBER: Final = re.compile(r"^[A-Za-z](?:_\{?\w\}?)?\s?\\in(?![a-z])\s?")
_ASSIGNED: Final = re.compile(r"^[A-Za-z](?:_\{?\w\}?)?\s?=\s?(?=[^=])")


@dataclass(frozen=True, slots=True)
class Parts:
    """An answer that has parts."""

    brackets: str
    """``{}`` for a set, where neither order nor repetition counts; else the two brackets."""
    parts: "tuple[Parts | str, ...]"


def same_answer(said: str, expected: str) -> bool:
    """Say whether two answers are the same, part by part."""
    if len(said) > MOST_CHARACTERS:
        return False
    try:
        return _same(structure(said), structure(expected))
    except TooDeep:
        return False


class TooDeep(Exception):
    """Brackets within brackets within brackets, or parts without end: no answer."""


def structure(text: str, depth: int = 0) -> Parts | str:
    """Take an answer apart; a text that has no parts comes back as it is.

    Raises:
        TooDeep: it nests or lists more than an answer does.
    """
    if depth > MOST_DEPTH:
        raise TooDeep
    text = _MEMBER.sub("", _tidied(text))
    for between in (r"\cup", ","):
        parts = _split(text, between)
        if len(parts) > MOST_PARTS:
            raise TooDeep
        if len(parts) > 1:
            return Parts("{}", tuple(structure(part, depth + 1) for part in parts))
    is_escaped = text.startswith(r"\{") and text.endswith(r"\}")
    inside, brackets = (text[2:-2], "{}") if is_escaped else (text[1:-1], text[:1] + text[-1:])
    if brackets in _PAIRS and _is_balanced(inside):
        parts = _split(inside, ",")
        if len(parts) > MOST_PARTS:
            raise TooDeep
        if brackets == "{}" or len(parts) > 1:
            return Parts(brackets, tuple(structure(part, depth + 1) for part in parts))
    return _ASSIGNED.sub("", text)


def _same(said: Parts | str, expected: Parts | str) -> bool:
    if isinstance(said, str) and isinstance(expected, str):
        return _same_part(said, expected)
    said, expected = _as_parts(said), _as_parts(expected)
    if said.brackets != expected.brackets:
        return False
    if said.brackets == "{}":
        return all(any(_same(one, other) for one in said.parts) for other in expected.parts) and all(
            any(_same(one, other) for other in expected.parts) for one in said.parts
        )
    return len(said.parts) == len(expected.parts) and all(map(_same, said.parts, expected.parts))


def _as_parts(answer: Parts | str) -> Parts:
    """Return what stands alone as a set of one: an equation with one solution is answered either way."""
    return Parts("{}", (answer,)) if isinstance(answer, str) else answer


def _same_part(said: str, expected: str) -> bool:
    quantity = plain_quantity(expected)
    if quantity is None:
        return same_expression(said, expected)
    other = plain_quantity(said)
    return other is not None and same_quantity(other, quantity)


def _tidied(text: str) -> str:
    for spelled, plain in _SPELLINGS:
        text = text.replace(spelled, plain)
    return " ".join(_BETWEEN.sub(",", text).split()).strip(" .;")


def _split(text: str, between: str) -> list[str]:
    """Split where no bracket is open; empty parts make it no list at all."""
    parts, depth, start, index = [], 0, 0, 0
    while index < len(text):
        character = text[index]
        if character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
        elif depth == 0 and text.startswith(between, index):
            parts.append(text[start:index])
            start = index + len(between)
            index = start - 1
        index += 1
    parts.append(text[start:])
    return [text] if any(not part.strip() for part in parts) else parts


def _is_balanced(text: str) -> bool:
    """Say whether the brackets around a text belong together: (a)(b) is no pair."""
    depth = 0
    for character in text:
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth < 0:
            return False
    return depth == 0
