r"""Compare two expressions, or two equations, by what they come to.

math-verify's parser (latex2sympy2_extended) reads them. What is compared then is their value, at a few points and at
last to a thousand digits: two expressions that agree there are the same, whatever algebra it takes to show it, and
one that differs is found out by its first value. Nothing is expanded, solved or simplified: that may take hours.

Everything that costs time is bounded before it is done: characters, brackets, the digits of numbers, the commands that
an answer may hold, and the size of every value on the way. What lies beyond equals only what is spelled like it. Call
from the worker of a reward all the same.

Invariant: whatever is said, nothing here raises.

Source of comparing by values: Schwartz 1980, Fast probabilistic algorithms for verification of polynomial identities.
"""

import logging
import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

from rewards.math_quantity import FEWEST_PLACES, changes_meaning, read_quantity
from rewards.units import Unit, find_unit

MOST_CHARACTERS: Final = 300
"""Of one expression: a longer one is a derivation."""
MOST_BRACKETS: Final = 4
"""Round ones within each other: the parser tries each as many things."""
MOST_DEPTH: Final = 12
"""Of brackets of any kind."""
MOST_DIGITS: Final = 400
MOST_MAGNITUDE: Final = 1000
"""Of any value on the way, in decimal digits before or after the point."""
PRECISIONS: Final = (30, 30, 30, MOST_MAGNITUDE + 100)
"""Decimal digits of the values that are compared, one point after the other."""
POINTS: Final = ("1.3719", "-0.7351", "2.2193", "-1.8377", "0.4391", "3.1753", "-2.6311", "0.8713", "-0.3187", "1.1239")
"""What variables are set to; more variables than points are no answer."""

_FUNCTIONS: Final = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp"
_GREEK: Final = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi varphi chi"
    " psi omega"
)
_COMMANDS: Final = frozenset(f"frac sqrt cdot times pi lfloor rfloor lceil rceil binom {_FUNCTIONS} {_GREEK}".split())
_WORK: Final = re.compile(r"!|\\binom")
"""Work left to do: an answer may hold it only where the expected one does."""
_PLAIN: Final = re.compile(r"[A-Za-z0-9 +\-*/^_{}().|!\\\[\]]+")
_REFUSED: Final = re.compile(
    r"[0-9)]_|[0-9] +[0-9]|[-+] *[-+]|[0-9][eE][0-9]|\.[0-9]*\.|\\frac\{d[ a-z]?\}\{d|(?<!\\sqrt)\[|\|.*\|.*\|"
    rf"|[0-9]{{{MOST_DIGITS}}}|(?<![A-Za-z\\])[fghFGHP]\(|! *!|\\binom\{{[^{{}}]{{4}}"
)
"""What the parser reads otherwise than people do, or computes while it reads."""
_DECIMAL: Final = re.compile(r"([0-9]*)\.([0-9]+)|([0-9]+)\.")
_MIXED: Final = re.compile(r"(?<![0-9A-Za-z}).])([0-9]+)\\frac\{([0-9]+)\}\{([0-9]+)\}")
_JUXTAPOSED: Final = re.compile(
    r"(?<=[0-9)}])(?=\()|(?<=\))(?=[0-9A-Za-z]|\\(?!cdot|times))|(?<=[0-9}])(?=\\frac)"
    r"|(?<![\\A-Za-z])(?<=[A-Za-z])(?=\()"
)
_CALLED: Final = re.compile(r"(\\(?:sin|cos|tan|cot|sec|csc|log|ln|arc[a-z]{3})(?:[_^]\{[^{}]*\})*)(?=[(\\])")
_UNIT: Final = re.compile(
    r'(?P<body>.*[^" ]) ?(?:"(?P<words>[A-Za-z ./]+)"|(?<=[ })0-9])(?P<bare>[a-z]{2,}))(?:\^\{(?P<power>[23])\})?'
)


class Unbounded(Exception):
    """A value that cannot be computed here, or is none."""


def same_expression(said: str, expected: str) -> bool:
    """Say whether two plainly spelled expressions without parts are equal."""
    (said, unit), (expected, wanted) = _without_unit(said), _without_unit(expected)
    if unit is not None and wanted is not None and unit != wanted:
        return False
    if _same_words(said, expected):
        return True
    if set(_WORK.findall(said)) - set(_WORK.findall(expected)):
        return False
    quantity = read_quantity(said)
    places = quantity.places if quantity is not None and quantity.places >= FEWEST_PLACES else 0
    one, other = _parsed(said), _parsed(expected)
    if one is None or other is None:
        return False
    try:
        return all(_is_equal(one, other, precision, places) for precision, (one, other) in _values(one, other))
    except Unbounded:
        return False


