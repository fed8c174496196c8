"""Images of rows come to the workflow's side undecoded, from whatever data set, and are taken in by our own limits."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from areal_async.config.settings import DatasetSettings
from areal_async.data import images
from areal_async.data.images import ImageCell, image_columns, put_in, row_at, take_row
from areal_async.data.recorded_rows import digest_of
from areal_async.data.rows import load_rows
from areal_async.protocol.types import ColumnError, Prompt
from areal_async.vision.images import Image, ImageError, take_image
from tests.unit.vision.pictures import BOMB, encoded, noise
from tests.unit.vision.specs import shipped

SPEC = shipped("qwen3_vl", min_pixels=64 * 64, max_pixels=256 * 256)
RED, BLUE = encoded(Pillow.new("RGB", (64, 64), "red")), encoded(Pillow.new("RGB", (64, 64), "blue"), "WEBP")


def nested(folder: Path, rows: list[dict[str, Any]]) -> Any:
    """Write rows with images at every depth as the hub's data sets are, and load them."""
    import datasets

    image = datasets.Image()
    kinds = {
        "image": image,
        "images": datasets.List(image),
        "parts": datasets.List({"image": image, "text": datasets.Value("string")}),
        "box": {"image": image, "size": datasets.Value("int64")},
        "question": datasets.Value("string"),
    }
    datasets.Dataset.from_list(rows, features=datasets.Features(kinds)).to_parquet(folder / "rows.parquet")
    return load_rows(DatasetSettings(path=str(folder / "rows.parquet")), shows_progress=False)


ROW: dict[str, Any] = {
    "image": RED,
    "images": [BLUE, RED],
    "parts": [{"image": None, "text": "a"}, {"image": BLUE, "text": "b"}],
    "box": {"image": RED, "size": 3},
    "question": "What is it?",
}
CMYK_RED = Pillow.new("RGB", (64, 64), "red").convert("CMYK")
EMPTY: dict[str, Any] = {"image": None, "images": [], "parts": [], "box": {"image": None, "size": 0}, "question": "?"}


def test_images_are_left_encoded_at_any_depth_and_the_rest_of_a_row_as_it_was(tmp_path: Path) -> None:
    rows = nested(tmp_path, [ROW, EMPTY])

    red, blue = {"bytes": RED, "path": None}, {"bytes": BLUE, "path": None}
    assert image_columns(rows) == ["image", "images", "parts", "box"]
    found = row_at(rows, 0)
    assert found == {
        "image": red,
        "images": [blue, red],
        "parts": [{"image": None, "text": "a"}, {"image": blue, "text": "b"}],
        "box": {"image": red, "size": 3},
        "question": "What is it?",
    }
    cells = (found["image"], *found["images"], found["parts"][1]["image"], found["box"]["image"])
    assert all(isinstance(cell, ImageCell) for cell in cells)
    assert row_at(rows.select([1]), 0) == EMPTY


def test_each_image_is_taken_out_of_its_place_and_goes_back_there(tmp_path: Path) -> None:
    bare, found = take_row(row_at(nested(tmp_path, [ROW]), 0), SPEC, model="m", index=0)

    red, blue = take_image(RED, SPEC), take_image(BLUE, SPEC)
    assert bare == {
        "image": None,
        "images": [None, None],
        "parts": [{"image": None, "text": "a"}, {"image": None, "text": "b"}],
        "box": {"image": None, "size": 3},
        "question": "What is it?",
    }
    assert found == [
        (["image"], red),
        (["images", 0], blue),
        (["images", 1], red),
        (["parts", 1, "image"], blue),
        (["box", "image"], red),
    ]
    whole = put_in(bare, found)
    assert whole["images"] == [blue, red]
    assert whole["box"] == {"image": red, "size": 3}
    assert bare["images"] == [None, None], "it is a copy"


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        (
            RED[:-30],
            "row 7, column image: image: got no whole image, need a PNG, JPEG, GIF or WebP that can be",
        ),
        (BOMB, "row 7, column image: image: got a header of far more pixels than are taken; make it smaller"),
        (b"", "row 7, column image: image: got no whole image"),
    ],
)
def test_an_image_that_cannot_be_taken_in_says_so_where_its_cell_is_read(cell: bytes, reason: str) -> None:
    row = {"image": ImageCell(bytes=cell, path=None), "question": "?"}

    bare, found = take_row(row, SPEC, model="m", index=7)

    prompt = Prompt(epoch=0, index=7, row=put_in(bare, found))
    assert prompt["question"] == "?"
    with pytest.raises(ImageError, match=reason):
        prompt["image"]
    with pytest.raises(ColumnError, match="row 7 has no column 'picture'"):
        prompt["picture"]


