r"""Find the final answer in a text: what is marked, else what its last line states.

Marked is what follows `####` on its line, what a `\boxed{}` or `\fbox{}` holds and what stands between `<answer>` and
`</answer>`; the last mark counts, and one within another. Boxes with nothing but separators between them are one
answer with several parts. `####` before `Step 3`, before `Final Answer` with nothing behind it, or before nothing is
Markdown's heading where more text follows, and no mark.

Invariants: no text makes anything here raise (but `expected_answer`); the time taken grows no faster than the text.
"""

import re
from fractions import Fraction
from typing import Final

from rewards.math_quantity import MEANINGFUL, MOST_CHARACTERS, Quantity, plain_quantity
from rewards.math_spelling import plainly_spelled
from rewards.thought import after_thought

MARK: Final = "####"
TAG, END_TAG = "<answer>", "</answer>"
MOST_MARKS: Final = 32
"""Headings that are looked at, from the last one back."""
MOST_DEPTH: Final = 32
"""Of braces within each other, in and around boxes."""
_LABEL: Final = re.compile(
    r"[*_ ]*(?:(?:the|my) )?(?:(?:final|correct) )?(?:answer|result)[*_ ]*(?:is|:|=|(?=$))[*_: ]*", re.I
)
_LABELLED: Final = re.compile(rf"[# ]*{_LABEL.pattern}(.*)", re.IGNORECASE)
_HEADING: Final = re.compile(
    r"[*_ ]*(?:[0-9]+[.)] *)?(?:(?:step|part|case|stage|phase|question|problem|given|solution|conclusion|explanation"
    r"|verification|check|reasoning|summary|analysis|approach|method|calculations?|computations?|understanding)\b"
    r"|(?:calculate|compute|find|determine|solve|simplify|evaluate|identify|verify|apply|use|set|define|let"
    r"|[a-z]+ing) +\w)",
    re.IGNORECASE,
)
_BLANKS: Final = re.compile(r"\s{2,}")
"""Patterns that look for words behind blanks take the square of their number."""
_BRACE: Final = re.compile(r"\\(?:boxed|fbox)\s*\{|\\(?:[{}]|\\(?!f?box))|[{}]")
_BETWEEN_BOXES: Final = re.compile(r"(?:[\s,;&$}]|\\[\\,;()\[\] ]|\\q?quad|\\text\s*\{|\b(?:and|or)\b){0,12}")
_STATED: Final = re.compile(
    r"(?P<before>.*)\b(?:answer|result)s?(?: +(?:is|are|would be)|[:=*_ ])+(?P<answer>.+)", re.IGNORECASE
)
_ANOTHER: Final = re.compile(r"[0-9\\]|\b(?:or|and|not)\b")
_SENTENCE: Final = re.compile(r"(?<=[.!?])[*_)]* +(?=[A-Z])")
_EQUALS: Final = re.compile(r"(?<![<>!=:])=(?!=)")
_NUMBER: Final = re.compile(
    r"(?:(?<![0-9A-Za-z)])[-+])?[$€£¥]?"  # the minus of 9-7 takes away, it makes nothing negative
    r"(?:(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:/[0-9]{1,18})?"
)
_SEPARATOR: Final = re.compile(r"[\s,;/|&:$-]*(?:(?:and|or|to|then)\s*)?(?:(?:[a-z]\w*)? ?= ?)?")
_MATHEMATICS: Final = re.compile(r"[\\^_{}<>()\[\]|]|[0-9][A-Za-z]|[A-Za-z][0-9]")
_PART_BEFORE: Final = re.compile(r"[A-Za-z0-9.,^_|~%√\\[{]$|[A-Za-z0-9]\($|[-+*/×÷^<>≤≥~≈] ?$")
_PART_BEHIND: Final = re.compile(
    r" ?[*/×÷^=<>≤≥_%\\]| ?[-+] ?[0-9A-Za-z(]|['A-Za-z]|[.,:][0-9]| [B-HJ-Zb-z](?![A-Za-z'])"
)
_WORD: Final = re.compile(r"[A-Za-z']+")
_BESIDE: Final = MEANINGFUL - {"and", "to"} | {"over", "under", "times"}


