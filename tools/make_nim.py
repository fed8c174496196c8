"""Make the games of `workflows/self_play.py`: numbers of stones, who begins, and against whom.

    python -m tools.make_nim

Training games are the model's against itself. Those of the test file are against a player that makes no mistake, from
every start from which it can be beaten: what is held out is the opponent. Each start is there three times, for it may
take 1, 2 or 3 stones where it has lost already.

Invariant: the same seed writes the same bytes.
"""

import argparse
import random
from pathlib import Path
from typing import Final

from tools.make_search import DATA, write_lines

LARGEST: Final = 11
MOST: Final = 3
"""Stones that a player may take at once."""
NUM_TRAIN: Final = 2048
FIRST: Final = ("policy", "opponent")


def write_data(folder: Path, seed: int) -> None:
    """Write both files."""
    rng = random.Random(f"nim-{seed}")
    train = [
        {"stones": rng.randint(2, LARGEST), "first": rng.choice(FIRST), "rival_takes": 0} for _ in range(NUM_TRAIN)
    ]
    test = [
        {"stones": stones, "first": FIRST[stones % (MOST + 1) == 0], "rival_takes": takes}
        for stones in range(2, LARGEST + 1)
        for takes in range(1, MOST + 1)
    ]
    write_lines(folder / "nim_train.jsonl", train)
    write_lines(folder / "nim_test.jsonl", test)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    write_data(DATA, parser.parse_args().seed)


if __name__ == "__main__":
    main()
