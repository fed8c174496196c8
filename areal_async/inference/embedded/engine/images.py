"""Images of requests: decoded once however many requests show them, and put in their places in the prompt.

Letters: P tokens of an expanded prompt, T tokens of this forward pass: prompts, and what was sampled after them.

Invariant: two images of the same bytes are one object, and two of others never compare equal; so prompts are the same
where their tokens and their images are.
"""

import base64
import binascii
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakValueDictionary

import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from areal_async.inference.embedded.engine.errors import RequestError
from areal_async.vision.pixels import patches
from areal_async.vision.rows import expand, positions
from areal_async.vision.spec import Grid, VisionSpec

_WIDTH, _HEIGHT = slice(16, 20), slice(20, 24)
"""Where a PNG has its size: in its first chunk, big-endian."""


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class SeenImage:
    """An image that open requests show; equal only to itself."""

    patches: NDArray[np.float32]
    """What the vision tower takes [grid.h * grid.w, values of a patch]."""
    grid: Grid


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of one prompt, and what they make of its tokens."""

    images: tuple[SeenImage, ...]
    is_image_P: NDArray[np.bool_]
    """Which tokens of the prompt stand for images. A token that the model samples later never does."""
    positions_3P: NDArray[np.int64]
    """In time, height and width."""
    delta: int
    """What the number of a later token lacks of its position."""

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of the prompt that stand for images."""
        return int(self.is_image_P.sum())

    def lay_out(self, num_tokens: int) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Return ``is_image_P`` and ``positions_3P`` of the prompt and of the text that was sampled after it."""
        num_later = num_tokens - len(self.is_image_P)
        positions_3T = np.pad(self.positions_3P, ((0, 0), (0, num_later)))
        positions_3T[:, len(self.is_image_P) :] = np.arange(len(self.is_image_P), num_tokens) + self.delta
        return np.pad(self.is_image_P, (0, num_later)), positions_3T


def lay_out(
    images: Sequence[PromptImages | None], lengths: Sequence[int]
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return of packed sequences which tokens stand for images [T], and the positions of all tokens [3, T].

    Args:
        images: of each sequence; None for text alone.
    """
    parts = [
        (np.zeros(length, dtype=np.bool_), np.broadcast_to(np.arange(length), (3, length)))
        if shown is None
        else shown.lay_out(length)
        for shown, length in zip(images, lengths, strict=True)
    ]
    return np.concatenate([mask for mask, _ in parts]), np.concatenate([placed for _, placed in parts], axis=1)


class ImageReader:
    """Takes the images of requests, for one model. Belongs to the event loop."""

    def __init__(self, spec: VisionSpec | None) -> None:
        """Read for a model that sees as ``spec`` says; for ``None``, refuse every image."""
        self._spec = spec
        self._known: WeakValueDictionary[bytes, SeenImage] = WeakValueDictionary()
        """Images that a request still has, by the SHA-256 of their bytes."""

    async def read(self, sources: list[str]) -> tuple[SeenImage, ...]:
        """Decode images, each a ``data:`` URL or base64 alone.

        Raises:
            RequestError: the model does not see, or one is no PNG in its final size.
        """
        spec = self._spec
        if sources and spec is None:
            raise RequestError(f"image_data: got {len(sources)} images, need none: this model does not see")
        return tuple([await self._read(source, spec) for source in sources if spec is not None])

    async def _read(self, source: str, spec: VisionSpec) -> SeenImage:
        try:
            data = base64.b64decode(source.partition(",")[2] if source.startswith("data:") else source, validate=True)
        except (binascii.Error, ValueError) as exc:
            raise RequestError(f"image_data: got {source[:40]!r}, need a data: URL or base64: {exc}") from exc
        digest = hashlib.sha256(data).digest()
        known = self._known.get(digest)
        if known is not None:
            return known
        try:
            image = await anyio.to_thread.run_sync(_decode, data, spec)
        except ValueError as exc:
            raise RequestError(f"image_data: {str(exc).removeprefix('image: ')}") from exc
        return self._known.setdefault(digest, image)  # another request may have been faster

    def place(self, prompt_ids: list[int], images: tuple[SeenImage, ...]) -> tuple[list[int], PromptImages | None]:
        """Return a prompt with a placeholder for each token of its images, and what else they make of it.

        Args:
            prompt_ids: with one placeholder for each image.

        Raises:
            RequestError: the prompt has more or fewer placeholders than there are images.
        """
        spec = self._spec
        if spec is None:
            return prompt_ids, None
        grids = [image.grid for image in images]
        try:
            expanded = expand(prompt_ids, grids, spec)
            if not images:
                return expanded, None
            positions_3P, delta = positions(expanded, grids, spec)
        except ValueError as exc:
            raise RequestError(f"input_ids: {str(exc).removeprefix('row: ')}") from exc
        return expanded, PromptImages(images, np.array(expanded) == spec.image_token_id, positions_3P, delta)


def _decode(data: bytes, spec: VisionSpec) -> SeenImage:
    cut = patches(data, spec)
    width, height = (int.from_bytes(data[side], "big") for side in (_WIDTH, _HEIGHT))
    if width * height < spec.min_pixels:
        raise ValueError(f"image: got {width} x {height} pixels, need at least {spec.min_pixels}; take it in again")
    return SeenImage(cut, spec.grid_of(width, height))
