"""Models that see, for the tests of images: what their folders say, at the sizes that Qwen ships and at tiny ones."""

import json
from pathlib import Path
from typing import Any

from areal_async.vision.spec import VisionSpec

CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
IDS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}

QWEN3: dict[str, Any] = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
QWEN2_5: dict[str, Any] = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
}
SHIPPED = {"qwen3_vl": QWEN3, "qwen2_5_vl": QWEN2_5}


def config_of(family: str, processor: dict[str, Any]) -> dict[str, Any]:
    """Return what a model's config says that fits this processor."""
    vision = {
        "patch_size": processor["patch_size"],
        "spatial_merge_size": processor["merge_size"],
        "temporal_patch_size": processor["temporal_patch_size"],
    }
    return {"model_type": family, **IDS, "vision_config": vision}


def write_folder(folder: Path, config: dict[str, Any], processor: dict[str, Any]) -> Path:
    """Write the two files as models ship them."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    return folder


def shipped(family: str, **changes: Any) -> VisionSpec:
    """Return what the family's own models say, but for some settings."""
    settings = SHIPPED[family]
    sizes = settings.get("size", {})
    values: dict[str, Any] = {
        "family": family,
        **IDS,
        "patch_size": settings["patch_size"],
        "merge_size": settings["merge_size"],
        "temporal_patch_size": settings["temporal_patch_size"],
        "mean": tuple(settings["image_mean"]),
        "std": tuple(settings["image_std"]),
        "min_pixels": settings.get("min_pixels", sizes.get("shortest_edge")),
        "max_pixels": settings.get("max_pixels", sizes.get("longest_edge")),
    }
    return VisionSpec(**values | changes)
