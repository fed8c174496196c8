"""Rows with images on their way into tickets: their images are taken in and stored first, one row after the other.

A row is read and decoded when its turn has come, in a thread, so that one is in memory, and one at most is stored in
part without a ticket. That bounds what nobody can remove: all else in the stream belongs to groups that somebody runs,
trains or ends, which makes room again. So a wait for room ends, also for a group that is tried again.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import anyio
import structlog

from areal_async.bus import Bus
from areal_async.config.settings import Settings
from areal_async.controller.tasks import Tasks
from areal_async.data.images import take_row
from areal_async.errors import StoredImageError, StreamFullError
from areal_async.process import side_threads
from areal_async.protocol.fields import Place
from areal_async.protocol.types import ImageRef, RowImage
from areal_async.telemetry import wait_graph
from areal_async.vision.images import Image, ImageError
from areal_async.vision.spec import VisionSpec

MAX_ROW_SHARE = 0.2
"""Most of the stream that the images of one row may take. The controller stores those of two at once, one of them to
evaluate, beside what is there when room is told, which is ``SCARCE_SHARE`` at most."""
ROOM_POLL_S = 1.0

log = structlog.get_logger()


class TicketRow(NamedTuple):
    """What a ticket has of its row."""

    workflow: str
    row: dict[str, Any]
    images: list[RowImage]


class RowImages:
    """The rows of some tasks, as tickets have them."""

    def __init__(
        self,
        bus: Bus,
        tasks: Tasks,
        settings: Settings,
        vision: VisionSpec | None = None,
        *,
        waiter: str = wait_graph.ADMISSION,
    ) -> None:
        """Take how the run's model sees, ``None`` where it does not, and who waits for the rows."""
        self._bus = bus
        self._tasks = tasks
        self._vision = vision
        self._model = settings.model.path
        self.max_row_bytes = int(MAX_ROW_SHARE * settings.rollout.max_image_stream_bytes)
        """Of the images of one row, at the most."""
        self._waiter = waiter
        self._turn = anyio.Lock()
        self.make_room: Callable[[], Awaitable[object]] | None = None
        """Asked each time that there is none, beside the trainer."""
        self.waits_for = ""
        """What the row whose turn it is waits for; empty where it does not."""

    def has_images(self, index: int) -> bool:
        """Say whether the task of a row has columns of images."""
        return self._tasks.has_images(index)

    async def ready(self, index: int, group_id: str) -> TicketRow:
        """Return a row whose images are stored for a group.

        An image that cannot be taken in is in the ticket as the reason, which fails the siblings that read it: neither
        does it end the run, nor is its prompt passed over in silence.

        consumes:     a row
        waits for:    its turn, and room in the stream of images
        produces:     the stored images of the row
        unblocked by: the trainer, which removes the images of groups that are over; ``make_room``
        """
        if not self.has_images(index):
            return TicketRow(*self._tasks.at(index), [])
        async with self._turn:
            if self._vision is not None:
                await self._wait_for_room(group_id)
            ready, files = await side_threads.IMAGES.run(partial(self._take, index))
            for ref, data in files.items():
                reason = await self._store(group_id, ref, data)
                if reason:
                    ready = _without(ready, ref, reason)
            return ready

    def _take(self, index: int) -> tuple[TicketRow, dict[ImageRef, bytes]]:
        """Read a row and take in its images, in a thread; return what is to be stored, by its name."""
        workflow, row = self._tasks.at(index)
        most = self.max_row_bytes
        bare, found = take_row(row, self._vision, model=self._model, index=index, max_bytes=most)
        files = {_ref_of(image): image.data for _, image in found if isinstance(image, Image)}
        for place, one in found:
            if isinstance(one, ImageError):
                log.warning("row.image_refused", index=index, place=place, reason=str(one))
        return TicketRow(workflow, bare, [_row_image(place, one) for place, one in found]), files

    async def _wait_for_room(self, group_id: str) -> None:
        if await self._bus.images.has_room_to_admit():
            return
        with self._waiting(group_id):
            while not await self._bus.images.has_room_to_admit():
                await self._poll()

    async def _store(self, group_id: str, ref: ImageRef, data: bytes) -> str:
        """Store an image however long there is no room for it; return why it cannot be, or nothing."""
        while True:
            try:
                await self._bus.images.put(group_id, ref, data)
            except StreamFullError:
                with self._waiting(group_id):
                    await self._poll()
            except StoredImageError as exc:
                return str(exc)
            else:
                return ""

    @contextmanager
    def _waiting(self, group_id: str) -> Iterator[None]:
        self.waits_for = f"room for the images of group {group_id} in their stream"
        try:
            with wait_graph.on(wait_graph.TRAINER, "room for images, made by", waiter=self._waiter):
                yield
        finally:
            self.waits_for = ""

    async def _poll(self) -> None:
        if self.make_room is not None:
            await self.make_room()
        await anyio.sleep(ROOM_POLL_S)


def _ref_of(image: Image) -> ImageRef:
    return ImageRef(sha256=image.sha256, num_bytes=len(image.data), width=image.width, height=image.height)


def _row_image(place: Place, one: Image | ImageError) -> RowImage:
    return (
        RowImage(place=place, image=_ref_of(one)) if isinstance(one, Image) else RowImage(place=place, reason=str(one))
    )


def _without(ready: TicketRow, ref: ImageRef, reason: str) -> TicketRow:
    images = [RowImage(place=one.place, reason=reason) if one.image == ref else one for one in ready.images]
    return ready._replace(images=images)
