"""Word problems in the manner of GSM8K, small enough for a model of a million parameters.

A problem comes from a *family*: a few phrasings with gaps for a name, a thing and two to four numbers, and a plan of
one to three sums that answers it. `right_solution` works the plan out; `mistaken_solution` does what a pupil does who
takes the wrong operation, stops before the last step, or slips in a sum.

Invariant: which split a problem belongs to is a function of its family and its numbers alone, so no split ever sees
the numbers of another one in the same kind of problem, whatever the seed and however many are drawn.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

LARGEST_NUMBER: Final = 99
"""No number in a problem or its solution is larger: two digits at most."""


class Split(StrEnum):
    """What a problem is for."""

    TRAIN = "train"
    TEST = "test"
    SFT = "sft"


def split_of(key: str) -> Split:
    """Say which split something belongs to, by what makes it what it is: a quarter each for train and test."""
    bucket = hashlib.sha256(key.encode()).digest()[0] % 4
    return (Split.TRAIN, Split.TEST, Split.SFT, Split.SFT)[bucket]


class Mistake(StrEnum):
    """What a pupil did wrong."""

    USUAL = "usual"
    """The mistake that this family invites: a wrong operation, or the last step forgotten."""
    SLIP = "slip"
    """A wrong answer, by one in the last sum."""


@dataclass(frozen=True, slots=True)
class Step:
    """A sum of a plan; an operand is a number's letter, or `$1` for the result of the first step."""

    left: str
    operation: str
    right: str


@dataclass(frozen=True, slots=True)
class Sum:
    """A step with its numbers filled in and its result."""

    left: int
    operation: str
    right: int
    result: int

    def __str__(self) -> str:
        return f"{self.left}{self.operation}{self.right}={self.result}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A kind of problem."""

    name: str
    phrasings: tuple[str, ...]
    ranges: dict[str, tuple[int, int]]
    """Smallest and largest value of each drawn number."""
    plan: tuple[Step, ...]
    product: str = ""
    """Letter of a number that is the product of `a` and `b`, for what must divide evenly."""
    usual_operation: tuple[int, str] | None
    """The usual mistake as (step, operation taken instead); None: the last step is forgotten."""
    mistake_share: float
    """Share of the demonstrations that make the usual mistake; over one half, the likeliest solution is wrong."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with the numbers that were drawn for it."""

    family: Family
    numbers: dict[str, int]
    question: str

    @property
    def split(self) -> Split:
        """Say which split these numbers belong to: a quarter each for train and test, the rest for sft."""
        return split_of(f"{self.family.name}:{sorted(self.numbers.items())}")


@dataclass(frozen=True, slots=True)
class Solution:
    """The sums of one attempt; the last one's result is the answer."""

    sums: tuple[Sum, ...]

    @property
    def answer(self) -> int:
        return self.sums[-1].result

    def __str__(self) -> str:
        return "\n".join([*map(str, self.sums), f"#### {self.answer}"])


def right_solution(problem: Problem) -> Solution:
    """Work the problem out."""
    return Solution(_work_out(problem.family.plan, problem.numbers))


def mistaken_solution(problem: Problem, mistake: Mistake, rng: random.Random) -> Solution:
    """Solve the problem as a pupil does who makes this mistake."""
    if mistake is Mistake.SLIP:
        *before, last = _work_out(problem.family.plan, problem.numbers)
        off_by = rng.choice([-1, 1])
        return Solution((*before, replace(last, result=last.result + off_by)))
    if problem.family.usual_operation is None:
        return Solution(_work_out(problem.family.plan, problem.numbers)[:-1])
    index, operation = problem.family.usual_operation
    plan = list(problem.family.plan)
    plan[index] = replace(plan[index], operation=operation)
    return Solution(_work_out(tuple(plan), problem.numbers))