def test_a_column_with_one_image_that_cannot_be_taken_in_has_its_first_error_alone() -> None:
    bad, other, good = (ImageCell(bytes=data, path=None) for data in (b"no image", BOMB, RED))

    bare, found = take_row({"images": [good, bad, other], "image": good}, SPEC, model="m", index=7)

    row = put_in(bare, found)
    assert [place for place, _ in found] == [["image"], ["images"]]
    assert "row 7, column images: image: got no whole image" in str(row["images"])
    assert isinstance(row["image"], Image)


def test_a_model_that_does_not_see_is_named_where_a_cell_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "take_image", None)  # nothing is decoded
    row = {"images": [ImageCell(bytes=RED, path=None)], "question": "?"}

    bare, [(place, error)] = take_row(row, None, model="tiny", index=2)

    assert (bare, place) == ({"images": None, "question": "?"}, ["images"])
    assert "row 2, column images: got an image, which the model tiny cannot see, need text; " in str(error)


def test_a_row_of_too_many_images_has_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MAX_IMAGES", 2)
    row = {"a": [ImageCell(bytes=RED, path=None)] * 2, "b": ImageCell(bytes=RED, path=None), "c": 1}

    bare, found = take_row(row, SPEC, model="m", index=4)

    assert bare == {"a": None, "b": None, "c": 1}
    assert [(place, str(error)) for place, error in found] == [
        (["a"], "row 4: got 3 images, need at most 2; leave some out"),
        (["b"], "row 4: got 3 images, need at most 2; leave some out"),
    ]


def test_a_row_of_too_large_images_is_given_up_before_all_are_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Image] = []

    def counted(source: Any, spec: Any) -> Image:
        taken.append(take_image(source, spec))
        return taken[-1]

    monkeypatch.setattr(images, "take_image", counted)
    pictures = [ImageCell(bytes=encoded(noise(64, 64, seed=seed)), path=None) for seed in (0, 0, 0, 1, 2)]

    bare, found = take_row({"images": pictures, "id": 7}, SPEC, model="m", index=3, max_bytes=20_000)

    assert (bare, [place for place, _ in found]) == ({"images": None, "id": 7}, [["images"]])
    assert str(found[0][1]).startswith("row 3: got images of more than 20000 bytes, need at most that; leave some out")
    assert len(taken) == 4, "one that is shown again counts once"