def marked_answer(text: str) -> str | None:
    r"""Return what the last mark marks, `####`, a box or a tag; None where none does or the last one has no end."""
    text = after_thought(text)
    box, start, tag = max(text.rfind(r"\boxed"), text.rfind(r"\fbox")), len(text), text.rfind(TAG)
    for _ in range(MOST_MARKS):
        start = text.rfind(MARK, 0, start)
        if start <= max(box, tag):
            break
        line, _, rest = text[start + len(MARK) : start + len(MARK) + MOST_CHARACTERS].partition("\n")
        line = line.removesuffix(END_TAG)
        is_followed = bool(rest.strip())
        answer = _LABEL.sub("", line, count=1) if _LABEL.match(line) else line
        if text[start - 1 : start] != "#" and not (
            is_followed and (not answer.strip("*_: ") or _HEADING.match(answer))
        ):
            return answer.strip()
    if tag > box:
        answer, end, _ = text[tag + len(TAG) : tag + MOST_CHARACTERS].partition(END_TAG)
        return _LABEL.sub("", answer.strip(), count=1) if end else None
    return None if box < 0 else _boxed(text[max(0, box - MOST_CHARACTERS) : box + MOST_CHARACTERS])


def _boxed(text: str) -> str | None:
    """Return what the last box holds, and those beside it; of boxes in boxes, the inner one."""
    opened: list[re.Match[str] | None] = []
    found: list[tuple[int, int, str]] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "}" and opened:
            box = opened.pop()
            if box is not None and not (found and found[-1][0] > box.start()):
                found.append((box.start(), brace.end(), text[box.end() : brace.start()].strip()))
        elif brace[0] == "{" or brace[0][1:2] in ("b", "f"):
            opened.append(None if brace[0] == "{" else brace)
            if len(opened) > MOST_DEPTH:
                return None
    if not found or any(opened):
        return None
    answers = [found[-1][2]]
    for one, other in zip(found[-2::-1], found[:0:-1], strict=True):
        if not _BETWEEN_BOXES.fullmatch(text, one[1], other[0]):
            break
        answers.insert(0, one[2])
    return _BLANKS.sub(" ", ", ".join(dict.fromkeys(answers)))


def expected_answer(answer: str) -> str:
    """Return the final answer that a row expects: marked, or all that there is, or how a worked solution ends.

    Raises:
        ValueError: there is none, or it is not clear which one it is.
    """
    marked = marked_answer(answer)
    if marked:
        return marked
    line = _last_line(answer)
    stated, numbers = _stated(line), list(_NUMBER.finditer(_SENTENCE.split(line)[-1]))
    is_prose = re.search(r"(?<!\\)\b[A-Z]?[a-z]{2,}", line) and not plain_quantity(answer) and plain_quantity(stated)
    if marked is None and _is_bare(answer) and not is_prose:
        return answer.strip()
    if marked is None and (plain_quantity(stated) or (stated != line and _is_bare(stated))):
        return stated
    if marked is None and len(numbers) == 1 and (only := last_number(numbers[0].string)) is not None:
        return str(only)
    raise ValueError(
        f"answer: got {answer!r:.200}, need what is expected, or a worked solution that marks it: #### or \\boxed{{}}"
    )


def said_quantity(text: str) -> Quantity | None:
    """Return the plain number that a text settles on; None when that is something else, or several."""
    text = after_thought(text)
    marked = marked_answer(text)
    if marked is not None:
        return plain_quantity(marked)
    stated = stated_answer(text)
    quantity = plain_quantity(stated)
    if quantity is not None or _MATHEMATICS.search(plainly_spelled(stated)):
        return quantity
    number = last_number(stated if _NUMBER.search(stated) else "\n".join(_lines(text)))
    return None if number is None else Quantity(number)


