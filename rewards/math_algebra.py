r"""Compare two expressions by computer algebra, once it is sure that the algebra is not what the answer leaves undone.

The algebra is math-verify's. It is asked for one thing, whether two given expressions are equal: its own search for an
answer in a text takes any number it can read. Call from the worker of a reward: what looks harmless may take hours.

Invariant: whatever is said, nothing here raises.
"""

import logging
import re
from typing import Any, Final

MOST_CHARACTERS: Final = 300
"""Of one expression: a longer one is a derivation, and its algebra takes minutes."""
MOST_DEPTH: Final = 12
_KNOWN_SIGNS: Final = frozenset("√π×÷·−≤≥≠±°∪∩∈∞²³½¼¾")

_WORK: Final = re.compile(
    r"\\(?:i*int|oint|sum|prod|lim|[dt]?binom|choose|det|max|min|gcd|lcm|b?mod|pmod|prime|partial|operatorname|deg)"
    r"(?![A-Za-z])|\\frac\s?\{\s?d|!|\|"
)
"""What stands for work to do; an answer may hold only what the expected one holds as well."""
_HUGE: Final = (
    re.compile(r"\^\s?\{?\s?[-+(]*[0-9]{4,}"),
    re.compile(r"\^[^A-Za-z\\]*\^"),  # 9^9^9, 9^{9^9}
    re.compile(r"\*\s?\*"),
    re.compile(r"[0-9]{5,}\s?!|!\s?!"),
    re.compile(r"[0-9.,\s]{64,}"),
    re.compile(r"[0-9]e[-+]?[0-9]{3,}", re.IGNORECASE),
)
"""What no machine can write out: refused, instead of computed until the worker is killed."""


def same_expression(said: str, expected: str) -> bool:
    """Say whether two expressions without parts are equal."""
    said, expected = _tidied(said), _tidied(expected)
    if not said or len(said) > MOST_CHARACTERS:
        return False
    if said == expected:
        return True
    if _depth(said) > MOST_DEPTH or not _is_plain_text(said) or any(huge.search(said) for huge in _HUGE):
        return False
    work = set(_WORK.findall(said))
    if work - set(_WORK.findall(expected)):
        return False
    wanted, found = _parsed(expected), _parsed(said)
    return wanted is not None and found is not None and _is_equal(wanted, found)


def _is_equal(expected: Any, said: Any) -> bool:
    from math_verify import verify

    return bool(verify([expected], [said], timeout_seconds=None))


def _parsed(latex: str) -> Any:
    """Return the expression that a whole text is, None for what is none; its own time limits are alarm signals."""
    from math_verify import LatexExtractionConfig, parse

    found = parse(
        f"${latex}$",
        extraction_config=[LatexExtractionConfig()],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return found[0] if found else None


def load() -> None:
    """Import and use once what takes seconds for the first time, and have it not warn that alarm signals are off."""
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    same_expression(r"(x+1)^2", r"x^2+2x+1")


def _tidied(text: str) -> str:
    return " ".join(text.replace("$", " ").split()).strip(" .")


def _is_plain_text(text: str) -> bool:
    return all(character.isascii() or character in _KNOWN_SIGNS for character in text)


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest
