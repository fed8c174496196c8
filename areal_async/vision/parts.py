"""Parts of a message's content that show an image, and values that are one. Pure, and without Pillow."""

import sys
from collections.abc import Mapping
from typing import Any

IMAGE_PARTS = ("image", "image_url")
"""Types of such parts: the way of chat templates, and OpenAI's."""


def is_image(part: object) -> bool:
    """Say whether a part of a content is an image."""
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS


def part_for_template(part: Any) -> Any:
    """Return a part of a content without what it does not have: a column fills all with the keys of any.

    Of an image a template is told that it stands there, and nothing else.
    """
    if not isinstance(part, Mapping):
        return part
    return {"type": "image"} if is_image(part) else {key: value for key, value in part.items() if value is not None}


def is_picture(value: object) -> bool:
    """Say whether a value is an image of Pillow's; where nobody has imported it there is none."""
    pillow: Any = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def is_image_file(value: object) -> bool:
    """Say whether a value is bytes that begin as a file of one of the formats that are taken."""
    if not isinstance(value, bytes):
        return False
    return value.startswith((b"\x89PNG", b"\xff\xd8\xff", b"GIF8")) or value[:4] + value[8:12] == b"RIFFWEBP"