def same_relation(said: tuple[str, str, str], expected: tuple[str, str, str]) -> bool:
    """Say whether two relations (sign, left, right) say the same: one is the other multiplied by a number."""
    sides = [_parsed(side) for side in (*said[1:], *expected[1:])]
    if any(side is None for side in sides):
        return False
    first = 0
    try:
        for precision, (left, right, wanted_left, wanted_right) in _values(*sides):
            one, other = left - right, wanted_left - wanted_right
            if not one or not other or (one / other).imag:
                return False
            first = first or one / other
            if not _is_equal(one / other, first, min(precision, PRECISIONS[0]), 0):
                return False
    except Unbounded:
        return False
    turned = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}.get(said[0], said[0])
    return expected[0] == (said[0] if first.real > 0 else turned)


def load() -> None:
    """Import and use once what takes long for the first time: the parser learns its grammar while it reads."""
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    for said in (
        r"(x+1)^{2}\cdot\frac{\sqrt{3}}{2}",
        r"3\pi x_{1}-\frac{1}{2}|y|",
        r"a_{n}+x^{2}y-\frac{a}{b}x^{-1}+5y",
        r"\sin x+\log_{2}(8)",
        "2x(x+1)-3i",
    ):
        same_expression(said, "x+1")


def _is_equal(one: Any, other: Any, precision: int, places: int) -> bool:
    """Compare two values, but for what computing rounds; a decimal of ``places`` may be the other one rounded."""
    import mpmath

    if places:
        last_place = mpmath.mpf(10) ** -places
        return bool(abs(one - other) < last_place and abs(one) - abs(other) <= last_place / 2)
    margin = mpmath.mpf(10) ** -(precision - (15 if precision < MOST_MAGNITUDE else 40))
    return bool(abs(one - other) <= margin * max(abs(one), abs(other), 1))


def _values(*nodes: Any) -> Iterator[tuple[int, list[Any]]]:
    """Yield how precise the values are, and the values of all expressions at one point after the other.

    Raises:
        Unbounded: one has no value that can be computed.
    """
    import mpmath

    names = sorted({symbol.name for node in nodes for symbol in node.free_symbols} - {"i"})
    if len(names) > len(POINTS):
        raise Unbounded
    for index, precision in enumerate(PRECISIONS if names else PRECISIONS[-2:]):
        with mpmath.workdps(precision):
            points = {name: mpmath.mpf(POINTS[(number + 3 * index) % len(POINTS)]) for number, name in enumerate(names)}
            yield precision, [_value(node, points | {"i": mpmath.mpc(0, 1)}) for node in nodes]


def _value(node: Any, points: Mapping[str, Any]) -> Any:
    """Compute one value from the leaves up, none of them too large to write out."""
    import mpmath

    arguments = [_value(argument, points) for argument in node.args]
    kind = type(node).__name__
    try:
        if node.is_Rational:
            value = mpmath.mpf(node.p) / node.q
        elif node.is_Symbol:
            value = points[node.name]
        elif kind == "Pow":
            value = _power(*arguments, written=node.exp)
        elif kind in ("exp", "sinh", "cosh") and abs(arguments[0]) > MOST_MAGNITUDE:
            raise Unbounded
        elif kind == "factorial":
            value = mpmath.factorial(_natural(arguments[0]))
        else:
            value = _computed(kind)(*arguments)
    except (ZeroDivisionError, KeyError, ValueError, OverflowError, TypeError):
        raise Unbounded from None
    if not mpmath.isfinite(value) or (value and abs(mpmath.mag(value)) > MOST_MAGNITUDE / math.log10(2)):
        raise Unbounded
    return value


