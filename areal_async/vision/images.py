"""The intake: an image in any form that users have becomes the PNG that the model sees and is trained on.

Invariant: what ``take_image`` returns is in its final size, RGB of 8 bits, without a profile, a date or a rotation to
apply, so that servers and trainer take it as it is; and whatever comes in ends as that or in one sentence, which
holds nothing of the image. Nothing is decoded before its header is held against the limits.

An image is named by the hash of its PNG and made once: another version of zlib may write other bytes for the same
pixels, so nobody makes it again to find it.
"""

import base64
import hashlib
import io
import math
import os
import re
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from areal_async.vision.spec import VisionSpec

if TYPE_CHECKING:
    import PIL.Image  # below in functions alone: who shows no image does not load it

FORMATS: Final = ("PNG", "JPEG", "GIF", "WEBP")
"""Of bytes that are read; Pillow knows many more, some of which start programs."""
MAX_ASPECT: Final = 200
"""Longest side over the shortest: the models' own processors refuse more."""
SHOWN_CHARACTERS: Final = 100
"""Of a path in a sentence; a longer one is likelier to be an image that was taken for a path."""

Source: TypeAlias = "PIL.Image.Image | bytes | str | os.PathLike[str] | Mapping[str, Any]"


class ImageError(ValueError):
    """An image that cannot be shown to the model, or is none: one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageLimits:
    """Largest images that are taken."""

    max_source_bytes: int = 32 * 2**20
    """As it comes in, before it is decoded."""
    max_source_pixels: int = 2**24
    """As it comes in: what Qwen3-VL shows at most, 4096 x 4096. Decoding takes 12 bytes for each, a WebP's 20."""
    max_pixels: int | None = None
    """In the final size; ``None``: what the model takes."""


@dataclass(frozen=True)
class Image:
    """An image that was taken in."""

    data: bytes = field(repr=False)
    """PNG: RGB, 8 bit."""
    width: int
    """In pixels, a multiple of the model's ``factor`` as the height is."""
    height: int

    @cached_property
    def sha256(self) -> str:
        """Name of the image: the hash of ``data``, in hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()

    def open(self) -> "PIL.Image.Image":
        """Return it as an image of Pillow's, to crop or to draw on; each call decodes it anew."""
        import PIL.Image

        image = PIL.Image.open(io.BytesIO(self.data), formats=("PNG",))
        image.load()
        return image


def take_image(source: Source, spec: VisionSpec, limits: ImageLimits = ImageLimits()) -> Image:
    """Bring an image to its final size and form.

    It is turned upright as its EXIF data say (as ``datasets`` does), laid on white where it is transparent, and of an
    animation the first frame is taken. 16 bits for a color become their upper 8.

    It takes tens of milliseconds for each million pixels: call it in a thread, not on an event loop.

    Args:
        source: a Pillow image; the bytes of a PNG, JPEG, GIF or WebP; a ``data:`` URL of them in base64; a file's
            path; or what ``datasets`` gives for an image that it does not decode, ``{"bytes": ..., "path": ...}``. A
            string that is no ``data:`` URL is read as a file of this machine: let no stranger give one.

    Raises:
        ImageError: it is none of these, is damaged, or is beyond the limits.
    """
    import PIL.Image
    from PIL import ExifTags, ImageOps

    with pillow_errors("image: got no whole image, need a PNG, JPEG, GIF or WebP that can be decoded"):
        if isinstance(source, PIL.Image.Image):
            image = source
        else:
            image = PIL.Image.open(io.BytesIO(_read(source, limits)), formats=FORMATS)
        width, height = image.size
        if width * height > limits.max_source_pixels:
            raise ImageError(
                f"image: got {width} x {height} pixels, need {limits.max_source_pixels} in all at most; make it smaller"
            )
        final_size(width, height, spec, limits)  # for its refusals, before anything is decoded
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            image = ImageOps.exif_transpose(image)
        size = final_size(image.width, image.height, spec, limits)
        pixels = _as_rgb(image)
        if pixels.size != size:
            pixels = pixels.resize(size, PIL.Image.Resampling.BICUBIC)
        bare = PIL.Image.frombytes("RGB", size, pixels.tobytes())  # without the profile that Pillow would write along
    buffer = io.BytesIO()
    bare.save(buffer, "PNG")
    return Image(buffer.getvalue(), *size)


