"""A pane of ``top``: rows in columns that fit the terminal, of which only those in sight are laid out."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Text
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from areal_async.monitor.token_text import shown
from areal_async.monitor.top.rows import Column, PaneRows, Row

MIN_LAST_WIDTH, MIN_WORDS_WIDTH = 24, 16
"""Cells of the last column, and of words in the column before it; other columns are left out for them."""


class PaneTable(ScrollView, can_focus=False):
    """A table below its own head, scrolled by the row.

    Ours and not textual's ``DataTable``: that one lays out thousands of rows to show forty, at every answer of a run,
    and scrolls sideways where this one leaves out the columns that matter least.
    """

    DEFAULT_CSS = "PaneTable { scrollbar-size: 0 0; overflow: hidden auto; }"

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._columns: tuple[Column, ...] = ()
        self._rows: PaneRows[Any] = PaneRows((), lambda _: Row(()))
        self._lines: list[Text] = []
        """The lines in sight, as they were drawn last."""

    @property
    def span(self) -> tuple[int, int]:
        """The first row in sight and the one after the last, counted from 0."""
        room = max(0, self.size.height - 1)
        first = max(0, min(self.scroll_offset.y, len(self._rows) - room))
        return first, min(len(self._rows), first + room)

    @property
    def num_rows(self) -> int:
        """How many rows there are, in sight or not."""
        return len(self._rows)

    def show(self, columns: tuple[Column, ...], rows: PaneRows[Any]) -> None:
        """Show other rows, from the same place on as far as there are so many."""
        self._columns, self._rows = columns, rows
        self.virtual_size = Size(self.size.width, len(rows) + 1)
        self.refresh()

    def scroll_by(self, num_rows: int) -> None:
        """Move through the rows, within them."""
        self.scroll_to(y=self.span[0] + num_rows, animate=False, immediate=True)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Lay out the rows in sight together, as the widths of their columns depend on all of them."""
        first, end = self.span
        self._lines = list(table_lines(self._columns, self._rows[first:end], self.size.width))
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        """Return one line of what was laid out."""
        line = self._lines[y] if y < len(self._lines) else Text()
        strip = Strip(line.render(self.app.console)).apply_style(self.rich_style)
        return strip.adjust_cell_length(self.size.width, self.rich_style)


def table_lines(columns: Sequence[Column], rows: Sequence[Row], width: int) -> Iterator[Text]:
    """Yield the head and the rows in columns as wide as what is in them; the last two share what is left."""
    grid = [tuple(one.name for one in columns), *(tuple(map(shown, row.cells)) for row in rows)]
    widths = [max(cell_len(cells[index]) for cells in grid) for index in range(len(columns))]
    kept = _columns_that_fit(columns, widths, width)
    widths = [widths[index] for index in kept]
    left = width - sum(widths[:-2]) - 2 * (len(widths) - 1)
    if len(widths) > 2 and widths[-2] + widths[-1] > left:
        widths[-2] = max(8, min(widths[-2], left - min(widths[-1], left // 2)))
    for cells, style in zip(grid, ["bold", *(row.style for row in rows)], strict=True):
        fitted = [
            _fitted(cells[index], size, is_number=columns[index].is_number)
            for index, size in zip(kept[:-1], widths[:-1], strict=True)
        ]
        line = Text("  ".join([*fitted, cells[kept[-1]]]), style=style)
        line.truncate(width, overflow="ellipsis")
        yield line


def _columns_that_fit(columns: Sequence[Column], widths: Sequence[int], width: int) -> list[int]:
    """Return the columns that leave the last one room; those that matter least go first."""
    kept, needed = list(range(len(widths))), list(widths)
    needed[-1] = min(widths[-1], MIN_LAST_WIDTH)
    if not columns[-2].is_number:
        needed[-2] = min(widths[-2], MIN_WORDS_WIDTH)
    for rank in sorted({one.is_left_out for one in columns} - {0}):
        if sum(needed[index] for index in kept) + 2 * (len(kept) - 1) <= width:
            break
        kept = [index for index in kept if columns[index].is_left_out != rank]
    return kept


def _fitted(cell: str, size: int, *, is_number: bool) -> str:
    if cell_len(cell) > size:
        return set_cell_size(cell, size - 1) + "…"
    return cell.rjust(size) if is_number else set_cell_size(cell, size)
