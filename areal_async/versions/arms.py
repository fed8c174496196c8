"""What an arm has come to, in words, from its summary: as the controller reports it and ``arms.jsonl`` keeps it."""

from collections.abc import Mapping
from typing import Any

FILE = "arms.jsonl"
"""In a run's directory: a line for each arm, now and then."""


def arm_text(arm: Mapping[str, Any]) -> str:
    """Return ``1-40: better by 0.102 (+0.004 to +0.194, 120 pairs); 240 asked at share 0.1, 3 failed``."""
    num_failed, num_pairs = arm.get("num_failed") or 0, arm.get("num_pairs") or 0
    failed = f", {num_failed} failed ({arm.get('last_failure')})" if num_failed else ""
    asked = f"{arm.get('num_asked')} asked at share {arm.get('share'):g}{failed}"
    return f"{arm.get('version')}: {_found(arm) if num_pairs else 'no pair yet'}; {asked}"


def _found(arm: Mapping[str, Any]) -> str:
    difference, low, high = (float(arm.get(key) or 0) for key in ("difference", "low", "high"))
    if arm.get("decided_at"):
        found = f"{'better' if low >= 0 else 'worse'} by {abs(difference):.3f}"
    else:
        found = f"not told apart, {difference:+.3f}"
    return f"{found} ({low:+.3f} to {high:+.3f}, {arm['num_pairs']} pairs with {arm.get('compared_with')})"
