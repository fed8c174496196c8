"""Whatever comes in is answered right or with one sentence, and what was taken is never resized again."""

import base64
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import ExifTags, Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from areal_async.vision.images import ImageError, ImageLimits, Source, final_size, take_image
from areal_async.vision.pixels import patches
from areal_async.vision.spec import FAMILIES
from tests.unit.vision.pictures import BOMB, PNG_SIGNATURE, chunk, decoded, encoded, noise, png, smooth
from tests.unit.vision.specs import shipped

SPEC = shipped("qwen3_vl", min_pixels=32 * 32, max_pixels=1024 * 1024)
NAME = "holiday.png"


def refusal(source: object, **limits: int) -> str:
    """Return the sentence that refuses this source."""
    with pytest.raises(ImageError) as caught:
        take_image(source, SPEC, ImageLimits(**limits))  # type: ignore[arg-type]
    sentence = str(caught.value)
    assert re.fullmatch(r"image: [^\n]{10,250}", sentence)
    return sentence


# sizes


@given(st.sampled_from(FAMILIES), st.integers(1, 3000), st.integers(1, 3000))
def test_final_size_is_the_processor_s_own(family: str, width: int, height: int) -> None:
    spec = shipped(family)
    assume(max(width, height) <= 190 * min(width, height))  # rounding may take a longer one over 200

    height_there, width_there = smart_resize(height, width, spec.factor, spec.min_pixels, spec.max_pixels)

    assert final_size(width, height, spec) == (width_there, height_there)


sides = st.integers(1, 5000)
tokens = st.integers(1, 200)


@given(sides, sides, tokens, tokens, st.none() | tokens)
def test_no_processor_changes_a_final_size(width: int, height: int, fewest: int, most: int, limit: int | None) -> None:
    square = SPEC.factor**2
    spec = shipped("qwen3_vl", min_pixels=fewest * square, max_pixels=(fewest + most) * square)
    limits = ImageLimits(max_pixels=None if limit is None else (fewest + limit) * square)
    assume(max(width, height) <= 200 * min(width, height))

    final = final_size(width, height, spec, limits)

    assert smart_resize(final[1], final[0], spec.factor, spec.min_pixels, spec.max_pixels) == (final[1], final[0])
    assert limits.max_pixels is None or final[0] * final[1] <= limits.max_pixels
    assert width == height or final_size(height, width, spec, limits) == (final[1], final[0])
    assert final_size(*final, spec, limits) == final


def test_aspect_is_kept_where_the_processor_s_rule_would_need_a_second_turn() -> None:
    """1,760 x 32, to which it brings this one, has fewer than the fewest pixels: it would be resized again."""
    spec = shipped("qwen3_vl")
    assert smart_resize(640, 17670, 32, spec.min_pixels, 336 * 336) == (32, 1760)

    assert final_size(17670, 640, spec, ImageLimits(max_pixels=336 * 336)) == (1760, 64)


def test_image_of_the_smallest_size_is_not_enlarged_beyond_it() -> None:
    image = take_image(encoded(noise(1, 1)), SPEC)

    assert (image.width, image.height) == (32, 32)
    assert np.unique(decoded(image.data).reshape(-1, 3), axis=0).shape == (1, 3)


def test_limit_of_final_pixels_holds_below_the_model_s() -> None:
    image = take_image(smooth(900, 600), SPEC, ImageLimits(max_pixels=336 * 336))

    assert (image.width, image.height) == (384, 256)


def test_limit_below_what_the_model_needs_is_named() -> None:
    sentence = refusal(noise(40, 40), max_pixels=1000)

    assert sentence.startswith("image: got room for 1000 pixels, need it for 1024")


@pytest.mark.parametrize("size", [(201, 1), (1, 201), (6030, 30)])
def test_extreme_aspect_is_refused(size: tuple[int, int]) -> None:
    assert "a longer side of 200 times the shorter at most" in refusal(Image.new("RGB", size))


def test_aspect_of_200_is_taken() -> None:
    image = take_image(Image.new("RGB", (33 * 200, 33)), SPEC)

    assert image.width <= 200 * image.height


# what is taken


def test_image_in_its_final_size_keeps_every_pixel() -> None:
    picture = noise(96, 64)

    image = take_image(encoded(picture), SPEC)

    assert (image.width, image.height) == (96, 64)
    np.testing.assert_array_equal(decoded(image.data), np.asarray(picture))
    assert patches(image.data, SPEC).shape[0] == SPEC.grid_of(96, 64).h * SPEC.grid_of(96, 64).w


def test_taken_image_is_taken_again_as_it_is() -> None:
    image = take_image(smooth(300, 200), SPEC)

    assert take_image(image.data, SPEC) == image


