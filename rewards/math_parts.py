r"""Take an answer apart into what it is made of, and compare part by part.

    \{1, 2\}   1, 2   1 \text{ and } 2   x = 1 or x = 2   \pm 1     the same set: the order of elements does not count
    (1, 2)   [1, 2)   (-\infty, 3]   (1, 2, 3)   1:2                parts in their order, and the brackets count
    (0, 1) \cup (2, 3)                                              a set of intervals
    1 < x \le 3   x \in (1, 3]   3 \ge x > 1                        an interval with a name
    \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}                    rows in their order, of cells in theirs
    x = 5   f(x) = 2x   (x, y) = (1, 2)                             a named answer
    y = 2x + 1   2x - y + 1 = 0   x + y \le 5                       a relation: the same up to a factor

Names count where both answers have one. Parts without parts are compared as plain numbers, else as expressions. A list
of guesses equals no single answer. Runs in the worker of a reward.

Invariant: whatever is said, nothing here raises.
"""

import re
from dataclasses import dataclass
from typing import Final

from rewards.math_algebra import same_expression, same_relation
from rewards.math_quantity import MOST_CHARACTERS, NAME, read_quantity, same_quantity
from rewards.math_spelling import plainly_spelled

MOST_TIMES_AS_LONG: Final = 4
MOST_MORE_CHARACTERS: Final = 160
"""What is longer than the expected answer by more than these is another one, or the way to it."""
MOST_PARTS: Final = 64
MOST_DEPTH: Final = 8

_BRACKETS: Final = {"(": ")]", "[": "])", r"\{": (r"\}",), r"\langle": (r"\rangle",)}
_CONNECTOR: Final = re.compile(
    r'(?:, ?)?"(?:and|or)"|(?:,|(?<=[^A-Za-z])) ?\b(?:and|or)\b(?= ?[^A-Za-z]| [A-Za-z]\b)|;'
)
_THOUSANDS: Final = re.compile(r"(?<![0-9,])([1-9][0-9]{0,2}(?:,[0-9]{3})+)(?![0-9]|,[0-9])")
_TOKEN: Final = re.compile(r"\\(?:begin|end)\{[a-z]*\}(?:\{[lcr|]*\})?|\\[A-Za-z]+|\\.|.")
_RELATIONS: Final = {
    "=": "=",
    r"\approx": "=",
    r"\ne": "!=",
    "<": "<",
    ">": ">",
    r"\le": "<=",
    r"\ge": ">=",
    r"\in": "in",
}
_FLIPPED: Final = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_TIME: Final = re.compile(r":[0-9]{2} ?[ap]")
_IS_NAME: Final = re.compile(
    rf"{NAME}|\|{NAME}\||{NAME}[:/]{NAME}"
    rf"|\\frac\{{{NAME}\}}\{{{NAME}\}}|\({NAME}(?:, ?{NAME})*\)|[A-Za-z]{{3,20}}(?: [A-Za-z]{{1,20}}){{0,5}}"
)
_MATRICES: Final = frozenset(
    rf"\begin{{{kind}}}" for kind in ("matrix", "pmatrix", "bmatrix", "Bmatrix", "array", "smallmatrix")
)


@dataclass(frozen=True, slots=True)
class Parts:
    """An answer that has parts."""

    brackets: str
    """``{}`` for a set, where neither order nor repetition counts; ``and`` for what holds at once; else as written."""
    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Named:
    """What a variable is, or what it lies in."""

    name: str
    value: "Node"


@dataclass(frozen=True, slots=True)
class Relation:
    """An equation or inequality that names nothing."""

    sign: str
    left: str
    right: str


Node = Parts | Named | Relation | str


class TooDeep(Exception):
    """Brackets within brackets within brackets, or parts without end: no answer."""


def same_answer(said: str, expected: str) -> bool:
    """Say whether two answers are the same, part by part."""
    if len(said) > MOST_CHARACTERS:
        return False
    said, expected = plainly_spelled(said), plainly_spelled(expected)
    if len(said) > MOST_TIMES_AS_LONG * len(expected) + MOST_MORE_CHARACTERS:
        return False
    if said.replace(" ", "") == expected.replace(" ", "") and not re.search(r"[0-9] [0-9]", said + expected):
        return bool(expected)
    try:
        return _same(structure(said), structure(expected))
    except TooDeep:
        return False


