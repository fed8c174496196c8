"""The images of a row: read from the stream for a leased ticket, once for all siblings, or taken in for a trial."""

from functools import partial
from typing import Any, NamedTuple

import msgspec

from areal_async.data.images import holds_images, put_in, take_row
from areal_async.errors import StoredImageError
from areal_async.process import side_threads
from areal_async.protocol.evaluations import EvalTicket
from areal_async.protocol.types import ImageRef, Prompt, Ticket
from areal_async.rollout.node_context import NodeContext
from areal_async.vision.images import Image, ImageError
from areal_async.vision.spec import VisionSpec


class Row(NamedTuple):
    """What a workflow is shown of a ticket."""

    cells: dict[str, Any]
    """By column. Images are ``Image``; what could not be taken in, or is not stored, is the error."""
    num_missing: int
    """Images that are not stored, as those of a group that is over."""


async def read_row(node: NodeContext, ticket: Ticket | EvalTicket, group_id: str) -> Row:
    """Return a ticket's row with its images, which are stored for ``group_id``."""
    if not ticket.images:
        return Row(ticket.row, 0)
    known: dict[ImageRef, Image] = {}
    found: list[tuple[list[str | int], Image | ImageError]] = []
    missing: dict[str | int, ImageError] = {}
    async with node.reading:
        for one in ticket.images:
            if one.image is None:
                found.append((one.place, ImageError(one.reason)))
                continue
            try:
                if one.image not in known:
                    known[one.image] = await _read(node, group_id, one.image)
            except StoredImageError as exc:
                missing[one.place[0]] = ImageError(str(exc))
            else:
                found.append((one.place, known[one.image]))
    there = [(place, image) for place, image in found if place[0] not in missing]
    return Row(put_in(ticket.row, there + [([column], error) for column, error in missing.items()]), len(missing))


class TakenPrompt(NamedTuple):
    """A prompt of a row as it was loaded, with its images taken in."""

    prompt: Prompt
    told: Prompt
    """The same for people: a word stands for each image."""


async def take_prompt(prompt: Prompt, vision: VisionSpec | None, *, model: str) -> TakenPrompt:
    """Take in the images of a row as it was loaded, beside the loop; a prompt without any stays as it is."""
    if not holds_images(prompt.row):
        return TakenPrompt(prompt, prompt)
    take = partial(take_row, prompt.row, vision, model=model, index=prompt.index)
    bare, found = await side_threads.IMAGES.run(take)
    told = [(place, str(image)) for place, image in found]
    return TakenPrompt(*(msgspec.structs.replace(prompt, row=put_in(bare, cells)) for cells in (found, told)))


async def _read(node: NodeContext, group_id: str, ref: ImageRef) -> Image:
    image = Image(await node.bus.images.get(group_id, ref), ref.width, ref.height)
    _ = image.sha256  # before each sibling has a copy
    return image
