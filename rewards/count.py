r"""Score how many things an answer counts: the number that it settles on, in digits or in words.

    3      There are 3 items.      There are three.      [3]      \boxed{3}      <answer> 3 </answer>

It is looked for where the final answer of a sum is (`rewards/final_answer.py`): what is marked, else what the last line
states. A row of numbers, a bound or a choice between two ("3 or 4") is none. Words are read where no digit stands.

Invariant: no text makes this raise; the time taken grows no faster than the text.
"""

import re
from typing import Final

from rewards.final_answer import marked_answer, said_quantity
from rewards.thought import after_thought

WORDS: Final = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
"""Each at the place of its number."""
_WORD: Final = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
_BRACKETED: Final = re.compile(r"\[ ?([0-9]+) ?\]")


def count_matches(text: str, answer: str | int) -> float:
    """Return 1.0 when the number that ``text`` settles on is that of ``answer``, else 0.0.

    Args:
        answer: a whole number, which may stand between ``<answer>`` and ``</answer>``.

    Raises:
        ValueError: it is none: the row is wrong, not what the model said.
    """
    expected = (marked_answer(str(answer)) or str(answer)).strip()
    if not (expected.isascii() and expected.isdecimal()):
        raise ValueError(f"answer: got {answer!r:.100}, need a whole number")
    said = said_quantity(_in_digits(after_thought(text)))
    return float(said is not None and said.value == int(expected))


def _in_digits(text: str) -> str:
    text = _BRACKETED.sub(r"\1", text)
    if any(map(str.isdigit, text)):
        return text
    return _WORD.sub(lambda word: str(WORDS.index(word[0].lower())), text)