def demonstration(problem: Problem, rng: random.Random, *, slip_share: float) -> tuple[Solution, Mistake | None]:
    """Solve the problem as the text of a mixed class would: rightly, or with the mistakes of its family."""
    dice = rng.random()
    if dice < problem.family.mistake_share:
        return mistaken_solution(problem, Mistake.USUAL, rng), Mistake.USUAL
    if dice < problem.family.mistake_share + slip_share:
        return mistaken_solution(problem, Mistake.SLIP, rng), Mistake.SLIP
    return right_solution(problem), None


def problems(families: tuple[Family, ...], split: Split, rng: random.Random) -> Iterator[Problem]:
    """Draw distinct problems of one split, family after family in turn, without end."""
    seen: set[str] = set()
    while True:
        for family in families:
            problem = _draw(family, rng)
            while problem.split is not split or problem.question in seen:
                problem = _draw(family, rng)
            seen.add(problem.question)
            yield problem


def _draw(family: Family, rng: random.Random) -> Problem:
    """Draw numbers until the right way and the usual mistake both work out, to different answers."""
    while True:
        numbers = {letter: rng.randint(*bounds) for letter, bounds in family.ranges.items()}
        if family.product:
            numbers[family.product] = numbers["a"] * numbers["b"]
        name, other = rng.sample(NAMES, 2)
        text = rng.choice(family.phrasings).format(name=name, other=other, thing=rng.choice(THINGS), **numbers)
        problem = Problem(family, numbers, text)
        try:
            right = right_solution(problem)
            usual = mistaken_solution(problem, Mistake.USUAL, rng)
        except ValueError:
            continue
        if right.answer != usual.answer:
            return problem


def _work_out(plan: tuple[Step, ...], numbers: dict[str, int]) -> tuple[Sum, ...]:
    """Fill the numbers in and compute.

    Raises:
        ValueError: a result would be negative, no whole number or too large.
    """
    known = dict(numbers)
    sums: list[Sum] = []
    for index, step in enumerate(plan, start=1):
        left, right = known[step.left], known[step.right]
        result = _compute(left, step.operation, right)
        sums.append(Sum(left, step.operation, right, result))
        known[f"${index}"] = result
    return tuple(sums)


def _compute(left: int, operation: str, right: int) -> int:
    match operation:
        case "+":
            result = left + right
        case "-":
            result = left - right
        case "*":
            result = left * right
        case "/" if right != 0 and left % right == 0:
            result = left // right
        case _:
            raise ValueError(f"sum: got {left}{operation}{right}, need one that comes out whole")
    if not 0 < result <= LARGEST_NUMBER:
        raise ValueError(f"sum: got {left}{operation}{right}={result}, need 1 to {LARGEST_NUMBER}")
    return result


NAMES: Final = ["Tom", "Ann", "Ben", "Eva", "Max", "Mia", "Sam", "Zoe", "Leo", "Ida", "Joe", "Amy"]
THINGS: Final = ["apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps", "cakes", "nuts"]

OFTEN_RIGHT: Final = 0.25
OFTEN_WRONG: Final = 0.65

