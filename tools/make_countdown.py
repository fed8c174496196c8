"""Make the data of `workflows/countdown.py`: games of numbers, every one of which can be won.

    python -m tools.make_countdown

A game is drawn by winning it first: two or three numbers are joined by operations at random, and what they come to is
the target. Which split a game belongs to is a function of its numbers and target alone, so none is in both. The wording
is short and the numbers are small: the tiny model of `tools/make_tiny_gsm8k.py`, which knows sums but not this game,
then wins one game in five by chance, enough to learn the rest from.

Invariant: the same seed writes the same bytes.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Final, NamedTuple

DATA: Final = Path(__file__).resolve().parents[1] / "configs" / "data"
NUM_ROWS: Final = {"train": 384, "test": 96}
QUESTION: Final = "There are {numbers}. How do they make {target}?"
LARGE, SMALL = (6, 30), (2, 9)
"""Of the first number, and of the others."""
LARGEST_TARGET: Final = 99
THREE_NUMBERS_SHARE: Final = 0.2
"""Most games are small: a model that never wins learns nothing."""


class Game(NamedTuple):
    """The numbers, each to be used at most once, and what to reach."""

    numbers: tuple[int, ...]
    target: int

    @property
    def question(self) -> str:
        """Ask for it in words."""
        return QUESTION.format(numbers=" and ".join(map(str, self.numbers)), target=self.target)

    @property
    def split(self) -> str:
        """Say which split this game belongs to: a fifth for the test."""
        bucket = hashlib.sha256(f"{sorted(self.numbers)}:{self.target}".encode()).digest()[0] % 5
        return "test" if bucket == 0 else "train"


def draw_game(rng: random.Random) -> Game:
    """Draw a game by winning it; the target is whole, not large and none of the numbers."""
    while True:
        count = 3 if rng.random() < THREE_NUMBERS_SHARE else 2
        numbers = (rng.randint(*LARGE), *(rng.randint(*SMALL) for _ in range(count - 1)))
        value = Fraction(numbers[0])
        for number in numbers[1:]:
            match rng.choice("+-*/"):
                case "+":
                    value += number
                case "-":
                    value -= number
                case "*":
                    value *= number
                case _:
                    value /= number
        if value.denominator == 1 and 0 < value <= LARGEST_TARGET and value not in numbers:
            return Game(numbers, int(value))


def draw_games(split: str, seed: int) -> Iterator[Game]:
    """Draw different games of one split, as many as it has rows."""
    rng = random.Random(f"countdown-{split}-{seed}")
    seen: set[Game] = set()
    while len(seen) < NUM_ROWS[split]:
        game = draw_game(rng)
        if game.split == split and game not in seen:
            seen.add(game)
            yield game


def write_data(folder: Path, seed: int) -> None:
    """Write both files."""
    for split in NUM_ROWS:
        lines = [json.dumps({"question": game.question, **game._asdict()}) + "\n" for game in draw_games(split, seed)]
        (folder / f"countdown_{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    write_data(DATA, parser.parse_args().seed)


if __name__ == "__main__":
    main()
