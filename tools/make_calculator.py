"""Make the data of `workflows/calculator.py` and `workflows/openai_agent.py`: sums of three digits, in words.

    python -m tools.make_calculator

Invariant: the same seed writes the same bytes, and no split holds a sum of another.
"""

import argparse
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.make_search import DATA, write_lines
from tools.word_problems import Split, split_of

NUM_ROWS: Final = {Split.TRAIN: 4096, Split.TEST: 512}
PHRASINGS: Final = {
    "+": ("What is {a} plus {b}?", "Add {b} to {a}.", "How much are {a} and {b} together?"),
    "-": ("What is {a} minus {b}?", "Take {b} from {a}.", "How much is left of {a} without {b}?"),
    "*": ("What is {a} times {b}?", "Multiply {a} by {b}.", "How much are {a} boxes of {b}?"),
}


@dataclass(frozen=True, slots=True)
class Sum:
    """A question."""

    question: str
    a: int
    operation: str
    b: int

    @property
    def expression(self) -> str:
        return f"{self.a}{self.operation}{self.b}"

    @property
    def answer(self) -> int:
        return {"+": self.a + self.b, "-": self.a - self.b, "*": self.a * self.b}[self.operation]

    @property
    def split(self) -> Split:
        """Say which split this sum belongs to: a quarter each for train and test, the rest for sft."""
        return split_of(self.expression)


def sums(split: Split, rng: random.Random) -> Iterator[Sum]:
    """Draw distinct sums of one split without end, one operation after the other."""
    seen: set[str] = set()
    for operation in itertools.cycle(PHRASINGS):
        while True:
            a, b = rng.randint(100, 999), rng.randint(100, 999)
            if operation == "-":
                a, b = max(a, b), min(a, b)
            phrasing = rng.choice(PHRASINGS[operation])
            drawn = Sum(phrasing.format(a=a, b=b), a, operation, b)
            if drawn.split is split and drawn.expression not in seen:
                break
        seen.add(drawn.expression)
        yield drawn


def rows(split: Split, seed: int) -> list[dict[str, str]]:
    """Write out one split."""
    drawn = itertools.islice(sums(split, random.Random(f"calculator-{split}-{seed}")), NUM_ROWS[split])
    written = [{"question": one.question, "answer": f"#### {one.answer}"} for one in drawn]
    random.Random(f"order-{seed}").shuffle(written)
    return written


def write_data(folder: Path, seed: int) -> None:
    """Write both files."""
    for split in NUM_ROWS:
        write_lines(folder / f"calculator_{split}.jsonl", rows(split, seed))


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    write_data(DATA, parser.parse_args().seed)


if __name__ == "__main__":
    main()
