"""The images that groups look at: each stored once for its group, named by its content, in chunks.

An image is the messages of one subject, which names its group and its hash, in their order. A chunk is stored only
after the one before it (a compare-and-set on the subject), so whatever is stored of an image is a beginning of it:
another producer goes on where one has ended, also in mid-image, and nothing is stored twice. Each chunk says where
it ends; one that ends where the file does is the last.

What is read is held against the hash that the slot names. Half an image, another one, and a damaged one are none.

A purge asks nobody. So what is purged are groups that are over: their outcomes are in the log and what is theirs of the
trajectories is gone, before ``is_newest`` says that no newer lineage has begun. One that begins later finds their
outcomes, and has no use for their images either, however late the purge comes. What is stored for a group after
its purge is an orphan, and goes at the next sweep, which lists what is stored and keeps the groups that are live.
"""

import hashlib
import re
from collections.abc import Awaitable, Callable, Iterable

import structlog

from areal_async.bus.log import Message, StreamReader
from areal_async.config.settings import SCARCE_SHARE
from areal_async.errors import ConflictError, StoredImageError, StreamFullError, UserError
from areal_async.process import side_threads
from areal_async.process.failpoints import failpoint
from areal_async.protocol.subjects import TOKEN, Names
from areal_async.protocol.types import ImageRef

CHUNK_BYTES = 1 << 20
"""Most of an image that is one message, as trajectories that travel together."""
END_HEADER = "Areal-Image-End"
"""Where in the file a chunk ends, in bytes from its beginning."""

log = structlog.get_logger()


