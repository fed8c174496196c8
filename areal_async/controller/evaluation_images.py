"""The images of held-out rows in the stream: there before a row's ticket, and gone when its answers have come.

No trainer knows of them, so none removes them. One evaluation runs at a time, so what is stored for another is left
over from one that was never whole. Rows that wait for answers take a small share: training keeps its room.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from areal_async.bus import Bus
from areal_async.controller.row_images import RowImages, TicketRow
from areal_async.process.bell import Bell


class _Stored(NamedTuple):
    row: int
    """Position among the held-out rows."""
    num_bytes: int


class EvaluationImages:
    """The images of one controller's evaluations."""

    def __init__(self, bus: Bus, rows: RowImages) -> None:
        self._bus = bus
        self._rows = rows
        self._rows.make_room = self._make_room
        self._latest: tuple[str, TicketRow] | None = None
        self._stored: dict[str, _Stored] = {}
        """Rows whose images are stored, by what stands for their group."""
        self._removed = Bell()
        self._is_full = False
        self.is_training_over = False
        """No group is trained any more, and no trainer makes room."""

    @property
    def waits_for(self) -> str:
        """What the next row waits for before it is asked; empty while it does not."""
        return "answers, which make room for the images of more rows" if self._is_full else self._rows.waits_for

    async def ready(self, eval_id: str, index: int) -> TicketRow:
        """Return a row whose images are stored; that of the last call is not taken in again.

        consumes:     a row
        waits for:    earlier rows to be answered, where their images take much of the stream; room in it
        produces:     the stored images of the row
        unblocked by: ``remove_answered`` and ``give_up``, or as ``RowImages.ready``
        """
        group_id = self._bus.names.eval_group(eval_id, index)
        if self._latest is not None and self._latest[0] == group_id and group_id in self._stored:
            return self._latest[1]
        while sum(one.num_bytes for one in self._stored.values()) > self._rows.max_row_bytes:
            self._is_full = True
            await self._removed.wait()
        self._is_full = False
        row = await self._rows.ready(index, group_id)
        if refs := {one.image for one in row.images if one.image is not None}:
            self._stored[group_id] = _Stored(index, sum(ref.num_bytes for ref in refs))
        self._latest = group_id, row
        return row

    async def remove_answered(self, missing: Collection[tuple[int, int]]) -> None:
        """Remove the images of rows of which no answer is missing; an answer is a row and which one to it."""
        wanted = {index for index, _ in missing}
        await self._forget([group_id for group_id, one in self._stored.items() if one.row not in wanted])

    async def give_up(self) -> None:
        """Remove the images of rows that wait for answers which do not come; they are asked again at the end."""
        await self._forget(list(self._stored))

    async def remove_all(self, *, keeping: str | None = None) -> None:
        """Remove what is stored for evaluations, but for one that is to go on."""
        names = self._bus.names
        kept = () if keeping is None else (names.eval_group(keeping, ""),)
        stored = await self._bus.images.groups()
        await self._remove(one for one in stored if one.startswith(names.eval_groups) and not one.startswith(kept))
        self._stored.clear()
        self._latest, self._is_full = None, False

    async def _forget(self, group_ids: Collection[str]) -> None:
        await self._remove(group_ids)
        for group_id in group_ids:
            del self._stored[group_id]
        if group_ids:
            self._removed.ring()

    async def _make_room(self) -> None:
        if self.is_training_over:
            begin = self._bus.names.eval_groups
            groups = await self._bus.images.groups()
            await self._remove(group_id for group_id in groups if not group_id.startswith(begin))

    async def _remove(self, group_ids: Iterable[str]) -> None:
        await self._bus.images.purge(group_ids, is_newest=_is_newest)


async def _is_newest() -> bool:
    """Say that no newer lineage has begun: evaluations are of none, and after the last step there is none to come."""
    return True
