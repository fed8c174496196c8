"""Make the data of `workflows/coding.py`: small programming tasks in words, each with tests worked out here.

    python -m tools.make_coding

A kind of task has its wording, a way to draw an input, a reference that gives the output, and two expressions for a
program: the right one, and the mistake that a pupil makes (`tools/tool_lessons.py` teaches with both). Half of the rows
ask for a function, half for a program that reads its input and prints; `{k}` in a wording is a number. Which split a
task belongs to is a function of its words alone, so none is in two.

Invariant: the same seed writes the same bytes.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tools.make_search import DATA, write_lines
from tools.word_problems import Split, split_of

NUM_TESTS: Final = 3
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
    """A kind of task about a list of numbers, a number, or a word."""

    name: str
    wording: str
    draw: Callable[[random.Random], Any]
    solve: Callable[[Any, int], Any]
    right: str
    """What a program writes of its input ``v``."""
    usual: str
    """What a pupil writes who has not thought enough."""
    ks: range = range(1)
    """The numbers that the wording may name."""


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randint(-20, 40) for _ in range(rng.randint(2, 8))]


def _repeating(rng: random.Random) -> list[int]:
    return [rng.randint(1, 6) for _ in range(rng.randint(5, 8))]


def _number(rng: random.Random) -> int:
    return rng.randint(1, 200)


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


MANY: Final = range(2, 60)
KINDS: Final = (
    Kind(
        "total_plus",
        "the sum of the numbers, plus {k}",
        _numbers,
        lambda values, k: sum(values) + k,
        "sum(v) + {k}",
        "sum(v)",
        MANY,
    ),
    Kind(
        "count_above",
        "how many of the numbers are greater than {k}",
        _numbers,
        lambda values, k: sum(x > k for x in values),
        "sum(x > {k} for x in v)",
        "sum(x < {k} for x in v)",
        range(30),
    ),
    Kind(
        "scaled",
        "every number multiplied by {k}, in the same order",
        _numbers,
        lambda values, k: [x * k for x in values],
        "[x * {k} for x in v]",
        "v * {k}",
        MANY,
    ),
    Kind(
        "multiples",
        "the numbers that {k} divides, in the same order",
        _numbers,
        _multiples,
        "[x for x in v if x % {k} == 0]",
        "[x for x in v if x % {k}]",
        range(2, 10),
    ),
    Kind(
        "largest_less",
        "the largest of the numbers, minus {k}",
        _numbers,
        lambda values, k: max(values) - k,
        "max(v) - {k}",
        "min(v) - {k}",
        MANY,
    ),
    Kind(
        "sorted_down",
        "the numbers from the largest to the smallest",
        _numbers,
        lambda values, _: sorted(values, reverse=True),
        "sorted(v)[::-1]",
        "sorted(v)",
    ),
    Kind(
        "distinct",
        "the numbers without repeats, in the order they first come",
        _repeating,
        _without_repeats,
        "list(dict.fromkeys(v))",
        "list(v)",
    ),
    Kind(
        "remainder",
        "the remainder of the number divided by {k}",
        _number,
        lambda n, k: n % k,
        "v % {k}",
        "v // {k}",
        MANY,
    ),
    Kind(
        "scaled_sum",
        "the sum of all whole numbers from 0 to the number, times {k}",
        _number,
        _scaled_sum,
        "sum(range(v + 1)) * {k}",
        "sum(range(v)) * {k}",
        MANY,
    ),
    Kind(
        "digits",
        "the sum of the number's decimal digits",
        _number,
        _digit_sum,
        "sum(map(int, str(v)))",
        "len(str(v))",
    ),
    Kind(
        "binary",
        "the number in base 2, as a text of the digits 0 and 1",
        _number,
        lambda n, _: f"{n:b}",
        "bin(v)[2:]",
        "bin(v)",
    ),
    Kind(
        "repeated",
        "the word, {k} times without blanks between",
        _word,
        lambda word, k: word * k,
        "v * {k}",
        '(v + " ") * {k}',
        range(2, 10),
    ),
    Kind("reversed_word", "the word backwards", _word, lambda word, _: word[::-1], "v[::-1]", "v[::2]"),
    Kind(
        "vowels",
        "how many of the word's letters are one of a, e, i, o, u, in either case",
        _word,
        _vowels,
        'sum(x in "aeiou" for x in v.lower())',
        "len(v)",
    ),
    Kind(
        "nth_letter",
        "the word's letter number {k} from 1, or the text none where it has fewer",
        _word,
        _nth_letter,
        'v[{k} - 1:{k}] or "none"',
        'v[{k}:{k} + 1] or "none"',
        range(2, 6),
    ),
)
GIVEN: Final[dict[Callable[[random.Random], Any], str]] = {
    _numbers: "a list of whole numbers",
    _repeating: "a list of whole numbers",
    _number: "a whole number",
    _word: "a word",
}
READ: Final[dict[Callable[[random.Random], Any], tuple[str, str]]] = {
    _numbers: ("whole numbers from one line, with blanks between", "list(map(int, input().split()))"),
    _repeating: ("whole numbers from one line, with blanks between", "list(map(int, input().split()))"),
    _number: ("a whole number", "int(input())"),
    _word: ("a word", "input()"),
}
"""The filter in words and in Python."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task: a kind, its number, and whether a function is asked for or a program."""

    kind: Kind
    k: int
    is_function: bool

    @property
    def gives_list(self) -> bool:
        return isinstance(self.kind.solve(self.kind.draw(random.Random(0)), self.k), list)

    @property
    def text(self) -> str:
        """Ask for it in words."""
        kind, wanted = self.kind, self.kind.wording.format(k=self.k)
        if self.is_function:
            return f"Write a function {kind.name} that is given {GIVEN[kind.draw]} and returns {wanted}."
        several = ", each on its own line" if self.gives_list else ""
        return f"Write a program that reads {READ[kind.draw][0]}, and prints {wanted}{several}."

    @property
    def split(self) -> Split:
        return split_of(self.text)

    def program(self, expression: str) -> str:
        """Write the program around one of the kind's expressions."""
        value = expression.format(k=self.k)
        if self.is_function:
            return f"def {self.kind.name}(v):\n    return {value}"
        several = f'*{value}, sep="\\n"' if self.gives_list else value
        return f"v = {READ[self.kind.draw][1]}\nprint({several})"

    def row(self, rng: random.Random) -> dict[str, str]:
        """Draw the tests."""
        inputs = [self.kind.draw(rng) for _ in range(NUM_TESTS)]
        outputs = [self.kind.solve(one, self.k) for one in inputs]
        tests: list[dict[str, Any]] = [
            {"function": self.kind.name, "arguments": [one], "returns": output}
            if self.is_function
            else {"stdin": f"{_shown(one, ' ')}\n", "stdout": f"{_shown(output)}\n"}
            for one, output in zip(inputs, outputs, strict=True)
        ]
        return {"task": self.text, "tests": json.dumps(tests)}


def tasks(split: Split) -> Iterator[Task]:
    """Return every task of one split."""
    for kind in KINDS:
        for k in kind.ks:
            for is_function in (True, False):
                task = Task(kind, k, is_function)
                if task.split is split:
                    yield task


def write_data(folder: Path, seed: int) -> None:
    """Write both files."""
    for split in (Split.TRAIN, Split.TEST):
        rng = random.Random(f"coding-{split}-{seed}")
        rows = [task.row(rng) for task in tasks(split)]
        rng.shuffle(rows)
        write_lines(folder / f"coding_{split}.jsonl", rows)


def _shown(value: Any, between: str = "\n") -> str:
    return between.join(map(str, value)) if isinstance(value, list) else str(value)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    write_data(DATA, parser.parse_args().seed)


if __name__ == "__main__":
    main()