def file_of(image: "PIL.Image.Image") -> bytes:
    """Return an image of Pillow's as a file of one of ``FORMATS``, with all that ``take_image`` would see of it.

    It is the file that the image was opened from while no pixel of it was read, else a PNG.

    Raises:
        ImageError: its mode has no color that is known; or that file cannot be read.
    """
    opened = getattr(image, "filename", "")
    # Once the pixels are read, these two let go of their file, and then they may have been changed in place.
    if opened and image.format in ("PNG", "JPEG") and getattr(image, "fp", None) is not None:
        return _read_file(opened, ImageLimits())
    from PIL import ImageOps

    with pillow_errors("image: got no whole image, need one that can be decoded"):
        upright = _as_rgb(ImageOps.exif_transpose(image))
        buffer = io.BytesIO()
        upright.save(buffer, "PNG", compress_level=1)  # of what is taken in and compressed again
    return buffer.getvalue()


def source_size(source: Source, limits: ImageLimits = ImageLimits()) -> tuple[int, int]:
    """Return width and height of an image as it comes in, of which the header alone is read.

    Raises:
        ImageError: it is none, or has too many bytes.
    """
    import PIL.Image

    with pillow_errors("image: got no image, need a PNG, JPEG, GIF or WebP"):
        if isinstance(source, PIL.Image.Image):
            return source.size
        with PIL.Image.open(io.BytesIO(_read(source, limits)), formats=FORMATS) as image:
            return image.size


def final_size(width: int, height: int, spec: VisionSpec, limits: ImageLimits = ImageLimits()) -> tuple[int, int]:
    """Return the width and height that an image is brought to, which the model's own processor leaves as they are.

    They are the nearest multiples of ``spec.factor``, unless these have too many or too few pixels in all. Where the
    processor's rule ends in a size that the processor would change again, the one with the nearest aspect is taken.

    Raises:
        ImageError: an image has no pixels, is too long, or no size has as few pixels as the limits allow.

    Source: ``smart_resize`` of Qwen2-VL's image processor.
    """
    short, long = sorted((width, height))
    if short < 1 or long > MAX_ASPECT * short:
        raise ImageError(
            f"image: got {width} x {height} pixels, need at least one and a longer side of {MAX_ASPECT} times the "
            "shorter at most; crop it"
        )
    most = spec.max_pixels if limits.max_pixels is None else min(spec.max_pixels, limits.max_pixels)
    size = _scaled(short, long, spec, most)
    if not (spec.min_pixels <= size[0] * size[1] <= most and size[1] <= MAX_ASPECT * size[0]):
        size = _nearest_aspect(long / short, spec, most)
    return size if width <= height else (size[1], size[0])


def _scaled(short: int, long: int, spec: VisionSpec, most: int) -> tuple[int, int]:
    """Scale the two sides of an image as the model's own processor does."""
    factor = spec.factor
    rounded = round(short / factor) * factor, round(long / factor) * factor
    if rounded[0] * rounded[1] > most:
        shrink = math.sqrt(short * long / most)
        return (
            max(factor, math.floor(short / shrink / factor) * factor),
            max(factor, math.floor(long / shrink / factor) * factor),
        )
    if rounded[0] * rounded[1] < spec.min_pixels:
        grow = math.sqrt(spec.min_pixels / (short * long))
        return math.ceil(short * grow / factor) * factor, math.ceil(long * grow / factor) * factor
    return rounded


