"""The table of answers to mathematical questions and what they are worth (pairs_math.txt), read."""

from pathlib import Path
from typing import Final, NamedTuple

TABLE: Final = Path(__file__).with_name("pairs_math.txt")
_MARKS: Final = ("#### {}", r"so it is \boxed{{{}}}.")


class Pair(NamedTuple):
    """An answer, what is expected, and whether they are the same."""

    kind: str
    expected: str
    text: str
    is_right: bool
    missed: str
    """Why a right one scores 0.0; empty for all that do not."""


def pairs() -> list[Pair]:
    """Return every pair of the table; what is no whole text is marked, with #### and with a box in turn."""
    found: list[Pair] = []
    kind, are_texts, expected = "", False, ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        sign, rest = line[:1], line[2:].replace("⏎", "\n")
        if sign == "[":
            kind, _, texts = line[1:-1].partition(": ")
            are_texts = bool(texts)
        elif sign == "=":
            expected = rest
        elif sign in ("+", "-", "~") and sign:
            said, _, missed = rest.partition(" :: ")
            text = said if are_texts else _MARKS[len(found) % len(_MARKS)].format(said)
            found.append(Pair(kind, expected, text, is_right=sign != "-", missed=missed))
    return found
