r"""Read an answer that is one plain number, with what it counts; exactly, and in no time.

``1,080`` ``$18.50`` ``- 3`` ``1/2`` ``\frac{-1}{2}`` ``1\frac{1}{2}`` ``3\times10^5`` ``1.8e+01`` ``50\%`` ``x_1 = 18``
``5\text{ cm}`` ``7 (after 2 days)`` ``18 million dollars`` are plain numbers. ``3+4``, ``42/6``, ``\sqrt{49}`` leave
the work to the reader; ``3n``, ``x<18``, ``3 or 4``, ``10-18`` and ``not 18`` say something else: they are none. The
whole answer has to be understood; nothing in it is skipped to find a number.

Invariants: no text, however long or odd, makes anything here raise; the time taken grows no faster than the text.
"""

import re
from fractions import Fraction
from typing import Final, NamedTuple

from rewards.math_spelling import plainly_spelled
from rewards.units import Unit, find_unit

MOST_CHARACTERS: Final = 2000
"""Of an answer; who needs more has not answered."""
MOST_DIGITS: Final = 64
"""A longer number answers nothing, and Python refuses to read one of thousands of digits."""
FEWEST_PLACES: Final = 6
"""Decimal places from which on a decimal stands for the number that it is the rounding of: 0.333333 for 1/3."""

NAME: Final = (
    r"(?:(?:m?\\angle ?)?[A-Z]{1,4}|[a-z]|\\(?!frac|sqrt|pm|in(?:fty)?\b)[a-z]+)'*"
    r"(?:_\{[A-Za-z0-9, ]*\})?(?:\([A-Za-z0-9,\\ ]{1,12}\))?"
)
"""A variable, a side, an angle, or the value of a function: x, x_1, AB, \theta, f(x)."""
_UINT: Final = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]{0,2}(?: [0-9]{3})+|[0-9]+)(?![0-9])"
_INTEGER: Final = re.compile(r"-?[0-9]+")
"""Most answers: read at once."""
_POWER_OF_TEN: Final = r"10\^\{[-+]?[0-9]{1,2}\}"
_NUMBER: Final = (
    rf"(?:(?P<whole>[0-9]+) ?)?\\frac\{{(?P<inner>[-+]?)(?P<over>{_UINT})\}}\{{(?P<below>-?)(?P<under>{_UINT})\}}"
    rf"|(?:(?P<apart>[0-9]+) )?(?P<over2>{_UINT})/(?P<under2>{_UINT})"
    rf"|(?P<decimal>(?:{_UINT}|(?=\.[0-9]))(?:\.(?P<places>[0-9]*))?)"
    rf"(?:[eE](?P<e>[-+]?[0-9]{{1,2}})(?![0-9])|(?:\\times|\\cdot|\*| x )(?P<power>{_POWER_OF_TEN}))?"
    rf"|(?P<ten>{_POWER_OF_TEN})"
)
_QUANTITY: Final = re.compile(
    r"(?P<sign>[-+]?)(?P<currency>(?:[$€£¥]|USD ?)?)(?P<minus>-?)"
    rf"(?:(?P<open>\()(?P<within>-?)(?={_UINT}|\.|\\frac))?(?:{_NUMBER})(?(open)\))"
    r"(?:(?P<percent> ?(?:%|\"?(?:percent|pct)\"?(?![a-z])))|(?P<degrees>\^\\circ)|(?P<after>[$€£¥¢]))?"
    r"(?P<tail>(?![0-9.,/^]).*)"
)
_LEAD: Final = re.compile(
    rf"(?:(?P<name>{NAME})|(?P<words>[A-Za-z][A-Za-z' ,\-]{{0,120}})) ?"
    r"(?:=|\\approx|:|(?<= )(?:is|are|was|were|equals|costs|be)(?![A-Za-z]):?) ?"
    r"(?:(?:exactly|approximately|about|just|only) ?)?|(?:=|\\approx) ?"
)
_TURNED: Final = re.compile(rf"([-0-9][^=<>]*)=({NAME})")
_ASIDE: Final = re.compile(r" ?\((?P<words>[A-Za-z][A-Za-z0-9 ,.'%$-]*)\)$")
_TAIL: Final = re.compile(r"[A-Za-z' ,./-]*")
_WORD: Final = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
_MULTIPLIERS: Final = {"dozen": 12, "hundred": 100} | {
    name: 1000**power for power, name in enumerate(("thousand", "million", "billion", "trillion"), 1)
}
_CURRENCIES: Final = {"$": "dollars", "€": "euros", "£": "sterling", "¥": "yen", "¢": "cents"}
MEANINGFUL: Final = frozenset(
    "or nor not no never none cannot hardly neither either without except unless if maybe perhaps possibly wrong"
    " incorrect false than least most below above between under half halves third thirds quarter quarters fourth"
    " fourths fifth fifths sixth sixths eighth eighths tenth tenths hundredth hundredths thousandth thousandths"
    " twice double triple thrice squared cubed root roots factorial plus minus negative mod modulo base point power"
    f" infinity and to dozens hundreds thousands millions billions {' '.join(_MULTIPLIERS)}".split()
)
"""Words that change what the number beside them says; all other words only name what is counted."""
_NUMERALS: Final = frozenset(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety".split()
)
_SHORT: Final = frozenset(
    "a an is be so my of in on at to by we he it is us up cm mm km kg mg ml lb lbs ft yd mi hr mph per".split()
)


