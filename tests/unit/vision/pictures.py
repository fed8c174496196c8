"""Images to take in, painted and encoded in every form that the tests need."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def noise(width: int, height: int, *, seed: int = 1, channels: int = 3) -> Image.Image:
    """Paint an image whose pixels all differ."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, channels), dtype=np.uint8))


def smooth(width: int, height: int) -> Image.Image:
    """Paint an image that survives being compressed: it brightens to the right in red, downwards in green."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([x, y, (x + y) / 4], axis=-1).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Encode an image by Pillow."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def decoded(data: bytes) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Return the pixels of a PNG, which has to be RGB [height, width, 3]."""
    with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
        assert image.mode == "RGB"
        return np.asarray(image)


def chunk(kind: bytes, content: bytes) -> bytes:
    """Return a chunk of a PNG with its checksum."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, *, depth: int, color: int, rows: bytes, extra: bytes = b"") -> bytes:
    """Write a PNG by hand; each row starts with its filter, 0, and ``extra`` are chunks before the pixels."""
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(rows))
    return PNG_SIGNATURE + chunk(b"IHDR", header) + extra + pixels + chunk(b"IEND", b"")


BOMB = png(60_000, 60_000, depth=8, color=2, rows=b"\0" * 1000)
"""Says that it has 3.6 thousand million pixels."""
