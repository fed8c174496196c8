"""The rows of several workflows under one number each."""

from collections.abc import Sequence
from typing import Any

from areal_async.data.images import image_columns, row_at

Rows = Sequence[dict[str, Any]]
"""Rows by position, as a ``datasets.Dataset`` gives them."""


class Tasks:
    """The rows of all tasks, in the order of the settings, and whose they are."""

    def __init__(self, parts: list[tuple[str, Rows]]) -> None:
        """``parts``: workflow name and its rows."""
        self._parts = parts
        self.names_with_images = {name for name, rows in parts if image_columns(rows)}
        """Names of the workflows whose rows have columns of images."""

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
        """Return workflow name and row at a position in the concatenation; images are not decoded (``ImageCell``)."""
        workflow, rows, offset = self._find(index)
        return workflow, row_at(rows, offset)

    def place(self, index: int) -> tuple[str, int]:
        """Return the workflow's name and the position among its own rows, without a look at the row."""
        workflow, _, offset = self._find(index)
        return workflow, offset

    def has_images(self, index: int) -> bool:
        """Say whether the task at a position has columns of images."""
        return self.name_at(index) in self.names_with_images

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