def test_a_folder_of_images_has_them_by_their_paths(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    noise(64, 64).save(tmp_path / "train" / "one.png")
    metadata = {"file_name": "one.png", "question": "?"}
    (tmp_path / "train" / "metadata.jsonl").write_text(json.dumps(metadata) + "\n")

    row = row_at(load_rows(DatasetSettings(path=str(tmp_path)), shows_progress=False), 0)

    assert row["question"] == "?"
    assert row["image"]["bytes"] is None
    assert Path(row["image"]["path"]) == tmp_path / "train" / "one.png"
    assert isinstance(take_row(row, SPEC, model="m", index=0)[1][0][1], Image)


FUNCTION = """
import io
from PIL import Image

def rows():
    picture, file = Image.new("RGB", (64, 64), "red"), io.BytesIO()
    picture.save(file, "PNG")
    png = file.getvalue()
    return [{"n": None, "seed": b"no image", "shown": None, "file": None, "files": [png, png], "many": [picture]},
            {"n": 1, "seed": b"none", "shown": picture, "file": png, "files": [], "many": []}]
"""


def test_a_function_gives_images_of_pillows_and_the_bytes_of_files(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(FUNCTION)

    rows = load_rows(DatasetSettings(python=str(tmp_path / "made.py")))

    assert image_columns(rows) == ["shown", "file", "files", "many"]
    first, second = row_at(rows, 0), row_at(rows, 1)
    assert (first["shown"], first["file"], first["seed"]) == (None, None, b"no image")
    taken = {take_image(one, SPEC).sha256 for one in (*first["files"], *first["many"], second["shown"], second["file"])}
    assert taken == {take_image(RED, SPEC).sha256}


CHANGED = """
from pathlib import Path
from PIL import Image, ImageDraw

def rows():
    here = Path(__file__).parent
    opened = Image.open(here / "red.png")
    ImageDraw.Draw(opened).rectangle((0, 0, 64, 64), "blue")
    yield {"image": opened, "box": {"image": opened}}
    canvas = Image.new("RGB", (64, 64), "red")
    with Image.open(here / "photo.jpg") as photo:
        yield {"image": canvas, "box": {"image": photo}}
    canvas.paste("blue", (0, 0, 64, 64))
    yield {"image": canvas, "box": {"image": canvas}}
    red = Image.new("RGB", (64, 64), "red")
    for other in (red.convert("P"), Image.new("I;16", (64, 64)), red.convert("CMYK")):
        yield {"image": other}
"""


def test_a_function_gives_images_of_pillows_as_they_are_when_it_returns_them(tmp_path: Path) -> None:
    photo = encoded(noise(64, 64), "JPEG")
    (tmp_path / "made.py").write_text(CHANGED)
    (tmp_path / "red.png").write_bytes(RED)
    (tmp_path / "photo.jpg").write_bytes(photo)

    rows = load_rows(DatasetSettings(python=str(tmp_path / "made.py")))

    assert image_columns(rows) == ["image", "box"]
    found = [dict(taken_by_place(row_at(rows, index))) for index in range(len(rows))]
    red, blue, black = (take_image(Pillow.new("RGB", (64, 64), color), SPEC) for color in ("red", "blue", "black"))
    assert [one["image"] for one in found] == [blue, red, blue, red, black, take_image(CMYK_RED, SPEC)]
    assert [one.get("box") for one in found[:3]] == [blue, take_image(photo, SPEC), blue]
    assert row_at(rows, 1)["box"]["image"]["bytes"] == photo, "a file that nobody changed is not compressed again"


def taken_by_place(row: dict[str, Any]) -> list[tuple[str, Image | ImageError]]:
    return [(str(place[0]), one) for place, one in take_row(row, SPEC, model="m", index=0)[1]]


def test_a_cell_that_holds_neither_bytes_nor_a_path_has_no_image() -> None:
    import datasets
    import pyarrow

    table = pyarrow.Table.from_pylist(
        [{"image": {"bytes": RED, "path": "a"}}, {"image": {"bytes": None, "path": None}}]
    )
    info = datasets.DatasetInfo(features=datasets.Features({"image": datasets.Image(decode=False)}))

    rows = datasets.Dataset(table, info=info)

    assert [row_at(rows, index)["image"] for index in range(2)] == [{"bytes": RED, "path": "a"}, None]


def test_texts_that_name_images_stay_texts(tmp_path: Path) -> None:
    cells = {"path": "one.png", "url": "data:image/png;base64,AAAA", "like": {"bytes": None, "path": "/etc/passwd"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(cells) + "\n")

    rows = load_rows(DatasetSettings(path=str(tmp_path / "rows.jsonl")), shows_progress=False)

    row = row_at(rows, 0)
    assert row == cells
    assert take_row(row, SPEC, model="m", index=0) == (cells, [])


def test_rows_with_images_have_one_digest_however_many_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = nested(tmp_path, [ROW, EMPTY, ROW])
    digest = digest_of(rows)

    monkeypatch.setattr("areal_async.data.recorded_rows.IMAGE_BATCH_ROWS", 1)

    assert digest_of(rows) == digest
    (tmp_path / "other").mkdir()
    assert digest_of(nested(tmp_path / "other", [ROW, EMPTY, {**ROW, "image": BLUE}])) != digest


LOAD = """
import sys
from areal_async.config.settings import DatasetSettings
from areal_async.data.images import row_at, take_row
from areal_async.data.rows import load_rows

rows = load_rows(DatasetSettings(path=sys.argv[1]), shows_progress=False)
print(take_row(row_at(rows, 0), None, model="m", index=0)[0], "PIL" in sys.modules)
"""


def test_rows_of_text_alone_do_not_load_pillow(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?"}\n')

    said = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "rows.jsonl")], capture_output=True, text=True, check=True
    )

    assert said.stdout.strip() == "{'question': '1+1?'} False"


def test_an_image_opens_as_pillows() -> None:
    picture = noise(64, 96)

    opened = take_image(picture, SPEC).open()

    assert (opened.mode, opened.size) == ("RGB", (64, 96))
    assert opened.tobytes() == picture.tobytes()
    assert take_image(opened.crop((0, 0, 64, 64)), SPEC).height == 64
