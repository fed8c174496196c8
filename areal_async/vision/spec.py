"""How a model sees: its patches, its tokens around an image and its normalization, read from the model's folder.

Invariant: a grid is of an image in its final size, of which every merged patch is whole and becomes one token. So
neither a server's processor nor the trainer resizes: the model is trained on the pixels that it saw.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec

from areal_async.errors import UserError

FAMILIES: Final = ("qwen3_vl", "qwen2_5_vl")
"""Model types of ``config.json`` whose images are understood here."""

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_TokenId = Annotated[int, msgspec.Meta(ge=0)]
_Deviation = Annotated[float, msgspec.Meta(gt=0)]
_Fields = TypeVar("_Fields", bound=msgspec.Struct)


class Grid(NamedTuple):
    """Patches of one image: in time (1 for an image), along its height and along its width."""

    t: int
    h: int
    w: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionSpec:
    """What turns an image into tokens and pixels of one model."""

    family: str
    """One of ``FAMILIES``."""
    image_token_id: int
    """Placeholder: one for each merged patch in an expanded row, one for each image in a collapsed row."""
    video_token_id: int
    """Placeholder of a video, of which there are none here."""
    vision_start_token_id: int
    """Stands right before the placeholders of an image."""
    vision_end_token_id: int
    """Stands right after them."""
    patch_size: int
    """Pixels along the side of a patch."""
    merge_size: int
    """Patches along the side of the square that becomes one token."""
    temporal_patch_size: int
    """Frames of a patch; an image is repeated to fill them."""
    mean: tuple[float, float, float]
    """Of red, green and blue, where 1 is the brightest."""
    std: tuple[float, float, float]
    min_pixels: int
    """Of an image in its final size."""
    max_pixels: int

    @property
    def factor(self) -> int:
        """Pixels along the side of one token's square: both sides of an image are multiples of it."""
        return self.patch_size * self.merge_size

    @classmethod
    def read(cls, folder: Path) -> "VisionSpec | None":
        """Read ``config.json`` and the image processor's settings in a model's folder, which fit together.

        Returns:
            ``None`` where the model is of none of the ``FAMILIES``: no image can be shown to it here.

        Raises:
            UserError: a file cannot be read, lacks a setting, or contradicts the other.
        """
        content = _read_json(folder / "config.json")
        if content.get("model_type") not in FAMILIES:
            return None
        config = _convert(content, _Config, folder / "config.json")
        path, settings = _processor_settings(folder)
        processor = _convert(settings, _Processor, path)
        model = config.vision_config
        for name, got, need in (
            ("patch_size", processor.patch_size, model.patch_size),
            ("merge_size", processor.merge_size, model.spatial_merge_size),
            ("temporal_patch_size", processor.temporal_patch_size, model.temporal_patch_size),
            ("do_rescale", processor.do_rescale, True),
            ("do_normalize", processor.do_normalize, True),
            ("rescale_factor", round(1 / processor.rescale_factor, 3), 255),
        ):
            if got != need:
                raise UserError(f"model: {path} has {name} {got}, need {need}; take the file that came with the model")
        min_pixels, max_pixels = _pixel_range(processor, path)
        return cls(
            family=config.model_type,
            image_token_id=config.image_token_id,
            video_token_id=config.video_token_id,
            vision_start_token_id=config.vision_start_token_id,
            vision_end_token_id=config.vision_end_token_id,
            patch_size=processor.patch_size,
            merge_size=processor.merge_size,
            temporal_patch_size=processor.temporal_patch_size,
            mean=processor.image_mean,
            std=processor.image_std,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
        )

    def shows_alike(self, other: "VisionSpec") -> bool:
        """Say whether what the other model was shown can be shown to this one: every image as the same tokens."""

        def tokens(spec: VisionSpec) -> tuple[int, ...]:
            return spec.factor, spec.image_token_id, spec.vision_start_token_id, spec.vision_end_token_id

        return tokens(self) == tokens(other) and self.max_pixels >= other.max_pixels

    def grid_of(self, width: int, height: int) -> Grid:
        """Return the patches of an image in its final size.

        Raises:
            ValueError: a side, in pixels, is no positive multiple of ``factor``.
        """
        if min(width, height) < 1 or width % self.factor or height % self.factor:
            raise ValueError(f"image: got {width} x {height} pixels, need positive multiples of {self.factor}")
        return Grid(1, height // self.patch_size, width // self.patch_size)

    def num_tokens(self, grid: Grid) -> int:
        """Return the placeholders that stand for an image in an expanded row.

        Raises:
            ValueError: it is no grid of an image of this model.
        """
        if grid.t != 1 or min(grid.h, grid.w) < 1 or grid.h % self.merge_size or grid.w % self.merge_size:
            raise ValueError(
                f"grid of an image: got {grid.t} x {grid.h} x {grid.w} patches, "
                f"need 1 x two positive multiples of {self.merge_size}"
            )
        return grid.h * grid.w // self.merge_size**2


class _VisionConfig(msgspec.Struct):
    patch_size: _Positive
    spatial_merge_size: _Positive
    temporal_patch_size: _Positive


class _Config(msgspec.Struct):
    model_type: str
    image_token_id: _TokenId
    video_token_id: _TokenId
    vision_start_token_id: _TokenId
    vision_end_token_id: _TokenId
    vision_config: _VisionConfig


class _Processor(msgspec.Struct):
    patch_size: _Positive
    merge_size: _Positive
    temporal_patch_size: _Positive
    image_mean: tuple[float, float, float]
    image_std: tuple[_Deviation, _Deviation, _Deviation]
    size: dict[str, Any] = {}
    min_pixels: _Positive | None = None
    max_pixels: _Positive | None = None
    do_rescale: bool | None = True
    do_normalize: bool | None = True
    rescale_factor: _Deviation = 1 / 255


def _processor_settings(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    """Return the image processor's file and settings; those inside of a whole processor's file go first."""
    whole = folder / "processor_config.json"
    if whole.is_file() and isinstance(settings := _read_json(whole).get("image_processor"), dict):
        return whole, settings
    path = folder / "preprocessor_config.json"
    return path, _read_json(path)


def _pixel_range(processor: _Processor, path: Path) -> tuple[int, int]:
    """Return the smallest and the largest final size; models name them in one of two ways, of which the older wins."""
    fewest = processor.min_pixels or processor.size.get("shortest_edge")
    most = processor.max_pixels or processor.size.get("longest_edge")
    if not isinstance(fewest, int) or not isinstance(most, int) or not 1 <= fewest <= most:
        raise UserError(
            f"model: {path} has images of {fewest} to {most} pixels, need min_pixels and max_pixels, "
            "or size with shortest_edge and longest_edge; take the file that came with the model"
        )
    return fewest, most


def _convert(content: Mapping[str, Any], kind: type[_Fields], path: Path) -> _Fields:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as exc:
        raise UserError(f"model: {path}: {exc}; take the file that came with the model") from exc


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise UserError(f"model: cannot read {path}: {exc}; give a model's folder") from exc
    return content if isinstance(content, dict) else {}