class Quantity(NamedTuple):
    """One number, and what it counts."""

    value: Fraction
    unit: Unit | None = None
    is_percent: bool = False
    places: int = 0
    """Decimal places that were written."""
    name: str = ""
    """The variable that it is said to be the value of."""
    may_be_variable: bool = False
    """Its unit is a single letter, and not marked as a word: ``3 m``."""


def plain_quantity(text: str) -> Quantity | None:
    """Read a text that holds one number, as a whole; None for any other text."""
    if len(text) <= MOST_DIGITS and _INTEGER.fullmatch(text):
        return Quantity(Fraction(text))
    return read_quantity(plainly_spelled(text)) if len(text) <= MOST_CHARACTERS else None


def read_quantity(spelled: str) -> Quantity | None:
    """Read a plainly spelled text that holds one number, as a whole; None for any other text."""
    turned = _TURNED.fullmatch(spelled)
    spelled = f"{turned[2]}={turned[1]}" if turned else re.sub(r'^"([^"]*)"', r"\1 ", spelled)
    lead = _LEAD.match(spelled)
    match = _QUANTITY.fullmatch(spelled, lead.end() if lead else 0)
    if match is None or len(match[0]) > MOST_CHARACTERS or (lead and changes_meaning(lead["words"] or "")):
        return None
    counted = _read_tail(match["tail"])
    value = _value(match)
    if counted is None or value is None:
        return None
    factor, unit, is_letter = counted
    if match["percent"] and (unit or factor != 1):
        return None
    currency = (match["currency"] or match["after"] or "").strip()
    unit = find_unit(_CURRENCIES.get(currency, currency)) or unit or find_unit("degrees" if match["degrees"] else "")
    name = lead["name"] or "" if lead else ""
    return Quantity(value * factor, unit, bool(match["percent"]), len(match["places"] or ""), name, is_letter)


def same_quantity(said: Quantity, expected: Quantity) -> bool:
    """Compare two quantities: names and units count where both have one, a percent sign where it is said of a share.

    A single letter behind the expected number may be a variable: it has to be said.
    """
    if said.name and expected.name and said.name != expected.name:
        return False
    if said.unit is not None and expected.unit is not None:
        is_same_kind = said.unit.dimension == expected.unit.dimension
        return is_same_kind and said.value * said.unit.factor == expected.value * expected.unit.factor
    is_percent_of_unit = (said.is_percent and expected.unit) or (expected.is_percent and said.unit)
    if is_percent_of_unit or (expected.may_be_variable and said.unit is None):
        return False
    if said.is_percent == expected.is_percent:
        return said.value == expected.value or is_rounding(said, expected.value) or is_rounding(expected, said.value)
    if expected.is_percent:
        return said.value in (expected.value, expected.value / 100)
    return said.value == (expected.value if abs(expected.value) > 1 else 100 * expected.value)


