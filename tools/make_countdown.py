"""Make the data of `workflows/countdown.py`: games of numbers, every one of which can be won.

    python -m tools.make_countdown

A game is drawn by winning it first: two or three numbers are joined by operations at random, and what they come to is
the target. Which split a game belongs to is a function of its numbers and target alone, so none is in two. The wording
is short and the numbers are small, for the tiny model of `tools/make_tiny_tools.py`.

Invariant: the same seed writes the same bytes.
"""

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Final

from tools.make_search import DATA, write_lines
from tools.word_problems import Split, split_of

NUM_ROWS: Final = {Split.TRAIN: 160, Split.TEST: 128}
QUESTION: Final = "There are {numbers}. How do they make {target}?"
LARGE, SMALL = (6, 99), (2, 12)
"""Ranges of the first number, and of the others."""
LARGEST_TARGET: Final = 199
THREE_NUMBERS_SHARE: Final = 0.1
"""Most games are small: a model that never wins learns nothing."""


@dataclass(frozen=True, slots=True)
class Game:
    """The numbers, each to be used at most once, and how they were joined."""

    numbers: tuple[int, ...]
    operations: str

    @property
    def value(self) -> Fraction:
        """What they come to, joined from the left."""
        value = Fraction(self.numbers[0])
        for operation, number in zip(self.operations, self.numbers[1:], strict=True):
            match operation:
                case "+":
                    value += number
                case "-":
                    value -= number
                case "*":
                    value *= number
                case _:
                    value /= number
        return value

    @property
    def expression(self) -> str:
        """Write the joining out, as the last line of an answer."""
        text = str(self.numbers[0])
        for place, (operation, number) in enumerate(zip(self.operations, self.numbers[1:], strict=True)):
            text = f"({text}){operation}{number}" if place else f"{text}{operation}{number}"
        return text

    @property
    def question(self) -> str:
        """Ask for it in words."""
        return QUESTION.format(numbers=" and ".join(map(str, self.numbers)), target=self.value)

    @property
    def split(self) -> Split:
        return split_of(f"{sorted(self.numbers)}:{self.value}")


def draw_game(rng: random.Random) -> Game:
    """Draw a game by winning it, each way as often; the target is whole, not large and none of the numbers."""
    count = 2 if rng.random() < THREE_NUMBERS_SHARE else 1
    operations = "".join(rng.choice("+-*/") for _ in range(count))
    while True:
        game = Game((rng.randint(*LARGE), *(rng.randint(*SMALL) for _ in operations)), operations)
        if game.value.denominator == 1 and 0 < game.value <= LARGEST_TARGET and game.value not in game.numbers:
            return game


def games(split: Split, seed: int) -> Iterator[Game]:
    """Draw games of one split without end; a game may come back."""
    rng = random.Random(f"countdown-{split}-{seed}")
    while True:
        game = draw_game(rng)
        if game.split is split:
            yield game


def write_data(folder: Path, seed: int) -> None:
    """Write both files, of different games."""
    for split, num_rows in NUM_ROWS.items():
        rows: dict[str, dict[str, object]] = {}
        for game in games(split, seed):
            rows[game.question] = {"question": game.question, "numbers": game.numbers, "target": int(game.value)}
            if len(rows) == num_rows:
                break
        write_lines(folder / f"countdown_{split}.jsonl", list(rows.values()))


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    write_data(DATA, parser.parse_args().seed)


if __name__ == "__main__":
    main()