FAMILIES: Final = (
    Family(
        name="gain",
        phrasings=(
            "{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have now?",
            "{name} had {a} {thing}. {other} gave {name} {b} {thing}. How many are there now?",
            "There are {a} {thing} in a bag. {name} adds {b}. How many {thing} are in the bag?",
        ),
        ranges={"a": (6, 30), "b": (2, 9)},
        plan=(Step("a", "+", "b"),),
        usual_operation=(0, "-"),
        mistake_share=OFTEN_RIGHT,
    ),
    Family(
        name="loss",
        phrasings=(
            "{name} has {a} {thing} and gives {b} to {other}. How many {thing} are left?",
            "{name} had {a} {thing} but lost {b}. How many {thing} does {name} have left?",
            "Of {a} {thing} in a bag {name} takes {b}. How many stay in the bag?",
        ),
        ranges={"a": (6, 30), "b": (2, 9)},
        plan=(Step("a", "-", "b"),),
        usual_operation=(0, "+"),
        mistake_share=OFTEN_RIGHT,
    ),
    Family(
        name="boxes",
        phrasings=(
            "{name} has {a} boxes with {b} {thing} in each. How many {thing} is that?",
            "{name} packs {b} {thing} into each of {a} boxes. How many {thing} are packed?",
            "Each of {a} boxes holds {b} {thing}. How many {thing} does {name} have?",
        ),
        ranges={"a": (2, 9), "b": (2, 9)},
        plan=(Step("a", "*", "b"),),
        usual_operation=(0, "+"),
        mistake_share=OFTEN_WRONG,
    ),
    Family(
        name="sharing",
        phrasings=(
            "{a} friends share {t} {thing} fairly. How many {thing} does each get?",
            "{name} puts {t} {thing} evenly on {a} plates. How many {thing} are on each plate?",
            "{t} {thing} are split fairly among {a} children. How many does each child get?",
        ),
        ranges={"a": (2, 9), "b": (2, 9)},
        product="t",
        plan=(Step("t", "/", "a"),),
        usual_operation=(0, "-"),
        mistake_share=OFTEN_WRONG,
    ),
    Family(
        name="boxes_and_some",
        phrasings=(
            "{name} has {a} boxes of {b} {thing} and {c} loose {thing}. How many {thing} in all?",
            "{name} buys {a} bags of {b} {thing}, then finds {c} more. How many {thing} in all?",
        ),
        ranges={"a": (2, 9), "b": (2, 9), "c": (2, 9)},
        plan=(Step("a", "*", "b"), Step("$1", "+", "c")),
        usual_operation=None,
        mistake_share=OFTEN_RIGHT,
    ),
    Family(
        name="together",
        phrasings=(
            "{name} has {a} {thing}. {other} has {b} more than {name}. How many do they have together?",
            "{name} found {a} {thing} and {other} found {b} more than {name}. How many did both find?",
        ),
        ranges={"a": (3, 20), "b": (2, 9)},
        plan=(Step("a", "+", "b"), Step("$1", "+", "a")),
        usual_operation=None,
        mistake_share=OFTEN_WRONG,
    ),
    Family(
        name="change",
        phrasings=(
            "{name} buys {a} pens for {b} dollars each and pays with {c} dollars. How much comes back?",
            "{name} has {c} dollars and buys {a} toys for {b} dollars each. How much is left?",
        ),
        ranges={"a": (2, 6), "b": (2, 9), "c": (20, 60)},
        plan=(Step("a", "*", "b"), Step("c", "-", "$1")),
        usual_operation=None,
        mistake_share=OFTEN_RIGHT,
    ),
    Family(
        name="gain_and_loss",
        phrasings=(
            "{name} has {a} {thing}, buys {b} more and gives {c} to {other}. How many are left?",
            "{name} had {a} {thing}, found {b} and then lost {c}. How many {thing} are left?",
        ),
        ranges={"a": (6, 20), "b": (2, 9), "c": (2, 9)},
        plan=(Step("a", "+", "b"), Step("$1", "-", "c")),
        usual_operation=(1, "+"),
        mistake_share=OFTEN_WRONG,
    ),
    Family(
        name="share_and_find",
        phrasings=(
            "{name} and friends share {t} {thing}, {a} people in all. {name} then finds {c}. How many has {name}?",
            "{t} {thing} go evenly into {a} bags. {name} adds {c} to one bag. How many are in that bag?",
        ),
        ranges={"a": (2, 9), "b": (2, 9), "c": (2, 9)},
        product="t",
        plan=(Step("t", "/", "a"), Step("$1", "+", "c")),
        usual_operation=None,
        mistake_share=OFTEN_WRONG,
    ),
    Family(
        name="two_days",
        phrasings=(
            "{name} gets {a} {thing} a day for {b} days and {c} from {other}, then loses {d}. How many are left?",
            "{name} picks {a} {thing} on each of {b} days, {other} brings {c}, {d} are eaten. How many are left?",
        ),
        ranges={"a": (2, 9), "b": (2, 5), "c": (2, 9), "d": (2, 9)},
        plan=(Step("a", "*", "b"), Step("$1", "+", "c"), Step("$2", "-", "d")),
        usual_operation=None,
        mistake_share=OFTEN_RIGHT,
    ),
)
