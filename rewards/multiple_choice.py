r"""Score the choice of a letter: the one that an answer settles on, and only when it settles on one.

    #### C      \boxed{(C)}      The answer is C.      Answer: (C) Paris      **C**      Answer: "C"

The letter is read where an answer is given, never searched for: `A` begins many a sentence, and a list of all the
letters holds the right one. Two different letters in the deciding place are no answer, nor is a letter of another
alphabet that looks the same.

Invariant: no text makes anything here raise; the time taken grows no faster than the text.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from rewards.final_answer import marked_answer
from rewards.thought import after_thought

MOST_CHARACTERS: Final = 500
"""Of the line that decides."""
_MARKUP: Final = re.compile(
    r"\\(?:text|textbf|mathrm|mathbf)\s?\{|[*_`${}\"“”«»]|\\[()\[\]]|(?<![A-Za-z0-9])['‘](?=[A-Za-z]['’])|(?<=['‘][A-Za-z])['’]"
)
_BARE: Final = re.compile(r"\(?(?P<letter>[A-Za-z])(?:\)[.:,]?|[.:,])?(?:\s+(?P<rest>.*))?")
_STATED: Final = re.compile(
    r"\b(?:answer|choice|option|choose|pick)\b(?:\s+(?:is|would be|must be|option|choice))*\s*:?\s*"
    r"(?:\((?P<bracketed>[A-Za-z])\)|(?P<bare>[A-Z])(?![A-Za-z0-9'’]))",
    re.IGNORECASE,
)
_CLAUSE: Final = re.compile(r"[.,;]|\b(?:and|so|but|because|while)\b", re.IGNORECASE)
_DENIED: Final = re.compile(r"\b(?:not|never|cannot|wrong|incorrect|false|unlikely)\b|n['’]t\b|\?", re.IGNORECASE)
_LETTER_ALONE: Final = re.compile(r"(?<![A-Za-z0-9'’])([A-Z])(?![A-Za-z0-9'’])")


def choice_matches(text: str, answer: str, choices: Sequence[str] | Mapping[str, str] = "ABCD") -> float:
    """Return 1.0 when `text` settles on the letter `answer`, else 0.0.

    Args:
        choices: the letters, or each with its text: then `(C) Paris` counts only with C's own text.

    Raises:
        ValueError: `answer` is none of the choices: the row is wrong, not what the model said.
    """
    if answer not in tuple(choices):
        raise ValueError(f"answer: got {answer!r}, need one of the choices {', '.join(choices)}")
    return float(chosen_letter(text, choices) == answer)


def chosen_letter(text: str, choices: Sequence[str] | Mapping[str, str] = "ABCD") -> str | None:
    """Return the letter that a text settles on; None when that is none of the choices, or more than one."""
    text = after_thought(text)
    marked = marked_answer(text)
    deciding = text[-MOST_CHARACTERS:].rstrip().rpartition("\n")[2] if marked is None else marked
    if len(deciding) >= MOST_CHARACTERS:
        return None
    deciding = " ".join(_MARKUP.sub(" ", deciding).split())
    letter = _letter_alone(deciding, choices)
    if letter is None and (marked is None or not _BARE.fullmatch(deciding)):
        letter = _letter_stated(deciding, choices)
    return letter if letter in tuple(choices) else None


def _letter_alone(deciding: str, choices: Sequence[str] | Mapping[str, str]) -> str | None:
    """Read `C`, `(C)`, `C.` and `C) Paris`, where what follows is that choice's own text or names no other letter."""
    bare = _BARE.fullmatch(deciding)
    if bare is None:
        return None
    letter, rest = bare["letter"].upper(), bare["rest"]
    if rest is None:
        return letter
    if isinstance(choices, Mapping):
        return letter if _words(rest) == _words(choices.get(letter, "")) else None
    is_set_off = deciding[1:2] in (")", ".", ":", ",") or deciding.startswith("(")
    return letter if is_set_off and not set(_LETTER_ALONE.findall(rest)) - {letter} else None


def _letter_stated(deciding: str, choices: Sequence[str] | Mapping[str, str]) -> str | None:
    """Read `The answer is (C)`, where no other choice is named on the same line and nothing is denied or asked."""
    clauses = [clause for clause in _CLAUSE.split(deciding) if _STATED.search(clause)]
    if any(map(_DENIED.search, clauses)):
        return None
    stated = {(match["bracketed"] or match["bare"]).upper() for match in _STATED.finditer(deciding)}
    named = set(_LETTER_ALONE.findall(deciding)) & set(choices)
    if len(stated) != 1 or named - stated - {"A"}:  # A is a word as well
        return None
    (letter,) = stated
    return letter


def _words(text: str) -> list[str]:
    return text.casefold().strip(" .").split()
