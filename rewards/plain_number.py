r"""Read what is a plain number in any of the ways people and models write one; exactly, and in no time.

``1,080`` ``$18.50`` ``-3`` ``1/2`` ``\frac{1}{2}`` ``1\frac{1}{2}`` ``3\times10^5`` ``50\%`` ``5\text{ cm}`` are plain
numbers. ``3+4``, ``42/6``, ``2^3`` and ``\sqrt{49}`` are not: they leave the work to the reader.

Invariants: no text, however long or odd, makes anything here raise; the time taken grows no faster than the text.
"""

import re
from decimal import Decimal
from fractions import Fraction
from typing import Final, NamedTuple

from rewards.units import UNITS, Unit, find_unit

NUMBER: Final = re.compile(
    r"(?P<sign>(?<![0-9A-Za-z)])[-+])?"  # the minus of 9-7 takes away, it makes nothing negative
    r"[$€£¥]?"
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?=\.[0-9]))"
    r"(?:\.(?P<decimals>[0-9]+))?"
    r"(?:\s?/\s?(?P<divisor>[0-9]*[1-9][0-9]*))?"
)
MOST_DIGITS: Final = 64
"""A longer number answers nothing, and Python refuses to read one of thousands of digits."""
MOST_CHARACTERS: Final = 2000
"""Of an answer; who needs more has not answered. The last number is looked for among as many at the end of a text."""

_OPERATORS: Final = ("+", "-", "*", "/", "×", "÷")
_SPELLINGS: Final = (
    ("−", "-"),
    (r"\$", "$"),
    (r"\%", "%"),
    ("{,}", ","),
    (r"\,", ""),
    (r"\!", ""),
    (r"\;", " "),
    (r"\:", " "),
    (r"\ ", " "),
    ("~", " "),
    (r"\quad", " "),
    (r"\left", ""),
    (r"\right", ""),
    (r"\(", " "),
    (r"\)", " "),
    (r"\[", " "),
    (r"\]", " "),
    (r"^{\circ}", " degrees "),
    (r"^\circ", " degrees "),
    ("°", " degrees "),
    ("²", "^2"),
    ("³", "^3"),
    (r"\dfrac", r"\frac"),
    (r"\tfrac", r"\frac"),
)
_WORDS: Final = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s?\{([^{}]*)\}")
_FRACTION: Final = re.compile(
    r"(?:(?<![0-9.,])(?P<whole>[0-9]{1,20})\s?)?\\frac\s?(?:\{([0-9]{1,40})\}\{([0-9]{1,40})\}|([0-9])([0-9]))"
)
_SCIENTIFIC: Final = re.compile(
    r"(?P<digits>[0-9]{1,20}(?:\.[0-9]{1,20})?)\s?(?:\\times|\\cdot|[*×])\s?10\s?\^\s?"
    r"(?:\{(?P<braced>-?[0-9]{1,2})\}|(?P<bare>-?[0-9]{1,2}))"
)
_NAMES: Final = "|".join(sorted(map(re.escape, UNITS), key=len, reverse=True))
_POWERED_UNIT: Final = re.compile(rf"(?<![A-Za-z])({_NAMES})\s?\^\s?(?:\{{([23])\}}|([23]))")
_JOINED_UNIT: Final = re.compile(rf"(?<=[0-9])({_NAMES})(?![A-Za-z0-9])")
_MATHEMATICS: Final = re.compile(r"[\\^_{}√π∞]|[0-9][A-Za-z]|[A-Za-z][0-9]")
"""What shows that an answer is more than one number with words around it."""


class Quantity(NamedTuple):
    """One number, and what it counts."""

    value: Fraction
    unit: Unit | None = None
    is_percent: bool = False


def plain_quantity(text: str) -> Quantity | None:
    """Read a text that holds one number and no sum, whatever words stand around it; None for any other text."""
    if len(text) > MOST_CHARACTERS:
        return None
    text = plainly_spelled(text)
    numbers = list(NUMBER.finditer(text))
    if len(numbers) != 1 or _MATHEMATICS.search(text):
        return None
    before, after = text[: numbers[0].start()].rstrip(), text[numbers[0].end() :].strip().rstrip(".$").rstrip()
    if before.endswith(_OPERATORS) or after.startswith((*_OPERATORS, "=", "!")):
        return None
    value = _value(numbers[0])
    if value is None:
        return None
    return Quantity(value, find_unit(after.lstrip("$").lstrip()), after.startswith(("%", "percent")))


def same_quantity(said: Quantity, expected: Quantity) -> bool:
    """Compare two quantities: units count where both have one, and a percent sign on one side may mean either."""
    if said.unit is not None and expected.unit is not None:
        is_same_kind = said.unit.dimension == expected.unit.dimension
        return is_same_kind and said.value * said.unit.factor == expected.value * expected.unit.factor
    if said.value == expected.value:
        return True
    if said.is_percent == expected.is_percent:
        return False
    percent, share = (said, expected) if said.is_percent else (expected, said)
    return percent.value == 100 * share.value


def last_number(text: str) -> Fraction | None:
    """Return the last number in a text, or None; it is looked for near the end."""
    tail = text
    if len(text) > MOST_CHARACTERS:  # cut between words, or half a number would be read
        _, _, tail = text[-MOST_CHARACTERS:].replace("\n", " ").partition(" ")
    *_, last = [None, *NUMBER.finditer(plainly_spelled(tail))]
    return None if last is None else _value(last)


def is_mathematics(text: str) -> bool:
    """Say whether a text has more in it than numbers and words."""
    return _MATHEMATICS.search(plainly_spelled(text)) is not None


def plainly_spelled(text: str) -> str:
    """Replace LaTeX's and typography's ways to write plain things."""
    for spelled, plain in _SPELLINGS:
        text = text.replace(spelled, plain)
    text = _WORDS.sub(r" \1 ", text)
    text = _FRACTION.sub(_spell_fraction, text)
    text = _SCIENTIFIC.sub(_spell_power_of_ten, text)
    text = _POWERED_UNIT.sub(lambda unit: f" {'square' if '2' in unit.groups()[1:] else 'cubic'} {unit[1]}", text)
    return _JOINED_UNIT.sub(r" \1", text)


def _spell_fraction(fraction: re.Match[str]) -> str:
    whole, *parts = fraction.groups()
    numerator, denominator = (part for part in parts if part is not None)
    if whole is None:
        return f"{numerator}/{denominator}"
    if int(numerator) >= int(denominator):
        return fraction[0]  # 2\frac{4}{2} is a product, if it is anything
    return f"{int(whole) * int(denominator) + int(numerator)}/{denominator}"


def _spell_power_of_ten(number: re.Match[str]) -> str:
    exponent = int(number["braced"] or number["bare"])
    return format(Decimal(number["digits"]).scaleb(exponent), "f")


def _value(number: re.Match[str]) -> Fraction | None:
    """Compute a matched number exactly; None for a division left undone (42/7) or too many digits to be meant."""
    if len(number[0]) > MOST_DIGITS:
        return None
    digits = f"{number['sign'] or ''}{number['whole'].replace(',', '') or '0'}.{number['decimals'] or '0'}"
    value = Fraction(digits) / int(number["divisor"] or 1)
    return None if number["divisor"] and value.denominator == 1 else value