def structure(text: str, depth: int = 0) -> Node:
    """Take a plainly spelled answer apart; one that has no parts comes back as it is.

    Raises:
        TooDeep: it nests or lists more than an answer does.
    """
    if depth > MOST_DEPTH:
        raise TooDeep
    text = text.strip(" ;").rstrip(".")
    is_open = depth == 0 and not set("([{").intersection(text)  # in brackets, commas separate
    listed = _THOUSANDS.sub(lambda number: number[1].replace(",", ""), text) if is_open else text
    listed = _CONNECTOR.sub(lambda word: " \\and," if "and" in word[0] else ",", listed)
    for separator in (r"\cup", ","):
        parts = _split(listed, separator)
        if len(parts) > 1:
            is_and = any(part.endswith("\\and") for part in parts)
            nodes = tuple(structure(part.removesuffix("\\and"), depth + 1) for part in parts)
            is_range = any(isinstance(node, Relation) or _is_interval(node) for node in nodes)
            return Parts("and" if is_and and is_range else "{}", nodes)
    return _related(text, depth) or _bracketed(text, depth) or _either(text, depth)


def _related(text: str, depth: int) -> Node | None:
    r"""Read ``x = 5``, ``5 = x``, ``x \in (1, 2]``, ``1 < x \le 2`` and equations."""
    sides, signs = [""], []
    nesting = 0
    for token in _TOKEN.findall(text):
        nesting += (token in ("(", "[", "{", r"\{")) - (token in (")", "]", "}", r"\}"))
        if nesting == 0 and token in _RELATIONS:
            signs.append(_RELATIONS[token])
            sides.append("")
        else:
            sides[-1] += token
    sides = [side.strip() for side in sides]
    if not signs or not all(sides):
        return None
    is_name = [_IS_NAME.fullmatch(side) is not None for side in sides]
    if is_name[0] and (signs == ["in"] or set(signs) == {"="}):
        return Named(sides[0], structure(sides[-1], depth + 1))
    if signs == ["="] and is_name[1]:
        return Named(sides[1], structure(sides[0], depth + 1))
    if len(signs) == 1 and signs[0] in _FLIPPED and any(is_name):
        sign = signs[0] if is_name[0] else _FLIPPED[signs[0]]
        name, bound = sides if is_name[0] else sides[::-1]
        ends = ("-\\infty", bound) if "<" in sign else (bound, "\\infty")
        return Named(name, Parts(("(" if sign != ">=" else "[") + (")" if sign != "<=" else "]"), ends))
    if len(signs) == 2 and is_name[1] and signs[0][0] == signs[1][0] in "<>":
        low, high = (sides[0], sides[2]) if "<" in signs[0] else (sides[2], sides[0])
        first, second = signs if "<" in signs[0] else signs[::-1]
        return Named(sides[1], Parts("[("[first in "<>"] + "])"[second in "<>"], (low, high)))
    return Relation(signs[0], *sides) if len(signs) == 1 and signs != ["in"] else None


def _bracketed(text: str, depth: int) -> Node | None:
    """Read a set, a tuple, an interval, a matrix or a ratio."""
    tokens = _TOKEN.findall(text)
    if not tokens:
        return None
    if tokens[0] in ("(", "[") and "".join(tokens[1:2]).startswith(r"\begin") and tokens[-2].startswith(r"\end"):
        tokens = tokens[1:-1]
    if tokens[0].partition("}")[0] + "}" in _MATRICES and tokens[-1].startswith(r"\end"):
        rows = _split("".join(tokens[1:-1]).removesuffix(r"\\"), r"\\")
        return Parts(
            "rows", tuple(Parts("row", tuple(structure(cell, depth + 1) for cell in _split(row, "&"))) for row in rows)
        )
    if tokens[-1] in _BRACKETS.get(tokens[0], ()):
        inside = "".join(tokens[1:-1])
        if _is_balanced(inside):
            parts = _split(inside.replace(";", ","), ",")
            if tokens[0] == r"\{" or len(parts) > 1:
                brackets = "{}" if tokens[0] == r"\{" else tokens[0] + tokens[-1]
                return Parts(brackets, tuple(structure(part, depth + 1) for part in parts) if inside.strip() else ())
            return structure(inside, depth + 1) if tokens[0] == "(" and not text.endswith("]") else None
    if text == r"\emptyset":
        return Parts("{}", ())
    ratio = [] if _TIME.search(text) else _split(text, ":")
    return Parts(":", tuple(structure(part, depth + 1) for part in ratio)) if len(ratio) > 1 else None


