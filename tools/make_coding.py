"""Make the data of `workflows/coding.py`: small programming tasks in words, each with tests worked out here.

    python -m tools.make_coding

A kind of task has its wording, a way to draw an input and a reference that gives the output. Half of the rows ask for a
function, half for a program that reads its input and prints; `{k}` in a wording is a number drawn for each row.

Invariant: the same seed writes the same bytes.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

DATA: Final = Path(__file__).resolve().parents[1] / "configs" / "data"
NUM_ROWS: Final = {"train": 160, "test": 40}
NUM_TESTS: Final = 5
WORDS: Final = (
    "apple",
    "level",
    "tiger",
    "noon",
    "garden",
    "radar",
    "moon",
    "silver",
    "civic",
    "river",
    "Anna",
    "queue",
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of task about a list of numbers, a number, or a word."""

    name: str
    wording: str
    draw: Callable[[random.Random], Any]
    solve: Callable[[Any, int], Any]


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randint(-20, 40) for _ in range(rng.randint(1, 8))]


def _number(rng: random.Random) -> int:
    return rng.randint(0, 200)


def _word(rng: random.Random) -> str:
    return rng.choice(WORDS)


def _without_repeats(values: list[int], _: int) -> list[int]:
    return list(dict.fromkeys(values))


def _multiples(values: list[int], k: int) -> list[int]:
    return [value for value in values if value % k == 0]


def _scaled_sum(value: int, k: int) -> int:
    return k * sum(range(value + 1))


def _digit_sum(value: int, _: int) -> int:
    return sum(map(int, str(value)))


def _vowels(word: str, _: int) -> int:
    return sum(letter in "aeiou" for letter in word.lower())


def _nth_letter(word: str, k: int) -> str:
    return word[k - 1] if k <= len(word) else "none"


KINDS: Final = (
    Kind("total_plus", "the sum of the numbers, plus {k}", _numbers, lambda values, k: sum(values) + k),
    Kind("count_above", "how many of the numbers are greater than {k}", _numbers, lambda v, k: sum(x > k for x in v)),
    Kind("scaled", "every number multiplied by {k}, in the same order", _numbers, lambda v, k: [x * k for x in v]),
    Kind("multiples", "the numbers that {k} divides, in the same order", _numbers, _multiples),
    Kind("largest_less", "the largest of the numbers, minus {k}", _numbers, lambda v, k: max(v) - k),
    Kind("sorted_down", "the numbers from the largest to the smallest", _numbers, lambda v, k: sorted(v, reverse=True)),
    Kind("distinct", "the numbers without repeats, in the order they first come", _numbers, _without_repeats),
    Kind("remainder", "the remainder of the number divided by {k}", _number, lambda n, k: n % k),
    Kind("scaled_sum", "the sum of all whole numbers from 0 to the number, times {k}", _number, _scaled_sum),
    Kind("digits", "the sum of the number's decimal digits", _number, _digit_sum),
    Kind("binary", "the number in base 2, as a text of the digits 0 and 1", _number, lambda n, k: f"{n:b}"),
    Kind("repeated", "the word, {k} times without blanks between", _word, lambda word, k: word * k),
    Kind("reversed_word", "the word backwards", _word, lambda word, k: word[::-1]),
    Kind("vowels", "how many of the word's letters are one of a, e, i, o, u, in either case", _word, _vowels),
    Kind("nth_letter", "the word's letter number {k} from 1, or the text none where it has fewer", _word, _nth_letter),
)
GIVEN: Final[dict[Callable[[random.Random], Any], str]] = {
    _numbers: "a list of whole numbers",
    _number: "a whole number",
    _word: "a word",
}
READ: Final[dict[Callable[[random.Random], Any], str]] = {
    _numbers: "whole numbers from one line, with blanks between",
    _number: "a whole number",
    _word: "a word",
}


def draw_row(rng: random.Random) -> dict[str, str]:
    """Draw one task with its tests."""
    kind, k = rng.choice(KINDS), rng.randint(2, 12)
    inputs = [kind.draw(rng) for _ in range(NUM_TESTS)]
    wanted = kind.wording.format(k=k)
    tests: list[dict[str, Any]]
    if rng.random() < 0.5:
        task = f"Write a function {kind.name} that is given {GIVEN[kind.draw]} and returns {wanted}."
        tests = [{"function": kind.name, "arguments": [one], "returns": kind.solve(one, k)} for one in inputs]
    else:
        several = ", each on its own line" if isinstance(kind.solve(inputs[0], k), list) else ""
        task = f"Write a program that reads {READ[kind.draw]}, and prints {wanted}{several}."
        tests = [{"stdin": f"{_shown(one, ' ')}\n", "stdout": f"{_shown(kind.solve(one, k))}\n"} for one in inputs]
    return {"task": task, "tests": json.dumps(tests)}


def draw_rows(seed: int) -> Iterator[dict[str, str]]:
    """Draw rows of different tasks, without end."""
    rng = random.Random(f"coding-{seed}")
    seen: set[str] = set()
    while True:
        row = draw_row(rng)
        if row["task"] not in seen:
            seen.add(row["task"])
            yield row


def write_data(folder: Path, seed: int) -> None:
    """Write both files; no task is in both."""
    rows = draw_rows(seed)
    for split, num_rows in NUM_ROWS.items():
        lines = [json.dumps(next(rows)) + "\n" for _ in range(num_rows)]
        (folder / f"coding_{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def _shown(value: Any, between: str = "\n") -> str:
    return between.join(map(str, value)) if isinstance(value, list) else str(value)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    write_data(DATA, parser.parse_args().seed)


if __name__ == "__main__":
    main()
