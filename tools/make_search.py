"""Make the data of `workflows/search.py`: a corpus of things that do not exist, and questions about them.

    python -m tools.make_search

A thing has a name of two syllables, a kind and two facts in numbers; its document tells both. Things share syllables,
kinds and phrases, so a search has to name the right one. A question asks for one fact; which split it belongs to is a
function of the thing and the fact alone, so none is in two.

Invariant: the same seed writes the same bytes.
"""

import argparse
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tools.word_problems import Split, split_of

DATA: Final = Path(__file__).resolve().parents[1] / "configs" / "data"
NUM_THINGS: Final = 120
"""Number of things of each kind."""
FIRST: Final = ("Bel", "Dor", "Fen", "Gal", "Hol", "Kel", "Lor", "Mar", "Nor", "Pel", "Ros", "Sel", "Tor", "Ul", "Val")
SECOND: Final = ("brin", "da", "field", "gate", "holm", "lin", "mond", "ness", "rick", "stead", "vale", "wick")


@dataclass(frozen=True, slots=True)
class Fact:
    """A number that is known of every thing of a kind."""

    lowest: int
    highest: int
    questions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """Things of one kind."""

    name: str
    text: str
    facts: tuple[Fact, ...]


KINDS: Final = (
    Kind(
        "Bridge",
        "built in {0}, {1} metres long.",
        (
            Fact(1600, 1990, ("When was the {name} built?", "In which year was the {name} built?")),
            Fact(20, 980, ("How long is the {name}?", "How many metres long is the {name}?")),
        ),
    ),
    Kind(
        "Tower",
        "built in {0}, {1} metres high.",
        (
            Fact(1400, 1990, ("When was the {name} built?", "In which year was the {name} built?")),
            Fact(15, 320, ("How high is the {name}?", "How many metres high is the {name}?")),
        ),
    ),
    Kind(
        "Lake",
        "found in {0}, {1} metres deep.",
        (
            Fact(1500, 1890, ("When was the {name} found?", "In which year was the {name} found?")),
            Fact(10, 640, ("How deep is the {name}?", "How many metres deep is the {name}?")),
        ),
    ),
    Kind(
        "Ferry",
        "built in {0}, for {1} people.",
        (
            Fact(1850, 1990, ("When was the {name} built?", "In which year was the {name} built?")),
            Fact(30, 990, ("How many people does the {name} take?", "For how many people is the {name}?")),
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Thing:
    """A document."""

    name: str
    kind: Kind
    values: tuple[int, ...]
    """A value for each of the kind's facts."""

    @property
    def document(self) -> dict[str, str]:
        return {"title": self.name, "text": self.kind.text.format(*self.values)}

    def split(self, fact: int) -> Split:
        """Say which split a fact belongs to: a quarter each for train and test, the rest for sft."""
        return split_of(f"{self.name}:{fact}")


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of one thing."""

    text: str
    thing: Thing
    fact: int
    """Index of the fact among the thing's."""

    @property
    def answer(self) -> int:
        return self.thing.values[self.fact]


def draw_things(seed: int) -> list[Thing]:
    """Draw the whole corpus."""
    rng = random.Random(f"search-{seed}")
    names = ["".join(pair) for pair in itertools.product(FIRST, SECOND)]
    things = [
        Thing(f"{name} {kind.name}", kind, tuple(rng.randint(fact.lowest, fact.highest) for fact in kind.facts))
        for kind in KINDS
        for name in rng.sample(names, NUM_THINGS)
    ]
    rng.shuffle(things)
    return things


def questions(things: list[Thing], split: Split) -> Iterator[Question]:
    """Return a question for every fact of a split in every wording."""
    for thing in things:
        for number, fact in enumerate(thing.kind.facts):
            if thing.split(number) is split:
                for question in fact.questions:
                    yield Question(question.format(name=thing.name), thing, number)


def write_data(folder: Path, seed: int) -> None:
    """Write the corpus and the questions of two splits."""
    things = draw_things(seed)
    write_lines(folder / "search_corpus.jsonl", [thing.document for thing in things])
    for split in (Split.TRAIN, Split.TEST):
        rows = [{"question": one.text, "answer": f"#### {one.answer}"} for one in questions(things, split)]
        random.Random(f"order-{seed}").shuffle(rows)
        write_lines(folder / f"search_{split}.jsonl", rows)


def write_lines(path: Path, rows: list[Any]) -> None:
    """Write one object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    write_data(DATA, parser.parse_args().seed)


if __name__ == "__main__":
    main()