class Images:
    """One process's access to the images of a run."""

    def __init__(self, api: StreamReader, names: Names) -> None:
        self._api = api
        self._names = names

    async def put(self, group_id: str, ref: ImageRef, data: bytes) -> None:
        """Store an image for a group, once, however many say so; return when the broker has acknowledged all of it.

        Args:
            data: the file that ``ref`` names.

        Raises:
            StreamFullError: the rest of it is not stored; wait, and call again.
            UserError: the stream would not hold it, were it empty.
            StoredImageError: what is stored under its name is none of ours.
        """
        assert await _is_named(data, ref), f"image {ref.sha256}: these {len(data)} bytes are another file"
        subject = self._names.images(group_id, ref.sha256)
        try:
            await self._put(group_id, subject, ref, data)
        finally:  # each image is a subject: what is known of it may not stay as long as the process
            self._api.seen.forget(self._names.images_stream, subject)

    async def get(self, group_id: str, ref: ImageRef) -> bytes:
        """Return an image's file.

        Raises:
            StoredImageError: it is not stored, or not whole, or the stored bytes are not what ``ref`` names.
        """
        stream, subject = self._names.images_stream, self._names.images(group_id, ref.sha256)
        chunks: list[bytes] = []
        num_bytes, sequence = 0, 0
        num_chunks = -(-ref.num_bytes // CHUNK_BYTES)
        while num_bytes < ref.num_bytes and len(chunks) < num_chunks:
            if not (batch := await self._api.read_batch(stream, subject, sequence + 1)):
                break
            chunks += [message.data for message in batch]
            num_bytes += sum(len(message.data) for message in batch)
            sequence = batch[-1].sequence
        what = f"image {ref.sha256} of group {group_id}"
        if num_bytes < ref.num_bytes:
            raise StoredImageError(
                f"{what}: got {num_bytes} bytes, need {ref.num_bytes}; it was not stored, or is purged"
            )
        data = b"".join(chunks)
        if not await _is_named(data, ref):
            raise StoredImageError(
                f"{what}: got {num_bytes} bytes of another hash or length; what is stored is damaged"
            )
        return data

    async def purge(self, group_ids: Iterable[str], *, is_newest: Callable[[], Awaitable[bool]]) -> None:
        """Remove all images of groups that are over; of none where a newer lineage has begun.

        Args:
            group_ids: groups with a settling outcome in the log, and nothing left in the stream of trajectories.
            is_newest: says whether no newer lineage has begun.
        """
        if not (gone := list(group_ids)) or not await is_newest():
            return
        for group_id in gone:
            await self._purge(self._names.images(group_id, "*"))

    async def sweep(self, is_live: Callable[[str], bool], *, is_newest: Callable[[], Awaitable[bool]]) -> list[str]:
        """Remove the images of every group that is not live, and return these groups.

        Args:
            is_live: says whether a group may still need its images. It does from before the first is stored, and that
                is before its ticket is: who has neither a ticket nor an outcome is live.
            is_newest: says whether no newer lineage has begun.
        """
        orphans = [group_id for group_id in await self.groups() if not is_live(group_id)]
        await self.purge(orphans, is_newest=is_newest)
        return orphans

    async def clear(self, *, is_newest: Callable[[], Awaitable[bool]]) -> None:
        """Remove all that is stored, also what no image is called; nothing where a newer lineage has begun."""
        if await is_newest():
            await self._api.ask(f"$JS.API.STREAM.PURGE.{self._names.images_stream}", {})

    async def groups(self) -> list[str]:
        """Return the groups of which anything is stored, sorted.

        A node may store under any subject, also where no group's name is; that is none of a group's.
        """
        found: set[str] = set()
        num_subjects = 0
        while True:
            body = {"subjects_filter": self._names.all_images, "offset": num_subjects}
            answer = await self._api.ask(f"$JS.API.STREAM.INFO.{self._names.images_stream}", body)
            subjects = answer["state"].get("subjects") or {}
            found.update(name for name in (subject.split(".")[3] for subject in subjects) if TOKEN.fullmatch(name))
            num_subjects += len(subjects)
            if not subjects or num_subjects >= answer.get("total", 0):
                return sorted(found)

    async def has_room_to_admit(self) -> bool:
        """Say whether a group may be admitted: its images then leave the rest of the stream to what is under way.

        From the share on at which this says no, the trainer makes room, so that nobody waits for ever.
        """
        answer = await self._api.leader_info(self._names.images_stream)
        return bool(answer["state"]["bytes"] < SCARCE_SHARE * answer["config"]["max_bytes"])

    async def _put(self, group_id: str, subject: str, ref: ImageRef, data: bytes) -> None:
        while True:
            last = await self._api.get_last(self._names.images_stream, subject)
            end = 0 if last is None else _end_of(last, group_id, ref)
            if end == ref.num_bytes:
                return
            try:
                await self._put_rest(subject, data, start=end, sequence=0 if last is None else last.sequence)
            except ConflictError:  # another producer goes on with it, or it was purged: look again
                log.debug("image.conflict", group_id=group_id, sha256=ref.sha256)
            except StreamFullError:
                await self._check_fits(ref)
                raise

    async def _put_rest(self, subject: str, data: bytes, *, start: int, sequence: int) -> None:
        """Store what is left of a file, after the chunk that is at ``sequence``."""
        while start < len(data):
            end = min(start + CHUNK_BYTES, len(data))
            stored = await self._api.store_after(
                sequence, self._names.images_stream, subject, data[start:end], headers={END_HEADER: str(end)}
            )
            start, sequence = end, stored.sequence
            failpoint("images.after_chunk")

    async def _check_fits(self, ref: ImageRef) -> None:
        answer = await self._api.leader_info(self._names.images_stream)
        if ref.num_bytes > (most := SCARCE_SHARE * answer["config"]["max_bytes"]):
            raise UserError(
                f"image {ref.sha256}: got {ref.num_bytes} bytes, need at most {most:.0f}; "
                "raise rollout.max_image_stream_bytes"
            )

    async def _purge(self, subject: str) -> None:
        await self._api.ask(f"$JS.API.STREAM.PURGE.{self._names.images_stream}", {"filter": subject})


def _end_of(last: Message, group_id: str, ref: ImageRef) -> int:
    """Return how much of an image is stored, by its newest chunk."""
    said = last.headers.get(END_HEADER, "")
    if re.fullmatch("[0-9]{1,9}", said) and len(last.data) <= int(said) <= ref.num_bytes:
        return int(said)
    raise StoredImageError(
        f"image {ref.sha256} of group {group_id}: message {last.sequence} ends at {said[:20]!r}, need at most "
        f"{ref.num_bytes}; what is stored under its name is none of ours"
    )


async def _is_named(data: bytes, ref: ImageRef) -> bool:
    """Hold a file against its name, beside the loop: to hash one of 20 MB takes longer than a loop has."""
    if len(data) != ref.num_bytes:
        return False
    digest = await side_threads.IMAGES.run(lambda: hashlib.sha256(data).hexdigest())
    return digest == ref.sha256
