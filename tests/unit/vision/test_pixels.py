"""Patches are those of transformers' image processor; what is not in its final size is refused, not resized."""

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from areal_async.vision.pixels import patches
from areal_async.vision.spec import FAMILIES
from tests.unit.vision.pictures import encoded, noise
from tests.unit.vision.specs import SHIPPED, shipped


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [(10, 10), (9, 12), (16, 8)], ids=str)
def test_patches_are_those_of_transformers(family: str, tokens: tuple[int, int]) -> None:
    spec = shipped(family)
    image = noise(*(side * spec.factor for side in tokens))
    theirs = Qwen2VLImageProcessorPil(**SHIPPED[family])(image, return_tensors="np")

    ours = patches(encoded(image), spec)

    assert spec.grid_of(*image.size) == tuple(theirs["image_grid_thw"][0])
    assert (ours.dtype, ours.shape) == (np.float32, theirs["pixel_values"].shape)
    np.testing.assert_allclose(ours, theirs["pixel_values"], rtol=0, atol=1e-6)


def test_patches_of_any_sizes_are_those_of_transformers() -> None:
    settings = SHIPPED["qwen2_5_vl"] | {"patch_size": 2, "merge_size": 3, "temporal_patch_size": 4, "min_pixels": 36}
    spec = shipped("qwen2_5_vl", patch_size=2, merge_size=3, temporal_patch_size=4, min_pixels=36)
    image = noise(18, 12)

    ours = patches(encoded(image), spec)

    theirs = Qwen2VLImageProcessorPil(**settings)(image, return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        (Image.new("RGB", (33, 32)), "need multiples of 32"),
        (Image.new("L", (32, 32)), "mode L, need RGB"),
        (Image.new("RGBA", (32, 32)), "mode RGBA, need RGB"),
        (Image.new("RGB", (96, 64)), "need RGB and at most 4096"),
    ],
)
def test_image_that_was_not_taken_in_for_this_model_is_refused(image: Image.Image, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        patches(encoded(image), shipped("qwen3_vl", max_pixels=4096))


def test_bytes_that_are_no_whole_png_are_refused() -> None:
    whole = encoded(noise(320, 320))
    for data in (b"", b"text", whole[:100], whole[: len(whole) // 2], encoded(noise(320, 320), "JPEG")):
        with pytest.raises(ValueError, match="no whole PNG"):
            patches(data, shipped("qwen3_vl"))
