"""Units of measurement that answers carry, and what they come to in one another.

Only a word that is known here is a unit; "apples", "per day" and the like are words around a number. Factors are exact.
"""

from fractions import Fraction
from typing import Final, NamedTuple


class Unit(NamedTuple):
    """What is measured, and how many of its base unit this is."""

    dimension: str
    factor: Fraction


_BASES: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "length": (
        ("mm millimeter millimeters millimetre millimetres", "1/1000"),
        ("cm centimeter centimeters centimetre centimetres", "1/100"),
        ("dm", "1/10"),
        ("m meter meters metre metres", "1"),
        ("km kilometer kilometers kilometre kilometres", "1000"),
        ("in inch inches", "0.0254"),
        ("ft foot feet", "0.3048"),
        ("yd yard yards", "0.9144"),
        ("mi mile miles", "1609.344"),
    ),
    "mass": (
        ("mg milligram milligrams", "1/1000"),
        ("g gram grams", "1"),
        ("kg kilogram kilograms", "1000"),
        ("tonne tonnes", "1000000"),
        ("oz ounce ounces", "28.349523125"),
        ("lb lbs", "453.59237"),
    ),
    "time": (
        ("ms millisecond milliseconds", "1/1000"),
        ("s sec second seconds", "1"),
        ("min mins minute minutes", "60"),
        ("h hr hrs hour hours", "3600"),
        ("day days", "86400"),
        ("week weeks", "604800"),
    ),
    "volume": (
        ("ml mL milliliter milliliters millilitre millilitres", "1/1000"),
        ("l L liter liters litre litres", "1"),
    ),
    "speed": (
        ("m/s meter/second meters/second", "1"),
        ("km/h kmh kmph kilometer/hour kilometers/hour", "5/18"),
        ("mph mi/h mile/hour miles/hour", "0.44704"),
    ),
    "dollars": (("cent cents ¢", "1/100"), ("dollar dollars USD bucks", "1")),
    "euros": (("euro euros EUR", "1"),),
    "sterling": (("sterling GBP", "1"),),
    "yen": (("yen", "1"),),
    "angle": (("degree degrees", "1"),),
    "arc": (("rad radian radians", "1"),),
}
UNITS: Final = {
    name: Unit(dimension, Fraction(factor))
    for dimension, units in _BASES.items()
    for names, factor in units
    for name in names.split()
}
_POWERS: Final = {"square": "2", "sq": "2", "cubic": "3", "squared": "2", "cubed": "3"}


def find_unit(words: str) -> Unit | None:
    """Return the unit that these words are and nothing else: ``cm``, ``cm^2``, ``square feet``; None for others."""
    name, _, power = words.strip().rstrip(".").partition("^")
    first, _, second = name.partition(" ")
    if second and not power:
        name, power = (
            (second, _POWERS.get(first.lower(), "")) if first.lower() in _POWERS else (first, _POWERS.get(second, ""))
        )
        if not power:
            return None
    unit = UNITS.get(name) or UNITS.get(name.lower())
    if unit is None or not power:
        return unit
    if power not in ("2", "3") or unit.dimension != "length":
        return None
    return Unit(f"length^{power}", unit.factor ** int(power))