def _either(text: str, depth: int) -> Node:
    r"""Read ``1 \pm 2`` as the set of both."""
    if text.count(r"\pm") != 1:
        return text
    plus, minus = (structure(text.replace(r"\pm", sign).lstrip("+"), depth + 1) for sign in "+-")
    return Parts("{}", (plus, minus))


def _same(said: Node, expected: Node) -> bool:
    is_other = isinstance(said, Named) and isinstance(expected, Named) and said.name != expected.name
    if is_other or isinstance(said, Relation) or isinstance(expected, Relation):
        return _same_equation(said, expected)
    if isinstance(said, Named) or isinstance(expected, Named):
        return _same(*(node.value if isinstance(node, Named) else node for node in (said, expected)))
    if isinstance(said, str) and isinstance(expected, str):
        return _same_part(said, expected)
    said, expected = _as_parts(said), _as_parts(expected)
    if said.brackets != expected.brackets:
        return False
    if said.brackets in ("{}", "and"):
        return _same_elements(said.parts, expected.parts)
    return len(said.parts) == len(expected.parts) and all(map(_same, said.parts, expected.parts))


def _same_elements(said: "tuple[Node, ...]", expected: "tuple[Node, ...]") -> bool:
    """Compare sets; where the elements are values of different variables, without names they have to be in order."""
    names = {part.name for part in expected + said if isinstance(part, Named)}
    if len(names) > 1 and not all(isinstance(part, Named) for part in expected + said):
        return len(said) == len(expected) and all(map(_same, said, expected))
    return all(any(_same(one, other) for one in said) for other in expected) and all(
        any(_same(one, other) for other in expected) for one in said
    )


def _same_equation(said: Node, expected: Node) -> bool:
    said, expected = _as_relation(said), _as_relation(expected)
    if not isinstance(said, Relation) or not isinstance(expected, Relation):
        return False
    return same_relation((said.sign, said.left, said.right), (expected.sign, expected.left, expected.right))


def _as_relation(node: Node) -> Node:
    """Return ``y = 2x`` and ``y < 2x`` as the relations that they are as well; what only tells a number is none."""
    if not isinstance(node, Named):
        return node
    sign, bound = "=", node.value
    if isinstance(bound, Parts) and _is_interval(node) and len(bound.parts) == 2:
        low, high = bound.parts
        is_below = low == "-\\infty"
        sign = ("<" if is_below else ">") + ("=" if set("[]").intersection(bound.brackets) else "")
        bound = high if is_below else low
    if isinstance(bound, str) and re.search("[a-z]", re.sub(r"\\[a-z]+", "", bound)):
        return Relation(sign, node.name, bound)
    return node


def _as_parts(answer: Node) -> Parts:
    """Return what stands alone as a set of one: an equation with one solution is answered either way."""
    return answer if isinstance(answer, Parts) else Parts("{}", (answer,))


def _is_interval(node: Node) -> bool:
    return isinstance(node, Named) and isinstance(node.value, Parts) and node.value.brackets != "{}"


def _same_part(said: str, expected: str) -> bool:
    quantity, other = read_quantity(expected), read_quantity(said)
    if quantity is not None and other is not None:
        return same_quantity(other, quantity)
    return (quantity is None or quantity.may_be_variable) and same_expression(said, expected)


def _split(text: str, separator: str) -> list[str]:
    """Split where no bracket is open; empty parts make it no list at all.

    Raises:
        TooDeep: there are more parts than an answer has.
    """
    parts, depth = [""], 0
    for token in _TOKEN.findall(text):
        depth += token in ("(", "[", "{", r"\{") or token.startswith(r"\begin")
        depth -= token in (")", "]", "}", r"\}") or token.startswith(r"\end")
        if depth == 0 and token == separator:
            parts.append("")
        else:
            parts[-1] += token
    if len(parts) > MOST_PARTS:
        raise TooDeep
    return parts if all(part.strip() for part in parts) else [text]


def _is_balanced(text: str) -> bool:
    """Say whether the brackets around a text belong together: (a)(b) is no pair."""
    depth = 0
    for token in _TOKEN.findall(text):
        depth += (token in ("(", "[", "{", r"\{")) - (token in (")", "]", "}", r"\}"))
        if depth < 0:
            return False
    return depth == 0
