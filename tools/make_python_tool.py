"""Make the data of `workflows/python_tool.py`: questions in numbers that a line of Python answers and no head does.

    python -m tools.make_python_tool

Each kind of question has its wordings, a way to draw its numbers, and the program that answers it, run here to know the
answer. Which split a question belongs to is a function of its program alone, so none is in two.

Invariant: the same seed writes the same bytes.
"""

import argparse
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.make_search import DATA, write_lines
from tools.word_problems import Split, split_of

NUM_ROWS: Final = {Split.TRAIN: 2048, Split.TEST: 256}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of question: ``{a}`` and ``{b}`` are drawn."""

    wordings: tuple[str, ...]
    expression: str
    """What the program prints."""
    usual: str
    """What a pupil has it print who has not thought enough."""
    a: tuple[int, int]
    b: tuple[int, int]
    solve: Callable[[int, int], int]


KINDS: Final = (
    Kind(
        ("Add up the digits of {a}.", "What do the digits of {a} come to?"),
        "sum(map(int, str({a})))",
        "len(str({a}))",
        (10_000, 999_999),
        (0, 0),
        lambda a, _: sum(map(int, str(a))),
    ),
    Kind(
        ("Add up all numbers from {a} to {b}.", "What do all numbers from {a} to {b} come to?"),
        "sum(range({a}, {b}+1))",
        "sum(range({a}, {b}))",
        (10, 99),
        (100, 999),
        lambda a, b: sum(range(a, b + 1)),
    ),
    Kind(
        ("What is left of {a} divided by {b}?", "Divide {a} by {b}: what is left?"),
        "{a} % {b}",
        "{a} / {b}",
        (1_000, 9_999),
        (11, 99),
        lambda a, b: a % b,
    ),
    Kind(
        ("How many numbers from 1 to {a} can be divided by {b}?", "How many times does {b} fit into {a}?"),
        "{a} // {b}",
        "{a} % {b}",
        (1_000, 9_999),
        (3, 29),
        lambda a, b: a // b,
    ),
    Kind(
        ("What is {a} to the power of {b}?", "Raise {a} to the power of {b}."),
        "{a} ** {b}",
        "{a} * {b}",
        (11, 99),
        (2, 3),
        lambda a, b: int(a**b),
    ),
)


@dataclass(frozen=True, slots=True)
class Question:
    """A question."""

    text: str
    expression: str
    usual: str
    answer: int

    @property
    def program(self) -> str:
        return f"print({self.expression})"

    @property
    def split(self) -> Split:
        """Say which split it belongs to: a quarter each for train and test, the rest for sft."""
        return split_of(self.program)


def questions(split: Split, rng: random.Random) -> Iterator[Question]:
    """Draw questions of one split without end, one kind after the other; a program may come back."""
    for kind in itertools.cycle(KINDS):
        while True:
            a, b = rng.randint(*kind.a), rng.randint(*kind.b)
            text = rng.choice(kind.wordings).format(a=a, b=b)
            expression, usual = kind.expression.format(a=a, b=b), kind.usual.format(a=a, b=b)
            drawn = Question(text, expression, usual, kind.solve(a, b))
            if drawn.split is split:
                break
        yield drawn


def write_data(folder: Path, seed: int) -> None:
    """Write the questions of two splits."""
    for split, count in NUM_ROWS.items():
        drawn = itertools.islice(questions(split, random.Random(f"python-tool-{split}-{seed}")), count)
        rows = [{"question": one.text, "answer": f"#### {one.answer}"} for one in drawn]
        write_lines(folder / f"python_tool_{split}.jsonl", rows)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    write_data(DATA, parser.parse_args().seed)


if __name__ == "__main__":
    main()