def test_larger_image_is_averaged_down() -> None:
    image = take_image(smooth(640, 640), shipped("qwen3_vl", min_pixels=1024, max_pixels=64 * 64))

    np.testing.assert_allclose(decoded(image.data), np.asarray(smooth(64, 64)), atol=6)


def forms() -> dict[str, Source]:
    """Return the same image in every form that is taken, but for files."""
    data = encoded(smooth(64, 32))
    url = base64.b64encode(data).decode()
    return {
        "pillow": smooth(64, 32),
        "bytes": data,
        "undecoded": {"bytes": data, "path": NAME},
        "url": f"data:image/png;base64,{url}",
        "shouted": f"DATA:IMAGE/PNG;BASE64,{url}",
        "webp": encoded(smooth(64, 32), "WEBP", lossless=True),
    }


@pytest.mark.parametrize("form", forms())
def test_every_form_of_an_image_gives_the_same_bytes(form: str) -> None:
    assert take_image(forms()[form], SPEC) == take_image(encoded(smooth(64, 32)), SPEC)


def test_files_are_read_by_any_kind_of_path(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(encoded(smooth(64, 32)))
    whole = take_image(smooth(64, 32), SPEC)

    for source in (path, str(path), {"bytes": None, "path": str(path)}, {"path": path}):
        assert take_image(source, SPEC) == whole


def test_pillow_s_image_is_left_as_it_is() -> None:
    picture = noise(50, 40, channels=4)
    picture.info["icc_profile"] = b"profile"
    exif = picture.getexif()
    exif[ExifTags.Base.Orientation] = 6
    before = picture.tobytes(), dict(picture.info), dict(exif), picture.size, picture.mode

    take_image(picture, SPEC)

    assert before == (picture.tobytes(), dict(picture.info), dict(picture.getexif()), picture.size, picture.mode)


def test_png_holds_pixels_and_nothing_else() -> None:
    picture = smooth(64, 32)
    exif = picture.getexif()
    exif[ExifTags.Base.Artist] = "someone"
    noted = encoded(picture, "PNG", exif=exif, dpi=(72, 72), icc_profile=b"profile" * 10)

    image = take_image(noted, SPEC)

    assert image == take_image(picture, SPEC)
    assert re.findall(rb"[A-Za-z]{4}", image.data[12:16]) == [b"IHDR"]
    assert image.data[33 + 4 : 33 + 8] == b"IDAT"
    assert image.data.endswith(chunk(b"IEND", b""))
    assert image.data.count(b"IDAT") == 1


def test_name_is_the_hash_of_the_bytes_and_content_is_not_shown() -> None:
    first, second = take_image(noise(32, 32, seed=1), SPEC), take_image(noise(32, 32, seed=2), SPEC)

    assert len(first.sha256) == 64
    assert first.sha256 != second.sha256
    assert repr(first) == "Image(width=32, height=32)"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_image_is_turned_upright_as_datasets_does(kind: str, orientation: int) -> None:
    picture = smooth(64, 32)
    exif = picture.getexif()
    exif[ExifTags.Base.Orientation] = orientation
    data = encoded(picture, kind, exif=exif)

    image = take_image(data, SPEC)

    theirs = datasets.Image().decode_example({"bytes": data, "path": None})
    assert theirs.size == (image.width, image.height)
    np.testing.assert_array_equal(decoded(image.data), np.asarray(theirs))
    assert take_image(theirs, SPEC) == image


def gray_16(values: Any) -> bytes:
    """Write a gray PNG of 16 bits [height, width]."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return png(values.shape[1], values.shape[0], depth=16, color=0, rows=rows)


def test_gray_of_16_bits_is_scaled_as_color_of_16_bits_is() -> None:
    values = np.arange(32 * 32, dtype=np.uint16).reshape(32, 32) * 64
    rows = b"".join(b"\0" + np.repeat(row.astype(">u2"), 3).tobytes() for row in values)
    color = png(32, 32, depth=16, color=2, rows=rows)

    image = take_image(gray_16(values), SPEC)

    np.testing.assert_array_equal(decoded(image.data)[..., 1], values >> 8)
    assert take_image(color, SPEC) == image
    for mode in ("I;16", "I;16B"):
        opened = Image.frombytes(mode, (32, 32), values.astype("<u2" if mode == "I;16" else ">u2").tobytes())
        assert take_image(opened, SPEC) == image


def test_gray_of_16_bits_shows_white_through_one_value() -> None:
    values = np.full((32, 32), 0x1234, dtype=np.uint16)
    values[0, 0] = 0x1235  # the same upper bits, and opaque
    key = chunk(b"tRNS", b"\x12\x34")
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)

    pixels = decoded(take_image(png(32, 32, depth=16, color=0, rows=rows, extra=key), SPEC).data)

    assert pixels[0, 0].tolist() == [0x12] * 3
    assert (pixels.reshape(-1, 3)[1:] == 255).all()


def half_red(mode: str) -> Image.Image:
    """Paint red, at 32 x 32, of which the upper half lets everything through."""
    picture = Image.new("RGBA", (32, 32), (255, 0, 0, 255))
    picture.paste((255, 0, 0, 0), (0, 0, 32, 16))
    return picture.convert(mode)


TRANSPARENT: dict[str, Callable[[], bytes]] = {
    "png": lambda: encoded(half_red("RGBA")),
    "webp": lambda: encoded(half_red("RGBA"), "WEBP", lossless=True, exact=True),
    "png palette": lambda: encoded(half_red("RGBA").quantize(4)),
    "gif": lambda: encoded(half_red("RGBA"), "GIF"),
    "png color key": lambda: encoded(
        Image.fromarray(np.array([[[1, 2, 3]] * 32] * 16 + [[[255, 0, 0]] * 32] * 16, dtype=np.uint8)),
        transparency=(1, 2, 3),
    ),
}


@pytest.mark.parametrize("name", TRANSPARENT)
def test_transparent_image_lies_on_white(name: str) -> None:
    pixels = decoded(take_image(TRANSPARENT[name](), SPEC).data)

    assert (pixels[:16] == 255).all()
    assert (pixels[16:] == [255, 0, 0]).all()


def test_half_transparent_color_is_mixed_with_white() -> None:
    pixels = decoded(take_image(Image.new("RGBA", (32, 32), (200, 0, 0, 128)), SPEC).data)

    np.testing.assert_allclose(pixels[0, 0], [227, 127, 127], atol=1)


OPAQUE: dict[str, Callable[[], bytes]] = {
    "gray": lambda: encoded(smooth(64, 32).convert("L")),
    "two tones": lambda: encoded(smooth(64, 32).convert("1")),
    "palette": lambda: encoded(smooth(64, 32).quantize(16)),
    "gray and opaque": lambda: encoded(smooth(64, 32).convert("LA")),
    "gray jpeg": lambda: encoded(smooth(64, 32).convert("L"), "JPEG"),
    "progressive jpeg": lambda: encoded(smooth(64, 32), "JPEG", progressive=True),
    "cmyk jpeg": lambda: encoded(smooth(64, 32).convert("CMYK"), "JPEG"),
    "gif": lambda: encoded(smooth(64, 32), "GIF"),
    "lossy webp": lambda: encoded(smooth(64, 32), "WEBP"),
}


@pytest.mark.parametrize("name", OPAQUE)
def test_any_mode_is_shown_as_datasets_shows_it(name: str) -> None:
    data = OPAQUE[name]()

    pixels = decoded(take_image(data, SPEC).data)

    theirs = datasets.Image().decode_example({"bytes": data, "path": None})
    np.testing.assert_array_equal(pixels, np.asarray(theirs.convert("RGB")))


def test_cmyk_is_no_negative() -> None:
    pixels = decoded(take_image(encoded(smooth(64, 32).convert("CMYK"), "JPEG", quality=95), SPEC).data)

    np.testing.assert_allclose(pixels, np.asarray(smooth(64, 32)), atol=24)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animation_shows_its_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (32, 32), color) for color in ("red", "blue", "lime")]
    options = {"lossless": True} if kind == "WEBP" else {}
    moving = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)

    assert (decoded(take_image(moving, SPEC).data) == [255, 0, 0]).all()


def test_large_photo_is_taken() -> None:
    data = encoded(noise(2900, 2400), compress_level=0)
    assert len(data) > 20e6

    image = take_image(data, SPEC)

    assert (image.width, image.height) == (1120, 928)
    assert len(image.data) < 2**22


# what is refused

SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9"/></svg>'


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (b"", "got no whole image"),
        (b"secret words", "got no whole image"),
        (SVG, "got no whole image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "got no whole image"),
        (encoded(smooth(64, 64), "BMP"), "got no whole image"),
        (encoded(noise(64, 64))[:-3000], "got no whole image"),
        (encoded(noise(64, 64))[:40], "got no whole image"),
        (encoded(noise(64, 64), "JPEG")[:-500], "got no whole image"),
        (encoded(noise(64, 64), "WEBP")[:-500], "got no whole image"),
        (BOMB, "far more pixels than are taken"),
        (png(8000, 4, depth=8, color=2, rows=b""), "a longer side of 200 times"),
        (png(9000, 4000, depth=8, color=2, rows=b""), "got 9000 x 4000 pixels, need 16777216"),
        ("data:image/png;base64,iVBOR%%%", "base64 is damaged"),
        ("data:image/png;base64,iVBO Rw0K", "base64 is damaged"),
        ("data:image/png;base64,iVBORé", "base64 is damaged"),
        ("data:image/png,%89PNG", "not in base64"),
        ("data:", "not in base64"),
        ("data:text/plain;base64,c2VjcmV0IHdvcmRz", "got no whole image"),
        ("https://example.com/a.png", "got a URL, need the image itself"),
        ("s3://bucket/a.png", "got a URL, need the image itself"),
        ("", "cannot read ''"),
        ("no/such/file.png", "cannot read 'no/such/file.png': No such file or directory"),
        ("/", "cannot read '/': Is a directory"),
        ("nul\0byte", "no path of this machine"),
        ("\ud800", "no path of this machine"),
        ({"bytes": None, "path": None}, "got NoneType"),
        ({}, "got NoneType"),
        ({"bytes": "text", "path": None}, "cannot read"),
        (None, "got NoneType"),
        (12, "got int"),
        ([b""], "got list"),
        (Image.new("RGB", (0, 5)), "need at least one"),
        (Image.new("F", (40, 40)), "got mode F"),
        (Image.new("I", (40, 40)), "got mode I"),
        (Image.new("RGB", (5000, 5000)), "got 5000 x 5000 pixels"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_what_is_no_image_is_refused_in_one_sentence(source: object, sentence: str) -> None:
    got = refusal(source)

    assert sentence in got
    assert "secret" not in got


def test_pipe_and_device_are_refused_without_a_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    assert "no regular file" in refusal(tmp_path / "pipe")
    assert "no regular file" in refusal("/dev/zero")


def test_image_that_was_taken_for_a_path_is_not_told() -> None:
    text = base64.b64encode(encoded(noise(64, 64))).decode()

    with pytest.raises(ImageError) as caught:
        take_image(text, SPEC)

    assert "a path of 16" in str(caught.value)
    assert text[:50] not in str(caught.value) + str(caught.value.__cause__)


@pytest.mark.parametrize("form", ["bytes", "file", "url"])
def test_source_beyond_the_limit_is_refused(form: str, tmp_path: Path) -> None:
    data = encoded(noise(64, 64))
    path = tmp_path / NAME
    path.write_bytes(data)
    source = {"bytes": data, "file": path, "url": "data:;base64," + base64.b64encode(data).decode()}[form]

    assert take_image(source, SPEC, ImageLimits(max_source_bytes=len(data))).width == 64  # type: ignore[arg-type]
    assert f"got {len(data)} bytes, need {len(data) - 4} at most" in refusal(source, max_source_bytes=len(data) - 4)


def test_text_that_inflates_is_no_way_around_the_limits() -> None:
    inflated = chunk(b"zTXt", b"note\0\0" + zlib.compress(b"0" * 2**24))

    refusal(png(32, 32, depth=8, color=2, rows=b"\0" * 97 * 32, extra=inflated))


def test_signature_alone_is_refused() -> None:
    for start in (PNG_SIGNATURE, b"\xff\xd8\xff\xe0", b"GIF89a", b"RIFF\x10\0\0\0WEBPVP8 "):
        refusal(start)


# the process

MUTATED = """
import resource
from random import Random
from areal_async.vision.images import ImageError, take_image
from tests.unit.vision.pictures import BOMB, encoded, noise, smooth
from tests.unit.vision.specs import shipped

SPEC = shipped("qwen3_vl", min_pixels=1024, max_pixels=2**18)
seeds = [encoded(smooth(64, 48), kind) for kind in ("PNG", "JPEG", "GIF", "WEBP")]
seeds += [encoded(noise(48, 48), "PNG"), encoded(smooth(64, 48), "JPEG", progressive=True), BOMB]
take_image(seeds[3], SPEC)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rng, taken = Random(7), 0
for number in range(300):
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(min(len(data), 64))] = rng.randrange(256)
    try:
        take_image(bytes(data), SPEC)
        taken += 1
    except ImageError:
        pass
print(taken, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_mutated_headers_end_in_an_image_or_the_sentence_and_take_little_memory() -> None:
    taken, growth_mb = map(int, run_python("-W", "ignore", "-c", MUTATED).split())

    assert 0 < taken < 300
    assert growth_mb < 200


def test_nothing_of_this_loads_pillow_before_an_image_comes() -> None:
    modules = "areal_async.api, areal_async.vision.images, areal_async.vision.pixels, areal_async.vision.rows"

    assert (
        run_python("-c", f"import sys, {modules}; print('PIL' in sys.modules, 'torch' in sys.modules)") == "False False"
    )


def run_python(*arguments: str) -> str:
    """Run Python on its own and return what it prints."""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, *arguments], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
