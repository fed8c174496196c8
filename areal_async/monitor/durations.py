"""How long ago something was, in words."""

from datetime import UTC, datetime


def seconds_since(at: str) -> float:
    """Return how long ago a moment in ISO 8601 is; 0 for what is none."""
    try:
        return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(at)).total_seconds())
    except (ValueError, TypeError):
        return 0.0


def duration_text(seconds: float) -> str:
    """Return a duration in the unit that suits it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
