"""Pixels as a vision tower takes them: the patches of an image that has its final size.

Invariant: these are the patches of transformers' image processor, to 1e-6, and nothing is resized.
"""

import io

import numpy as np
from numpy.typing import NDArray

from areal_async.vision.images import ImageError, pillow_errors
from areal_async.vision.spec import VisionSpec


def patches(png: bytes, spec: VisionSpec) -> NDArray[np.float32]:
    """Normalize an image and cut it into patches, those of one token next to each other.

    Args:
        png: what ``images.take_image`` made: RGB, 8 bit, in its final size.

    Returns:
        One row for each patch of ``spec.grid_of``, with its values by channel, frame, row and column
        [h * w, 3 * temporal_patch_size * patch_size**2].

    Raises:
        ImageError: it is no such image of this model.
    """
    pixels = decode(png, spec)
    normalized = pixels.astype(np.float32)
    normalized /= 255
    normalized -= spec.mean
    normalized /= spec.std
    height, width, channels = pixels.shape
    size, merge = spec.patch_size, spec.merge_size
    # axes: down in tokens, in patches of a token, in pixels of a patch; the same to the right; channel
    cut = normalized.reshape(height // spec.factor, merge, size, width // spec.factor, merge, size, channels)
    by_patch = cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, channels, 1, size**2)
    return np.repeat(by_patch, spec.temporal_patch_size, axis=2).reshape(len(by_patch), -1)


def decode(png: bytes, spec: VisionSpec) -> NDArray[np.uint8]:
    """Return the pixels of an image that was taken in [height, width, 3].

    The header is held against the model before any of them is decoded.

    Raises:
        ImageError: it is no such image of this model.
    """
    import PIL.Image  # here: text alone does not need it

    with (
        pillow_errors("image: got bytes that are no whole PNG, need what was taken in"),
        PIL.Image.open(io.BytesIO(png), formats=("PNG",)) as image,
    ):
        width, height = image.size
        if image.mode != "RGB" or width * height > spec.max_pixels:
            raise ImageError(
                f"image: got {width} x {height} pixels of mode {image.mode}, need RGB and at most {spec.max_pixels}"
            )
        if width % spec.factor or height % spec.factor:
            raise ImageError(f"image: got {width} x {height} pixels, need multiples of {spec.factor}")
        return np.asarray(image)
