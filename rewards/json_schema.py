"""Score a JSON document by a JSON Schema: whether it is one, and whether it is of the shape that was asked for.

The document is the last fenced block of JSON, else the whole answer. It has to be strict JSON: no ``NaN``, no number
beyond any float, no key twice, no nesting without end. A schema refers to itself only: nothing is fetched.

Invariant: no document makes the check raise; a schema that is none does.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from areal_async import reward
from rewards.fenced import last_block
from rewards.thought import after_thought

MOST_DEPTH: Final = 64
_LANGUAGES: Final = ("json", "")


def load() -> None:
    """Import what takes a while on a busy machine."""
    import jsonschema  # noqa: F401


@reward(timeout_s=5.0, prepare=load)
def json_matches(text: str, schema: Mapping[str, Any]) -> float:
    """Return 1.0 when the answer is a JSON document that the schema (draft 2020-12 unless it says) allows, else 0.0.

    Raises:
        ValueError: the schema is none, or refers to what it does not hold.
    """
    import jsonschema
    import referencing.exceptions

    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        validator.check_schema(schema)
        # the registry holds nothing, and looks for nothing elsewhere
        check = validator(schema, registry=referencing.Registry())
        try:
            said = after_thought(text)
            document = strict_json(last_block(said, _LANGUAGES) or said)
        except ValueError:
            return 0.0
        return float(check.is_valid(document))
    except (jsonschema.SchemaError, referencing.exceptions.Unresolvable) as exc:
        raise ValueError(f"schema: {str(exc).partition(chr(10))[0]}; give one that is complete in itself") from exc


def strict_json(text: str) -> Any:
    """Read a JSON document.

    Raises:
        ValueError: it is none, or more than JSON allows.
    """
    try:
        document = json.loads(
            text, parse_constant=_refuse, parse_float=_finite, parse_int=_short, object_pairs_hook=_without_repeats
        )
    except RecursionError:
        raise ValueError("nested without end") from None
    if _is_deeper(document, MOST_DEPTH):
        raise ValueError(f"nested deeper than {MOST_DEPTH}")
    return document


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits:.20} is beyond any float")
    return value


def _short(digits: str) -> int:
    if len(digits) > 40:
        raise ValueError(f"{digits:.20}... has {len(digits)} digits")
    return int(digits)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("a key stands there twice")
    return document


def _is_deeper(document: Any, most: int) -> bool:
    """Say whether anything lies deeper; level by level, as a recursion would be another's to exhaust."""
    level = [document]
    for _ in range(most):
        level = [
            inner
            for one in level
            if isinstance(one, list | dict)
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return False
    return True
