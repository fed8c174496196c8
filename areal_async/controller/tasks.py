"""The rows of several workflows under one number each."""

from collections.abc import Sequence
from typing import Any

Rows = Sequence[dict[str, Any]]
"""Rows by position, as a ``datasets.Dataset`` gives them."""


class Tasks:
    """The rows of all tasks, in the order of the settings, and whose they are."""

    def __init__(self, parts: list[tuple[str, Rows]]) -> None:
        """``parts``: workflow name and its rows."""
        self._parts = parts

    def __len__(self) -> int:
        return sum(self.num_rows)

    @property
    def names(self) -> list[str]:
        """Names of the workflows, in the order of the tasks."""
        return [name for name, _ in self._parts]

    @property
    def num_rows(self) -> list[int]:
        """How many rows each task has."""
        return [len(rows) for _, rows in self._parts]

    def at(self, index: int) -> tuple[str, dict[str, Any]]:
        """Return workflow name and row at a position in the concatenation."""
        workflow, rows, offset = self._find(index)
        return workflow, rows[offset]

    def name_at(self, index: int) -> str:
        """Return the workflow's name alone, without a look at the row."""
        return self._find(index)[0]

    def _find(self, index: int) -> tuple[str, Rows, int]:
        offset = index
        for workflow, rows in self._parts:
            if offset < len(rows):
                return workflow, rows, offset
            offset -= len(rows)
        raise IndexError(index)
