"""The pictures that ship are what the tool draws, hold as many things as their rows say, and are in one split each."""

import io
import random
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pytest
from numpy.typing import NDArray

from tools.make_clevr_count import CELL, GREYS, MOST_ITEMS, NUM_ROWS, SIDE, draw, write_data
from tools.make_search import DATA as SHIPPED
from tools.word_problems import Split

SPLITS = tuple(NUM_ROWS)


def rows(split: Split, folder: Path = SHIPPED) -> list[dict[str, Any]]:
    """Return a file's rows with their pictures as they are stored; none is left in the cache of ``datasets``."""
    loaded = datasets.Dataset.from_parquet(str(folder / f"clevr_count_{split}.parquet"), keep_in_memory=True)
    stored = loaded.cast_column("images", datasets.List(datasets.Image(decode=False)))
    return [dict(row) for row in stored]


def pixels(row: dict[str, Any]) -> NDArray[np.uint8]:
    (image,) = row["images"]
    return np.asarray(PIL.Image.open(io.BytesIO(image["bytes"])).convert("RGB"))


def test_what_ships_is_what_the_tool_draws(tmp_path: Path) -> None:
    """In its pixels: other versions of zlib and Arrow write other bytes for the same."""
    write_data(tmp_path, seed=1)

    for split in SPLITS:
        for ours, theirs in zip(rows(split, tmp_path), rows(split), strict=True):
            assert (pixels(ours) == pixels(theirs)).all()
            assert {**ours, "images": None} == {**theirs, "images": None}


@pytest.mark.parametrize("num_items", [1, MOST_ITEMS])
def test_a_picture_holds_as_many_things_as_it_says(num_items: int) -> None:
    for seed in range(20):
        picture = draw(num_items, random.Random(seed))

        is_thing = (picture.pixels != picture.pixels[..., :1]).any(axis=-1)
        cells = is_thing.reshape(SIDE // CELL, CELL, SIDE // CELL, CELL).any(axis=(1, 3))
        assert cells.sum() == picture.num_items == num_items
        assert set(picture.pixels[~is_thing].ravel()) <= set(range(GREYS[0], GREYS[1] + 1))


def test_rows_have_the_public_columns_and_every_number_as_often() -> None:
    for split in SPLITS:
        shipped = rows(split)
        counts = Counter(row["answer"] for row in shipped)

        assert len(shipped) == NUM_ROWS[split]
        assert set(shipped[0]) == {"images", "problem", "answer"}
        assert shipped[0]["problem"].startswith("<image>")
        assert set(counts) == {str(number) for number in range(1, MOST_ITEMS + 1)}
        assert max(counts.values()) - min(counts.values()) <= 1


def test_no_picture_is_in_both_splits() -> None:
    train, test = ({pixels(row).tobytes() for row in rows(split)} for split in SPLITS)

    assert not train & test
    assert len(train) + len(test) == sum(NUM_ROWS.values())
