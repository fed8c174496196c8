"""Make the data of `workflows/clevr_count.py`: pictures of a few things, and how many they are.

    python -m tools.make_clevr_count

A picture has 64 x 64 pixels, cut into cells of which each holds one thing or none: a disc, a square or a triangle of
some colour and size, at a random place in its cell. Its background is a random light grey. Rows have the columns of
`BUAADreamer/clevr_count_70k` and ask its question; the picture is a PNG, as `datasets` stores images in Parquet.

Invariants: the same seed draws the same pixels, and no picture is in two splits.
"""

import argparse
import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tools.make_search import DATA
from tools.word_problems import Split

NUM_ROWS: Final = {Split.TRAIN: 1024, Split.TEST: 256}
QUESTION: Final = "How many different items are there in the image?"
SIDE: Final = 64
"""Of a picture, in pixels."""
CELL: Final = 16
MOST_ITEMS: Final = 9
"""Every number up to it is as frequent, and written with one digit."""
SIDES: Final = (7, 12)
"""Smallest and largest thing."""
COLOURS: Final = ((200, 40, 40), (30, 130, 60), (40, 80, 200), (140, 50, 160), (30, 150, 160), (140, 90, 30))
GREYS: Final = (200, 235)
SHAPES: Final = ("disc", "square", "triangle")


class Picture(NamedTuple):
    """What is seen, and how many things that are."""

    pixels: NDArray[np.uint8]
    """[SIDE, SIDE, 3]."""
    num_items: int


def draw(num_items: int, rng: random.Random) -> Picture:
    """Draw a picture of so many things."""
    pixels = np.full((SIDE, SIDE, 3), rng.randint(*GREYS), dtype=np.uint8)
    for cell in rng.sample(range((SIDE // CELL) ** 2), num_items):
        side = rng.randint(*SIDES)
        top, left = (place * CELL + rng.randint(0, CELL - side) for place in divmod(cell, SIDE // CELL))
        pixels[top : top + side, left : left + side][_mask(rng.choice(SHAPES), side)] = rng.choice(COLOURS)
    return Picture(pixels, num_items)


def _mask(shape: str, side: int) -> NDArray[np.bool_]:
    """Return which pixels of a square a thing covers [side, side]."""
    down, right = np.indices((side, side)) + 0.5
    match shape:
        case "disc":
            covered: NDArray[np.bool_] = (down - side / 2) ** 2 + (right - side / 2) ** 2 <= (side / 2) ** 2
        case "triangle":
            covered = np.abs(right - side / 2) <= down / 2
        case _:
            covered = np.full((side, side), True)
    return covered


def pictures(split: Split, seed: int) -> Iterator[Picture]:
    """Draw pictures of one split without end, each number of things as often."""
    rng = random.Random(f"clevr-count-{split}-{seed}")
    while True:
        numbers = list(range(1, MOST_ITEMS + 1))
        rng.shuffle(numbers)
        for number in numbers:
            yield draw(number, rng)


def png_of(pixels: NDArray[np.uint8]) -> bytes:
    """Return a PNG of the picture, with a palette of its few colours."""
    import PIL.Image

    buffer = io.BytesIO()
    image = PIL.Image.fromarray(pixels)
    image.quantize(len(COLOURS) + 1, dither=PIL.Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def write_data(folder: Path, seed: int) -> None:
    """Write both files, of different pictures."""
    import datasets

    seen: set[bytes] = set()
    for split, num_rows in NUM_ROWS.items():
        rows: list[dict[str, Any]] = []
        for picture in pictures(split, seed):
            if picture.pixels.tobytes() in seen:
                continue
            seen.add(picture.pixels.tobytes())
            shown = [{"bytes": png_of(picture.pixels), "path": None}]
            rows.append({"images": shown, "problem": f"<image>{QUESTION}", "answer": str(picture.num_items)})
            if len(rows) == num_rows:
                break
        text = datasets.Value("string")
        features = datasets.Features({"images": datasets.List(datasets.Image()), "problem": text, "answer": text})
        datasets.Dataset.from_list(rows, features=features).to_parquet(folder / f"clevr_count_{split}.parquet")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    write_data(DATA, parser.parse_args().seed)


if __name__ == "__main__":
    main()
