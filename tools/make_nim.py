"""Make the games of `workflows/self_play.py`: numbers of stones, and who begins.

    python -m tools.make_nim

Invariant: the same seed writes the same bytes, and no number of stones of the test file is in the training file.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Final

from tools.make_tiny_gsm8k import DATA

LARGEST: Final = 15
TEST_STONES: Final = (6, 9, 11)
NUM_TRAIN: Final = 2048
FIRST: Final = ("policy", "opponent")


def write_data(folder: Path, seed: int) -> None:
    """Write both files."""
    rng = random.Random(f"nim-{seed}")
    train = [stones for stones in range(2, LARGEST + 1) if stones not in TEST_STONES]
    rows = {
        "train": [{"stones": rng.choice(train), "first": rng.choice(FIRST)} for _ in range(NUM_TRAIN)],
        "test": [{"stones": stones, "first": first} for stones in TEST_STONES for first in FIRST],
    }
    for split, games in rows.items():
        text = "".join(json.dumps(game) + "\n" for game in games)
        (folder / f"nim_{split}.jsonl").write_text(text, encoding="utf-8")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    write_data(DATA, parser.parse_args().seed)


if __name__ == "__main__":
    main()
