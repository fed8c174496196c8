r"""Agreement with labels and cost per pair of the mathematical rewards, beside plain math-verify in the same run.

    python -m tools.bench_rewards                    # the tests' table, 400 solutions in each format, 8 shipped ones
    python -m tools.bench_rewards --solutions 2000 --wrong

The solutions are made here: word problems with `#### n` (tools/word_problems.py) and worked LaTeX with a box, each held
against its own label and against a label that is none of its. The shipped ones are math-verify's own worked examples.
Both judges run in this process: ours without the worker that it has in a run, math-verify with its time limit (5 s).
"""

import argparse
import logging
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from rewards.final_answer import expected_answer
from rewards.math_algebra import load
from rewards.math_answer import latex_equivalent, numbers_match
from tests.unit.rewards.corpus import pairs
from tools.word_problems import FAMILIES, Mistake, Split, mistaken_solution, problems, right_solution


@dataclass(frozen=True)
class Case:
    """A text, the answer that it is held against, and whether it is right."""

    text: str
    expected: str
    is_right: bool


def corpus() -> Iterator[Case]:
    """Yield the pairs of the table in the tests."""
    for pair in pairs():
        yield Case(pair.text, pair.expected, pair.is_right)


def word_solutions(number: int, rng: random.Random) -> Iterator[Case]:
    """Yield solutions that end in `#### n`, right and mistaken, held against the right one."""
    for _, problem in zip(range(number // 2), problems(FAMILIES, Split.TEST, rng), strict=False):
        reference = right_solution(problem)
        yield Case(str(reference), str(reference), is_right=True)
        mistaken = mistaken_solution(problem, Mistake.SLIP, rng)
        yield Case(str(mistaken), str(reference), is_right=mistaken.answer == reference.answer)


def latex_solutions(number: int, rng: random.Random) -> Iterator[Case]:
    """Yield worked LaTeX with a box, the answer spelled in another way than its label, and beside it a wrong one."""
    for index in range(number // 2):
        label, same, other = FORMS[index % len(FORMS)](rng)
        reference = f"We work it out step by step.\nTherefore the answer is $\\boxed{{{label}}}$."
        yield Case(f"First $a = {rng.randint(2, 9)}$.\nSo we get \\[\\boxed{{{same}}}.\\]", reference, is_right=True)
        yield Case(f"First $a = {rng.randint(2, 9)}$.\nSo we get \\[\\boxed{{{other}}}.\\]", reference, is_right=False)


def shipped_solutions() -> Iterator[Case]:
    """Yield the worked examples that math-verify ships, each held against its own answer and the next one's."""
    from math_verify.few_shots import GSM8K_FEW_SHOTS, MATH_HARD_FEW_SHOTS

    solutions = [shot["answer"] for shot in (*GSM8K_FEW_SHOTS, *MATH_HARD_FEW_SHOTS)]
    labels = [solution.rpartition("The final answer is ")[2].partition(". I hope")[0] for solution in solutions]
    for index, solution in enumerate(solutions):
        yield Case(solution, labels[index], is_right=True)
        yield Case(solution, labels[index - 1], is_right=False)


def _fraction(rng: random.Random) -> tuple[str, str, str]:
    value = Fraction(rng.randint(1, 40), rng.choice((3, 7, 9, 11)))
    over, under = value.numerator, value.denominator
    return (
        rf"-\frac{{{over}}}{{{under}}}",
        rng.choice([f"-{over}/{under}", rf"\dfrac{{-{over}}}{{{under}}}"]),
        f"{over}/{under}",
    )


def _surd(rng: random.Random) -> tuple[str, str, str]:
    factor, root = rng.randint(2, 9), rng.choice((2, 3, 5, 7))
    return rf"{factor}\sqrt{{{root}}}", rf"\sqrt{{{factor**2 * root}}}", rf"{factor + 1}\sqrt{{{root}}}"


def _polynomial(rng: random.Random) -> tuple[str, str, str]:
    one, other = rng.randint(1, 9), rng.randint(10, 19)
    label = f"x^2 + {one + other}x + {one * other}"
    return label, f"(x+{one})(x+{other})", f"(x-{one})(x-{other})"


def _interval(rng: random.Random) -> tuple[str, str, str]:
    low, high = rng.randint(-9, 0), rng.randint(1, 9)
    return f"[{low},{high})", rf"{low} \le x < {high}", rf"\left[{low}, {high}\right]"


def _solutions(rng: random.Random) -> tuple[str, str, str]:
    one, other = rng.sample(range(1, 30), 2)
    return f"{one}, -{other}", rf"x = -{other} \text{{ or }} x = {one}", f"{one}, {other}"


def _matrix(rng: random.Random) -> tuple[str, str, str]:
    a, b, c, d = rng.sample(range(1, 30), 4)
    form = r"\begin{{{0}}} {1} & {2} \\ {3} & {4} \end{{{0}}}"
    return form.format("pmatrix", a, b, c, d), form.format("bmatrix", a, b, c, d), form.format("pmatrix", a, c, b, d)


def _line(rng: random.Random) -> tuple[str, str, str]:
    slope, shift = rng.randint(2, 9), rng.randint(1, 9)
    return f"y = {slope}x + {shift}", f"{slope}x - y + {shift} = 0", f"y = {slope}x - {shift}"


def _number(rng: random.Random) -> tuple[str, str, str]:
    value = rng.randint(1000, 999_999)
    return str(value), rng.choice([f"{value:,}", rf"{value}\text{{ cm}}", f"x = {value}"]), str(value + 1)


FORMS = (_fraction, _surd, _polynomial, _interval, _solutions, _matrix, _line, _number)


def ours(case: Case) -> bool:
    """Score as a workflow's reward does."""
    verdict = numbers_match(case.text, case.expected)
    return latex_equivalent.__wrapped__(case.text, case.expected) == 1.0 if verdict is None else verdict  # type: ignore[attr-defined]


def math_verifys(case: Case) -> bool:
    """Score as math-verify's documentation says, the expected answer between dollar signs, as it asks for."""
    from math_verify import parse, verify

    return bool(verify(parse(f"${expected_answer(case.expected)}$"), parse(case.text)))


def measure(cases: list[Case], judge: Callable[[Case], bool]) -> tuple[str, list[Case]]:
    """Return a row of the table, and the cases on which judge and label differ."""
    differing, spent = [], []
    for case in cases:
        started = time.process_time()
        if judge(case) is not case.is_right:
            differing.append(case)
        spent.append(1000 * (time.process_time() - started))
    spent.sort()
    right = [case for case in cases if case.is_right]
    missed, paid = (sum(case.is_right is is_right for case in differing) for is_right in (True, False))
    return (
        f"{len(right) - missed:5}/{len(right):<5} {paid:5}/{len(cases) - len(right):<5}"
        f" {spent[len(spent) // 2]:9.3f} {spent[int(0.99 * len(spent))]:8.1f} {spent[-1]:8.1f}"
    ), differing


def main() -> None:
    """Print a row for each source and judge, and with `--wrong` every case on which ours differs from its label."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--solutions", type=int, default=400, metavar="N", help="solutions of each format (400)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wrong", action="store_true", help="list the cases on which ours differs from its label")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    load()
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sources = {
        "table of the tests": list(corpus()),
        "word problems, ####": list(word_solutions(options.solutions, rng)),
        "worked LaTeX, boxed": list(latex_solutions(options.solutions, rng)),
        "shipped examples": list(shipped_solutions()),
    }
    write = sys.stdout.write
    write(f"{'':22}{'':13} right scored  wrong scored median ms   p99 ms   max ms\n")
    for source, cases in sources.items():
        for judge in (ours, math_verifys):
            row, differing = measure(cases, judge)
            write(f"{source:22}{judge.__name__:13}{row}\n")
            if options.wrong and judge is ours:
                write("".join(f"    {case}\n" for case in differing))


if __name__ == "__main__":
    main()
