"""The images of messages: taken in once and beside the loop, known from then on by what they hold.

A workflow may change a canvas that it has shown, or show a file that changes: what a message shows is decided when it
is taken in. Invariant: after that a part is ``{"type": "image", "image": Image}``, whose bytes are what servers are
sent; two messages are the same where their images are, byte for byte.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from threading import Lock
from typing import Any

from areal_async.api import Message
from areal_async.errors import RolloutError, WorkflowError
from areal_async.process import side_threads
from areal_async.vision.images import Image, ImageError, take_image
from areal_async.vision.parts import is_image
from areal_async.vision.spec import VisionSpec

MAX_KEPT_BYTES = 128 << 20
"""Size of the images that are kept because they may be shown again: all siblings of a group begin with the same."""
_SHAPE = '{"type": "image", "image": ...} with an image, its bytes, its path or a data: URL'


def has_images(messages: Sequence[Message]) -> bool:
    """Say whether any message shows one."""
    return any(map(is_image, _parts(messages)))


def images_of(messages: Sequence[Message]) -> list[Image]:
    """Return what messages show, in order; their images have been taken in."""
    return [part["image"] for part in _parts(messages) if is_image(part)]


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text, however deep within lists and objects."""
    rest = [value]
    while rest:
        part = rest.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, Mapping):
            rest += part.values()
        elif isinstance(part, list | tuple):
            rest += part


class ImageIntake:
    """Takes in images for one model, of all trajectories of a node."""

    def __init__(self, vision: VisionSpec | None, *, model: str) -> None:
        """Take how the model sees, ``None`` where it does not, and its name."""
        self._vision = vision
        self._model = model
        self._kept: OrderedDict[bytes, Image] = OrderedDict()
        """Hash of what was given -> what it was taken in as, the latest last."""
        self._num_kept_bytes = 0
        self._lock = Lock()

    async def taken(self, messages: Sequence[Message]) -> list[Message]:
        """Return a conversation whose images are taken in; messages without any are the very same objects.

        Raises:
            WorkflowError: the model does not see, or an image is none that can be shown to it.
        """
        return [await self._taken_message(one, number) for number, one in enumerate(messages, start=1)]

    async def take_part(
        self, part: Mapping[str, Any], *, what: str, error: type[RolloutError] = WorkflowError
    ) -> dict[str, Any]:
        """Return a part that shows an image, taken in.

        Args:
            what: has it, as an error names it.
            error: what an image is answered with that cannot be taken in.

        Raises:
            WorkflowError: the model does not see.
        """
        vision = self._vision
        if vision is None:
            raise WorkflowError(
                f"{what}: got an image, which the model {self._model} cannot see, need text; leave images out, or take "
                "a model that sees (Qwen3-VL, Qwen2.5-VL)"
            )
        try:
            return {"type": "image", "image": await side_threads.IMAGES.run(partial(self._take, _source(part), vision))}
        except ImageError as exc:
            raise error(f"{what}: {exc}") from exc

    async def _taken_message(self, message: Message, number: int) -> Message:
        if not has_images([message]):
            return message
        what = f"messages: place {number}"
        parts = [await self.take_part(part, what=what) if is_image(part) else part for part in message["content"]]
        return {**message, "content": parts}

    def _take(self, source: Any, vision: VisionSpec) -> Image:
        """Take one in, in a thread; what was given before is found again by its bytes."""
        if isinstance(source, ImageError):  # what a row has in the place of an image that could not be taken in
            raise source
        if isinstance(source, Image):
            if _fits(source, vision):
                return source
            source = source.data  # taken in for another model
        key = _key(source)
        with self._lock:
            if key is not None and key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        image = take_image(source, vision)
        _ = image.sha256  # hashed here, not on the loop
        if key is not None:
            self._keep(key, image)
        return image

    def _keep(self, key: bytes, image: Image) -> None:
        with self._lock:
            if key in self._kept:
                return
            self._kept[key] = image
            self._num_kept_bytes += len(image.data)
            while self._num_kept_bytes > MAX_KEPT_BYTES:
                _, oldest = self._kept.popitem(last=False)
                self._num_kept_bytes -= len(oldest.data)


def _parts(messages: Sequence[Message]) -> Iterator[Any]:
    for message in messages:
        if isinstance(content := message.get("content"), list | tuple):
            yield from content


def _source(part: Mapping[str, Any]) -> Any:
    """Return where an image is, as ``take_image`` takes it.

    Raises:
        ImageError: the part does not say, or names a file where only the image itself may stand.
    """
    if part["type"] == "image":
        source = part.get("image")
    else:
        source = part.get("image_url")
        source = source.get("url") if isinstance(source, Mapping) else source
        if source is not None and not (isinstance(source, str) and source[:5].lower() == "data:"):
            # An agent's program writes these: no file of the node's is to be had by naming it.
            got = (
                f"the image_url {source[:50]!r}"
                if isinstance(source, str)
                else f"an image_url of type {type(source).__name__}"
            )
            raise ImageError(f"image: got {got}, need a data: URL with the image itself")
    if source is None:
        raise ImageError(f"image: got a part of type {part['type']} without an image, need {_SHAPE}")
    return source


def _fits(image: Image, vision: VisionSpec) -> bool:
    """Say whether it has a final size of this model's."""
    is_whole = not image.width % vision.factor and not image.height % vision.factor
    return is_whole and vision.min_pixels <= image.width * image.height <= vision.max_pixels


def _key(source: Any) -> bytes | None:
    """Return the hash of the bytes that were given; ``None`` for what may hold something else the next time."""
    if isinstance(source, Mapping):
        source = source.get("bytes")
    if isinstance(source, str):
        source = source.encode(errors="surrogatepass") if source[:5].lower() == "data:" else None
    return sha256(source).digest() if isinstance(source, bytes) else None