def stated_answer(text: str, *, is_equation: bool = False) -> str:
    """Return how a text without a mark ends: what its last line calls the answer, that line's formula, or all of it.

    Args:
        is_equation: keep what stands before the equals sign.
    """
    return _stated(_last_line(after_thought(text)), is_equation=is_equation)


def last_number(text: str) -> Fraction | None:
    """Return the last number in a text; None where that is one of a row, a bound, a part of a sum or of a word."""
    tail = text
    if len(text) > MOST_CHARACTERS:  # cut between words, or half a number would be read
        _, _, tail = text[-MOST_CHARACTERS:].replace("\n", " ").partition(" ")
    numbers = list(_NUMBER.finditer(tail))
    if not numbers:
        return None
    last, start = numbers[-1], numbers[-2].end() if len(numbers) > 1 else 0
    before, after = tail[start : last.start()], tail[last.end() :]
    is_row = len(numbers) > 1 and _SEPARATOR.fullmatch(before)
    if is_row or _PART_BEFORE.search(before) or _PART_BEHIND.match(after):
        return None
    if any(map(_changes_meaning, (*_WORD.findall(before)[-4:], *_WORD.findall(after)[:4]))):
        return None
    quantity = plain_quantity(last[0].lstrip("+$€£¥"))
    return None if quantity is None else quantity.value


def _lines(text: str) -> list[str]:
    """Return the last lines that are neither blank nor headings; one that tells the answer is no heading."""
    lines = [line.lstrip() for line in text[-2 * MOST_CHARACTERS :].splitlines() if line.strip()]
    return [line for line in lines if line[0] != "#" or re.search(r"\w", (_LABELLED.match(line) or ("", ""))[1])]


def _last_line(text: str) -> str:
    return _BLANKS.sub(" ", next(reversed(_lines(text)), "")[-MOST_CHARACTERS:].strip())


def _stated(line: str, *, is_equation: bool = False) -> str:
    stated = _STATED.match(line)
    if stated is not None and not _is_denied(stated["before"]):
        line = _SENTENCE.split(stated["answer"])[0]
    before_it, formula, after_it = _last_formula(line)
    if formula and not _is_denied(before_it) and not _ANOTHER.search(after_it):
        line = formula
    *before, last = _EQUALS.split(line)
    is_row = (
        re.search(r"[,;]|\b(?:or|and)\b|\\text", before[-1]) if len(before) > 1 else plain_quantity("".join(before))
    )
    return line if is_equation or is_row else last.strip() or line


def _last_formula(line: str) -> tuple[str, str, str]:
    r"""Return a line's last formula, `$...$`, `\(...\)` or `\[...\]`, between what stands before and behind it."""
    line = line.replace("$$", "$")
    *_, tail = pieces = line.split("$")
    opener = max(tail.rfind(mark, 0, max(tail.rfind(r"\)"), tail.rfind(r"\]"), 0)) for mark in (r"\(", r"\["))
    if opener >= 0:
        closer = min(at for mark in (r"\)", r"\]") if (at := tail.find(mark, opener + 2)) >= 0)
        return line[: len(line) - len(tail) + opener], tail[opener + 2 : closer], tail[closer + 2 :]
    if len(pieces) % 2:  # dollars come in pairs
        return "$".join(pieces[:-2]), "".join(pieces[-2:-1]), tail
    return line, "", ""


def _is_denied(before: str) -> bool:
    """Say whether words in front of an answer change its meaning, or put it into a row of answers."""
    is_row = re.search(r"[$)]\s*(?:[,;&/|-]|\\text|\b(?:and|or|to)\b|[{} ])+$", before)
    return bool(is_row) or any(map(_changes_meaning, _WORD.findall(before)[-4:]))


def _changes_meaning(word: str) -> bool:
    word = word.lower()
    return word in _BESIDE or word.endswith("n't")


def _is_bare(text: str) -> bool:
    """Say whether a text is an answer and nothing else: a number, a formula, a few words on one line."""
    text = text.strip()
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", text)
    is_short = len(words) < 6 or (len(text) <= 100 and not any(map(str.isdigit, text)))
    return bool(text) and "\n" not in text and (plain_quantity(text) is not None or is_short)
