"""A comparison as one HTML page: the figures, and what both sides said to the rows that differ. Nothing is fetched."""

from collections.abc import Mapping, Sequence

from areal_async.monitor.report.charts import COLOURS
from areal_async.monitor.report.page import make_environment
from areal_async.versions import comparison_text
from areal_async.versions.comparison import Changed, Comparison

MAX_ROWS = 200
"""Rows that are shown of those that differ."""
MAX_ANSWERS = 8
"""Answers of one side to a row."""
MAX_CHARACTERS = 4000
"""Of an answer, and of a row."""


def render(comparison: Comparison, changed: Sequence[Changed], rows: Mapping[tuple[str, int], str]) -> str:
    """Return the whole page.

    Args:
        rows: text of the rows that are shown.
    """
    template = make_environment().get_template("page.comparison.html")
    return template.render(
        comparison=comparison,
        changed=changed[:MAX_ROWS],
        num_changed=len(changed),
        rows=rows,
        told=comparison_text,
        colours=COLOURS,
        max_answers=MAX_ANSWERS,
        max_characters=MAX_CHARACTERS,
    )
