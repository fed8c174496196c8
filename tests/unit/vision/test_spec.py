"""A model's folder says how it sees, in every form that one is saved in; what contradicts itself is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from areal_async.errors import UserError
from areal_async.vision.spec import FAMILIES, Grid, VisionSpec
from tests.unit.vision.specs import QWEN2_5, QWEN3, SHIPPED, config_of, shipped, write_folder


@pytest.mark.parametrize("family", FAMILIES)
def test_folders_as_they_are_shipped_are_read(family: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, config_of(family, SHIPPED[family]), SHIPPED[family])

    assert VisionSpec.read(folder) == shipped(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_folders_as_transformers_saves_them_are_read(family: str, tmp_path: Path) -> None:
    AutoConfig.for_model(family, vision_config={"patch_size": SHIPPED[family]["patch_size"]}).save_pretrained(tmp_path)
    Qwen2VLImageProcessorPil(**SHIPPED[family]).save_pretrained(tmp_path)

    assert VisionSpec.read(tmp_path) == shipped(family)


def test_settings_inside_of_a_processor_s_file_win_as_they_do_in_transformers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, config_of("qwen3_vl", QWEN3), QWEN3)
    other = QWEN3 | {"size": {"shortest_edge": 4096, "longest_edge": 8192}}
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": other}))

    spec = VisionSpec.read(folder)

    theirs = Qwen2VLImageProcessorPil.from_pretrained(folder).size
    assert spec is not None
    assert (spec.min_pixels, spec.max_pixels) == (theirs["shortest_edge"], theirs["longest_edge"]) == (4096, 8192)


def test_processor_s_file_without_an_image_processor_changes_nothing(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, config_of("qwen3_vl", QWEN3), QWEN3)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen3VLProcessor"}))

    assert VisionSpec.read(folder) == shipped("qwen3_vl")


@pytest.mark.parametrize("config", [{"model_type": "qwen3"}, {"model_type": "gemma3", "vision_config": {}}, {}, []])
def test_model_of_no_known_family_does_not_see(config: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert VisionSpec.read(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"patch_size": 14}, "patch_size 14, need 16"),
        ({"merge_size": 4}, "merge_size 4, need 2"),
        ({"temporal_patch_size": 1}, "temporal_patch_size 1, need 2"),
        ({"do_rescale": False}, "do_rescale False, need True"),
        ({"do_normalize": None}, "do_normalize None, need True"),
        ({"rescale_factor": 1 / 127.5}, "rescale_factor 127.5, need 255"),
        ({"size": {}}, "images of None to None pixels"),
        ({"size": {"shortest_edge": 10, "longest_edge": 9}}, "images of 10 to 9 pixels"),
        ({"image_std": [0.5, 0.5, 0.0]}, "image_std"),
        ({"image_mean": [0.5]}, "image_mean"),
        ({"patch_size": "16"}, "patch_size"),
    ],
)
def test_folder_that_contradicts_itself_is_refused(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, config_of("qwen3_vl", QWEN3), QWEN3 | change)

    with pytest.raises(UserError, match=sentence):
        VisionSpec.read(folder)


@pytest.mark.parametrize(
    "name", ["image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_config"]
)
def test_config_without_a_token_or_a_tower_is_refused(name: str, tmp_path: Path) -> None:
    config = config_of("qwen2_5_vl", QWEN2_5)
    del config[name]

    with pytest.raises(UserError, match=name):
        VisionSpec.read(write_folder(tmp_path, config, QWEN2_5))


@pytest.mark.parametrize("missing", ["config.json", "preprocessor_config.json"])
def test_missing_file_is_named(missing: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, config_of("qwen3_vl", QWEN3), QWEN3)
    (folder / missing).unlink()

    with pytest.raises(UserError, match=f"cannot read .*{missing}"):
        VisionSpec.read(folder)


def test_grid_counts_patches_and_a_token_for_each_square_of_them() -> None:
    spec = shipped("qwen3_vl")

    grid = spec.grid_of(width=96, height=64)

    assert grid == Grid(t=1, h=4, w=6)
    assert spec.num_tokens(grid) == 6


@pytest.mark.parametrize("size", [(33, 32), (32, 48), (0, 32), (-32, 32)])
def test_size_that_would_be_resized_has_no_grid(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="need positive multiples of 32"):
        shipped("qwen3_vl").grid_of(*size)


@pytest.mark.parametrize("grid", [Grid(1, 3, 2), Grid(1, 2, 3), Grid(2, 2, 2), Grid(1, 0, 2), Grid(1, -2, -2)])
def test_grid_that_no_image_has_counts_no_tokens(grid: Grid) -> None:
    with pytest.raises(ValueError, match="patches, need 1 x"):
        shipped("qwen3_vl").num_tokens(grid)