def _nearest_aspect(aspect: float, spec: VisionSpec, most: int) -> tuple[int, int]:
    """Return the sides, of all that have room between the fewest and the most pixels, that distort an image least."""
    factor = spec.factor
    sizes = []
    for short in range(factor, math.isqrt(most) + 1, factor):
        fewest_long = max(short, math.ceil(spec.min_pixels / short / factor) * factor)
        most_long = min(MAX_ASPECT * short, most // short // factor * factor)
        if fewest_long <= most_long:
            sizes.append((short, min(max(round(short * aspect / factor) * factor, fewest_long), most_long)))
    if not sizes:
        raise ImageError(
            f"image: got room for {most} pixels, need it for {spec.min_pixels} at least, in sides of multiples of "
            f"{factor}; raise max_pixels"
        )
    return min(sizes, key=lambda size: abs(math.log(size[1] / size[0] / aspect)))


def _as_rgb(image: "PIL.Image.Image") -> "PIL.Image.Image":
    """Return an image of any mode in RGB; what it shows through is white."""
    import PIL.Image

    if image.mode in ("I", "F"):
        raise ImageError(f"image: got mode {image.mode}, whose brightest value nobody knows, need RGB; convert it")
    if image.mode.startswith("I;16"):
        values = np.array(image)
        if isinstance(see_through := image.info.get("transparency"), int):
            values[values == see_through] = np.iinfo(np.uint16).max
        image = PIL.Image.fromarray((values >> 8).astype(np.uint8))
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    image = image.convert("RGBA")
    canvas = PIL.Image.new("RGB", image.size, "white")
    canvas.paste(image, mask=image)
    return canvas


def _read(source: object, limits: ImageLimits) -> bytes:
    """Return the encoded image that a source gives or names, of no more bytes than are taken."""
    if isinstance(source, Mapping):
        content = source.get("bytes")
        source = source.get("path") if content is None else content
    if isinstance(source, str) and source[:5].lower() == "data:":
        source = _decode_url(source, limits)
    if isinstance(source, str | os.PathLike):
        source = _read_file(os.fspath(source), limits)
    if not isinstance(source, bytes):
        raise ImageError(
            f"image: got {type(source).__name__}, need a Pillow image, bytes, a path, a data: URL, "
            "or a dict with bytes or a path"
        )
    if len(source) > limits.max_source_bytes:
        raise _too_large(len(source), limits)
    return source


def _decode_url(url: str, limits: ImageLimits) -> bytes:
    """Return what a ``data:`` URL holds; what it says of its type does not matter."""
    header, _, payload = url.partition(",")
    if not header.lower().endswith(";base64"):
        raise ImageError("image: got a data: URL that is not in base64, need data:image/png;base64, or the like")
    if (num_bytes := len(payload) * 3 // 4) > limits.max_source_bytes + 2:  # two may be padding
        raise _too_large(num_bytes, limits)
    try:
        return base64.b64decode(payload, validate=True)
    except ValueError:
        raise ImageError("image: got a data: URL whose base64 is damaged, need it whole and without spaces") from None


def _read_file(path: str | bytes, limits: ImageLimits) -> bytes:
    """Read a regular file: a pipe or a device could keep a reader waiting, or have no end."""
    shown = repr(path) if len(path) <= SHOWN_CHARACTERS else f"a path of {len(path)} characters"
    if isinstance(path, str) and re.match(r"[a-z][a-z0-9+.-]*://", path, re.IGNORECASE):
        raise ImageError("image: got a URL, need the image itself; fetch it and pass its bytes")
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ImageError(f"image: got {shown}, which is no regular file, need an image's")
            if status.st_size > limits.max_source_bytes:
                raise _too_large(status.st_size, limits)
            return file.read(limits.max_source_bytes + 1)
    except ImageError:
        raise
    except OSError as exc:
        raise ImageError(f"image: cannot read {shown}: {exc.strerror}; give the path of an image") from None
    except ValueError:
        raise ImageError(f"image: got {shown}, which is no path of this machine, need an image's") from None


def _too_large(num_bytes: int, limits: ImageLimits) -> ImageError:
    return ImageError(f"image: got {num_bytes} bytes, need {limits.max_source_bytes} at most; make it smaller")


@contextmanager
def pillow_errors(sentence: str) -> Iterator[None]:
    """Turn what Pillow raises of bytes that it cannot decode into an ``ImageError``; ours pass.

    Its own text stays behind as the cause: it may hold pieces of the image.
    """
    import PIL.Image

    try:
        yield
    except ImageError:
        raise
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as exc:
        raise ImageError("image: got a header of far more pixels than are taken; make it smaller") from exc
    except (
        OSError,
        SyntaxError,
        ValueError,
        LookupError,
        TypeError,
        ArithmeticError,
        EOFError,
        struct.error,
        zlib.error,
        Warning,  # of damaged metadata, where warnings are errors
    ) as exc:
        raise ImageError(sentence) from exc