def is_rounding(decimal: Quantity, exact: Fraction) -> bool:
    """Say whether a decimal of enough places is what an endless one begins with, cut off or rounded."""
    divisor = exact.denominator
    for prime in (2, 5):
        while divisor % prime == 0:
            divisor //= prime
    last_place = Fraction(1, 10**decimal.places)
    is_near = -last_place / 2 <= abs(exact) - abs(decimal.value) < last_place and exact * decimal.value > 0
    return divisor > 1 and decimal.places >= FEWEST_PLACES and is_near


def _value(match: re.Match[str]) -> Fraction | None:
    """Compute a matched number exactly; None for a division left undone (42/7) or too many digits to be meant."""
    if len(match[0]) - len(match["tail"]) > MOST_DIGITS:
        return None
    signs = [match[name] or "" for name in ("sign", "minus", "within", "inner", "below")]
    if (match["sign"] and match["minus"] and not match["currency"]) or (match["open"] and "," in match[0]):
        return None
    factor = -1 if "".join(signs).count("-") % 2 else 1
    if match["ten"]:
        return factor * Fraction(10) ** int(match["ten"][4:-1])
    if match["decimal"] is not None:
        digits = match["decimal"].replace(",", "").replace(" ", "").rstrip(".")
        return factor * Fraction(digits) * Fraction(10) ** int(match["e"] or (match["power"] or "")[4:-1] or 0)
    over, under = (int(re.sub("[, ]", "", match[name] or match[f"{name}2"])) for name in ("over", "under"))
    whole = match["whole"] or match["apart"]
    if under == 0 or (whole and (over >= under or match["inner"])):
        return None
    value = Fraction(over, under)
    return None if value.denominator == 1 and under != 1 and over else factor * (value + int(whole or 0))


def _read_tail(tail: str) -> tuple[int, Unit | None, bool] | None:
    """Return what the words behind a number multiply it by and the unit that they are; None if they are more."""
    aside = _ASIDE.search(tail)
    if aside is not None:
        if changes_meaning(aside["words"]):
            return None
        unit = find_unit(aside["words"])
        tail = tail[: aside.start()] or (f'"{aside["words"]}"' if unit else "")
    is_marked, is_apart = tail.startswith('"'), tail.startswith((" ", '"', "-"))
    words = re.sub(r" ?\^\{([23])\}$", r"^\1", tail.replace('"', " ").strip(" .,")).replace(" per ", "/")
    first, _, rest = re.sub(r"(?<=unit)(s?)\^[23]$", r"\1", words).partition(" ")
    factor = _MULTIPLIERS.get(first.lower(), 1)
    if factor != 1:
        first, _, rest = rest.partition(" ")
    words = f"{first} {rest}".strip()
    unit = find_unit(words)
    is_letter = len(words.rstrip("^23")) == 1
    if unit is not None and (is_apart or not is_letter):
        return factor, unit, is_letter and not is_marked
    if is_letter or (words and not is_apart) or not _TAIL.fullmatch(words) or changes_meaning(words):
        return None
    if not _NUMERALS.isdisjoint(words.lower().split()):
        return None
    return factor, None if first == "in" else find_unit(re.split("[ /]", words)[0]), False


def changes_meaning(words: str) -> bool:
    """Say whether words, or letters that are no words, make a number beside them mean something else."""
    return any(
        word.lower() in MEANINGFUL or word.endswith("n't") or not (_is_word(word) or word.lower() in _SHORT)
        for word in _WORD.findall(words)
    )


def _is_word(word: str) -> bool:
    """Tell a word from a product of variables: it has three letters, a vowel, and is no piece of the alphabet."""
    word = word.lower()
    return len(word) > 2 and re.search("[aeiouy]", word) is not None and word not in "abcdefghijklmnopqrstuvwxyz"