@lru_cache
def _computed(kind: str) -> Any:
    """Return what computes a kind of expression from its parts' values; ``KeyError`` for one that is not known."""
    import mpmath

    own = {
        "Add": lambda *terms: mpmath.fsum(terms),
        "Mul": lambda *factors: mpmath.fprod(factors),
        "Pi": lambda: +mpmath.pi,
        "Exp1": lambda: +mpmath.e,
        "ImaginaryUnit": lambda: mpmath.mpc(0, 1),
        "UnevaluatedExpr": lambda value: value,
        "Abs": abs,
        "log": mpmath.log,
        "ceiling": mpmath.ceil,
    }
    known = "exp sin cos tan cot sec csc asin acos atan sinh cosh tanh floor".split()
    return own[kind] if kind not in known else getattr(mpmath, kind)


def _power(base: Any, exponent: Any, *, written: Any) -> Any:
    """Raise to a power; an odd root of a negative number is the negative one."""
    import mpmath

    if not base:
        return base if mpmath.re(exponent) > 0 else 1 / base
    if abs(exponent) * abs(mpmath.log(abs(base), 10)) > MOST_MAGNITUDE:
        raise Unbounded
    if written.is_Rational and written.q % 2 and not mpmath.im(base) and mpmath.re(base) < 0:
        return (-1) ** written.p * mpmath.power(-base, exponent)
    return mpmath.power(base, exponent)


def _natural(number: Any) -> int:
    """Return a whole number whose factorial can be written out."""
    import mpmath

    if mpmath.im(number) or not 0 <= mpmath.re(number) <= 450 or number != int(mpmath.re(number)):
        raise Unbounded
    return int(number)


@lru_cache(maxsize=512)
def _parsed(text: str) -> Any:
    """Return the expression that a whole text is, None for what is none or too much to read."""
    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from sympy import Expr

    text = text.lstrip("+")
    if len(text) > MOST_CHARACTERS or not _PLAIN.fullmatch(text) or _REFUSED.search(text):
        return None
    if not _COMMANDS.issuperset(re.findall(r"\\([A-Za-z]+|.)", text)) or _depth(text, "(") > MOST_BRACKETS:
        return None
    if _depth(text, "([{") > MOST_DEPTH:
        return None
    text = _DECIMAL.sub(_fraction, _MIXED.sub(_sum, text))
    try:
        parsed = latex2sympy(
            _JUXTAPOSED.sub(r"\\cdot ", _CALLED.sub(r"\1 ", text)),
            is_real=True,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except Exception:  # noqa: BLE001  # the parser raises plain exceptions, and whatever sympy raises
        return None
    return parsed if isinstance(parsed, Expr) else None


def _sum(mixed: re.Match[str]) -> str:
    r"""Write ``1\frac{1}{2}`` as a sum, ``2\frac{4}{2}`` as the product that it is if anything."""
    sign = "+" if int(mixed[2]) < int(mixed[3]) else r"\cdot"
    return rf"({mixed[1]}{sign}\frac{{{mixed[2]}}}{{{mixed[3]}}})"


def _fraction(decimal: re.Match[str]) -> str:
    """Write a decimal exactly; the parser would round it."""
    whole, places = decimal[1] or decimal[3] or "0", decimal[2] or ""
    return rf"\frac{{{whole}{places}}}{{1{'0' * len(places)}}}"


def _without_unit(text: str) -> tuple[str, Unit | None]:
    r"""Split ``2\sqrt{3}\text{ cm}`` into an expression and its unit; words that only name what is counted go too."""
    match = _UNIT.fullmatch(text)
    if match is not None:
        unit = find_unit((match["words"] or match["bare"]) + (f"^{match['power']}" if match["power"] else ""))
        if unit is not None or (match["words"] and not changes_meaning(match["words"])):
            return match["body"], unit
    return text.removesuffix(r"^\circ"), None


def _same_words(said: str, expected: str) -> bool:
    """Say whether two texts are spelled alike, blanks apart; upper and lower case are alike in words."""
    one, other = (
        re.sub(r"(?<![0-9]) | (?![0-9])", "", text.replace('"', "").lstrip("+").strip("()"))
        for text in (said, expected)
    )
    if one == other:
        return bool(one)
    are_words = one.isalpha() and other.isalpha() and (len(one) > 2 or '"' in said or '"' in expected)
    return are_words and one.casefold() == other.casefold()


def _depth(text: str, opening: str) -> int:
    depth = deepest = 0
    closing = opening.translate(str.maketrans("([{", ")]}"))
    for character in text:
        depth += (character in opening) - (character in closing)
        deepest = max(deepest, depth)
    return deepest
