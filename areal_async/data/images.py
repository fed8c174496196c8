"""Images in the cells of rows: found by the columns of a data set, and taken in apart from the rest of the row.

The library that reads data sets is kept from decoding them, so that what comes in is held against our own limits. A
data set without columns of images, and a row without an image, are passed on as the very same objects.
"""

import math
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

from areal_async.protocol.fields import MAX_IMAGES, Place
from areal_async.vision.images import Image, ImageError, take_image
from areal_async.vision.spec import VisionSpec


class ImageCell(dict[str, Any]):
    """A cell of a column of images, undecoded: the file's ``bytes``, or else its ``path``."""


def undecoded(rows: Any) -> Any:
    """Return a ``datasets.Dataset`` as it was loaded whose images are read as they are stored, at any depth."""
    import datasets

    if not image_columns(rows):
        return rows
    info = rows.info.copy()
    info.features = datasets.Features({name: _undecoded(feature) for name, feature in rows.features.items()})
    return datasets.Dataset(rows.data, info=info, split=rows.split)


def image_columns(rows: Any) -> list[str]:
    """Return the columns with an image anywhere in their cells; rows that are a plain list have none."""
    return [name for name, feature in _features(rows).items() if _has_image(feature)]


def row_at(rows: Any, index: int) -> dict[str, Any]:
    """Return a row whose images are ``ImageCell``."""
    row: dict[str, Any] = rows[index]
    features = _features(rows)
    return row | {name: _marked(row[name], features[name]) for name in image_columns(rows)}


def holds_images(value: object) -> bool:
    """Say whether a row, or a part of one, has an image that is not taken in."""
    if isinstance(value, ImageCell):
        return True
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(holds_images, parts))


def take_row(
    row: dict[str, Any], vision: VisionSpec | None, *, model: str, index: int, max_bytes: float = math.inf
) -> tuple[dict[str, Any], list[tuple[Place, Image | ImageError]]]:
    """Take in a row's images. It decodes them: call it in a thread.

    Args:
        vision: how the model sees; ``None`` where it does not.
        model: its name.
        index: the row's, for errors.
        max_bytes: of its images as they are then, in all; of a row that has more none is taken in.

    Returns:
        The row with None in the place of each image, and what is to be there. A column of which an image cannot be
        taken in has the reason in the place of all of it.
    """
    cells: list[tuple[Place, ImageCell]] = []
    bare = _take_out(row, [], cells)
    columns = dict.fromkeys(str(place[0]) for place, _ in cells)

    def refused(sentence: str) -> tuple[dict[str, Any], list[tuple[Place, Image | ImageError]]]:
        error = ImageError(f"row {index}: {sentence}")
        return bare | dict.fromkeys(columns), [([column], error) for column in columns]

    if len(cells) > MAX_IMAGES:
        return refused(f"got {len(cells)} images, need at most {MAX_IMAGES}; leave some out")
    taken: list[tuple[Place, Image | ImageError]] = []
    sizes: dict[str, int] = {}
    for place, cell in cells:
        one = _taken(cell, vision, model, f"row {index}, column {place[0]}")
        taken.append((place, one))
        if isinstance(one, Image):
            sizes[one.sha256] = len(one.data)
        if sum(sizes.values()) > max_bytes:  # before the rest is in memory as well
            return refused(
                f"got images of more than {max_bytes:.0f} bytes, need at most that; "
                "leave some out, or raise rollout.max_image_stream_bytes"
            )
    errors = {str(place[0]): one for place, one in reversed(taken) if isinstance(one, ImageError)}
    found = [(place, one) for place, one in taken if place[0] not in errors]
    return bare | dict.fromkeys(errors), found + [([column], error) for column, error in errors.items()]


def put_in(row: dict[str, Any], found: Iterable[tuple[Place, object]]) -> dict[str, Any]:
    """Return a copy of a row with these values in their places, which it has."""
    row = deepcopy(row)
    for place, value in found:
        cell: Any = row
        for step in place[:-1]:
            cell = cell[step]
        cell[place[-1]] = value
    return row


def _features(rows: Any) -> Mapping[str, Any]:
    return getattr(rows, "features", None) or {}


def _has_image(feature: Any) -> bool:
    import datasets

    if isinstance(feature, Mapping):
        return any(map(_has_image, feature.values()))
    if isinstance(feature, datasets.List | datasets.LargeList):
        return _has_image(feature.feature)
    return isinstance(feature, datasets.Image)


def _undecoded(feature: Any) -> Any:
    import datasets

    if isinstance(feature, Mapping):
        return {name: _undecoded(one) for name, one in feature.items()}
    if isinstance(feature, datasets.List | datasets.LargeList):
        return replace(feature, feature=_undecoded(feature.feature))
    return replace(feature, decode=False) if isinstance(feature, datasets.Image) else feature


def _marked(value: Any, feature: Any) -> Any:
    import datasets

    if value is None:
        return None
    if isinstance(feature, Mapping):
        return {name: _marked(value[name], one) for name, one in feature.items()}
    if isinstance(feature, datasets.List | datasets.LargeList):
        return [_marked(one, feature.feature) for one in value]
    if isinstance(feature, datasets.Image):
        return ImageCell(value) if value["bytes"] is not None or value["path"] is not None else None
    return value


def _take_out(value: Any, place: Place, cells: list[tuple[Place, ImageCell]]) -> Any:
    """Return a value without its images, and note these."""
    if isinstance(value, ImageCell):
        cells.append((place, value))
        return None
    if isinstance(value, dict):
        return {name: _take_out(one, [*place, name], cells) for name, one in value.items()}
    if isinstance(value, list):
        return [_take_out(one, [*place, number], cells) for number, one in enumerate(value)]
    return value


def _taken(cell: ImageCell, vision: VisionSpec | None, model: str, what: str) -> Image | ImageError:
    if vision is None:
        return ImageError(
            f"{what}: got an image, which the model {model} cannot see, need text; leave the column out, or take a "
            "model that sees (Qwen3-VL, Qwen2.5-VL)"
        )
    try:
        image = take_image(cell, vision)
    except ImageError as exc:
        return ImageError(f"{what}: {exc}")
    _ = image.sha256  # hashed here, not on a loop
    return image
