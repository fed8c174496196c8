"""Score a program by what it does: run against tests in the sandbox, where no expected answer ever is.

A test is a row of the data set, in one of two styles:

    {"stdin": "1 2\n", "stdout": "3\n"}
    {"function": "add", "arguments": [1, 2], "returns": 3}

Whole numbers and texts have to be the same. Fractions may differ by rounding, and in a test with a ``tolerance`` by so
much, absolutely or relative to what is expected, as judges of programs put it: ``{..., "tolerance": 1e-6}``. Then the
fractions that a program prints may differ too. Lines end with a newline and with nothing else.

Each test is a process of its own. What comes back is data, and it is compared here: an exit status, a printed "passed"
or an object that equals everything proves nothing. A program that fails its tests is a zero; that it could not be run
at all, for want of a sandbox, is an error of the run.
"""

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

from areal_async.sandbox import End, SandboxLimits, shared_sandbox
from rewards.fenced import last_block
from rewards.thought import after_thought

LIMITS: Final = SandboxLimits(wall_s=5.0, cpu_s=5)
_LANGUAGES: Final = ("python", "py", "python3", "")
_ROUNDING: Final = 1e-9
"""Relative; of a fraction that is computed otherwise than the expected one was."""
_FRACTION: Final = re.compile(
    r"[+-]?(?=[0-9.]*+[eE]|[0-9]*+\.)(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?"
)
"""No two repetitions share characters, and none gives any back: the time taken grows no faster than the word."""
_NUMBER: Final = re.compile(rf"{_FRACTION.pattern}|[+-]?[0-9]++")
_BLANKS: Final = re.compile(r"[ \t\r]+")
_HARNESS: Final = """


import json as _json, sys as _sys
_question = _json.loads(_sys.stdin.readline())
_answer = globals()[_question["function"]](*_question["arguments"])
_sys.stdout.write("\\n" + _question["mark"] + _json.dumps(_answer) + "\\n")
"""


async def passes_all(text: str, tests: Sequence[Mapping[str, Any]], *, limits: SandboxLimits = LIMITS) -> float:
    """Return 1.0 when the program in `text` passes every test, else 0.0; the first failure ends the trial.

    Raises:
        ValueError: there is no test, one is in neither style, or its tolerance is none.
        UserError: programs cannot be isolated on this machine.
    """
    source = program_in(text)
    for test in _checked(tests):
        if not await _passes(source, test, limits):
            return 0.0
    return 1.0


async def share_passed(text: str, tests: Sequence[Mapping[str, Any]], *, limits: SandboxLimits = LIMITS) -> float:
    """Return the share of tests that the program in `text` passes, 0.0 to 1.0.

    Raises:
        ValueError: there is no test, one is in neither style, or its tolerance is none.
        UserError: programs cannot be isolated on this machine.
    """
    source = program_in(text)
    passed = [await _passes(source, test, limits) for test in _checked(tests)]
    return sum(passed) / len(passed)


def program_in(text: str) -> str:
    """Return the last fenced block of Python in an answer; the whole answer when it has no block."""
    text = after_thought(text)
    block = last_block(text, _LANGUAGES)
    return text if block is None else block


def _checked(tests: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if not tests:
        raise ValueError("tests: got none, need at least one: without a test every program would pass")
    for test in tests:
        if not ({"stdin", "stdout"} <= test.keys() or {"function", "arguments", "returns"} <= test.keys()):
            raise ValueError(
                f"tests: got one with {sorted(test)}, need stdin and stdout, or function, arguments and returns"
            )
        tolerance = test.get("tolerance", 0.0)
        if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < math.inf:
            raise ValueError(
                f"tests: got the tolerance {tolerance!r}, need a number of 0 or more; leave it out for none"
            )
    return tests


async def _passes(source: str, test: Mapping[str, Any], limits: SandboxLimits) -> bool:
    sandbox = await shared_sandbox()
    if "stdout" in test:
        execution = await sandbox.run(source, stdin=str(test["stdin"]).encode(), limits=limits)
        is_whole = execution.end is End.ENDED and execution.status == 0 and not execution.is_cut
        said = execution.stdout.decode(errors="surrogateescape")  # bytes that are no text equal none
        return is_whole and _same_lines(said, str(test["stdout"]), test.get("tolerance"))
    mark = secrets.token_hex(16)
    question = {"mark": mark, "function": test["function"], "arguments": test["arguments"]}
    execution = await sandbox.run(source + _HARNESS, stdin=json.dumps(question).encode(), limits=limits)
    _, _, said = execution.stdout.decode(errors="replace").rpartition(f"\n{mark}")
    if not said or execution.end is not End.ENDED:
        return False
    try:
        returned = json.loads(said.partition("\n")[0])
    except (ValueError, RecursionError):
        return False
    return _equal(returned, json.loads(json.dumps(test["returns"])), test.get("tolerance"))


def _same_lines(said: str, expected: str, tolerance: float | None) -> bool:
    """Compare line by line; with a tolerance, word by word."""
    pairs = list(zip_longest(_lines(said), _lines(expected)))
    return all(one == other or _same_words(one, other, tolerance) for one, other in pairs)


def _same_words(said: str | None, expected: str | None, tolerance: float | None) -> bool:
    if said is None or expected is None or tolerance is None:
        return False
    words, expected_words = ([word for word in _BLANKS.split(line) if word] for line in (said, expected))
    return len(words) == len(expected_words) and all(
        one == other
        or (
            _FRACTION.fullmatch(other) is not None
            and _NUMBER.fullmatch(one) is not None
            and _is_close(float(one), float(other), tolerance)
        )
        for one, other in zip(words, expected_words, strict=True)
    )


def _lines(text: str) -> list[str]:
    """Split, as judges of programs do: blanks at the ends of lines and empty lines at the end do not count."""
    lines = [line.rstrip(" \t\r") for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _equal(said: Any, expected: Any, tolerance: float | None) -> bool:
    """Compare plain data: whole numbers exactly, fractions by the tolerance, and never a truth value with a number."""
    if isinstance(said, bool) or isinstance(expected, bool):
        return said is expected
    if isinstance(said, int | float) and isinstance(expected, int | float):
        is_whole = isinstance(expected, int) and (tolerance is None or isinstance(said, int))
        return said == expected or (not is_whole and _is_close(said, expected, tolerance))
    if isinstance(said, list) and isinstance(expected, list):
        return len(said) == len(expected) and all(
            _equal(one, other, tolerance) for one, other in zip(said, expected, strict=True)
        )
    if isinstance(said, dict) and isinstance(expected, dict):
        return said.keys() == expected.keys() and all(_equal(said[key], expected[key], tolerance) for key in expected)
    return type(said) is type(expected) and bool(said == expected)


def _is_close(said: float, expected: float, tolerance: float | None) -> bool:
    try:
        if tolerance is None:
            return math.isclose(said, expected, rel_tol=_ROUNDING)
        return math.isfinite(said) and abs(said - expected) <= tolerance * max(1.0, abs(expected))
    except OverflowError:  # a whole number beyond any float is close to none
        return False
