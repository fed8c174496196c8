"""Score a program by what it does: run against tests in the sandbox, where no expected answer ever is.

A test is a row of the data set, in one of two styles:

    {"stdin": "1 2\n", "stdout": "3\n"}
    {"function": "add", "arguments": [1, 2], "returns": 3}

Each test is a process of its own. What comes back is data, and it is compared here: an exit status, a printed "passed"
or an object that equals everything proves nothing. A program that fails its tests is a zero; that it could not be run
at all, for want of a sandbox, is an error of the run.
"""

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

from areal_async.sandbox import End, Limits, shared_sandbox
from rewards.fenced import last_block

LIMITS: Final = Limits(wall_s=5.0, cpu_s=5)
_LANGUAGES: Final = ("python", "py", "python3", "")
_RELATIVE_TOLERANCE: Final = 1e-9
_HARNESS: Final = """


import json as _json, sys as _sys
_question = _json.loads(_sys.stdin.readline())
_answer = globals()[_question["function"]](*_question["arguments"])
_sys.stdout.write("\\n" + _question["mark"] + _json.dumps(_answer) + "\\n")
"""


async def passes_all(text: str, tests: Sequence[Mapping[str, Any]], *, limits: Limits = LIMITS) -> float:
    """Return 1.0 when the program in `text` passes every test, else 0.0; the first failure ends the trial.

    Raises:
        ValueError: there is no test, or one is in neither style.
        UserError: programs cannot be isolated on this machine.
    """
    source = program_in(text)
    for test in _checked(tests):
        if not await _passes(source, test, limits):
            return 0.0
    return 1.0


async def share_passed(text: str, tests: Sequence[Mapping[str, Any]], *, limits: Limits = LIMITS) -> float:
    """Return the share of tests that the program in `text` passes, 0.0 to 1.0.

    Raises:
        ValueError: there is no test, or one is in neither style.
        UserError: programs cannot be isolated on this machine.
    """
    source = program_in(text)
    passed = [await _passes(source, test, limits) for test in _checked(tests)]
    return sum(passed) / len(passed)


def program_in(text: str) -> str:
    """Return the last fenced block of Python in an answer; the whole answer when it has no block."""
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
    return tests


async def _passes(source: str, test: Mapping[str, Any], limits: Limits) -> bool:
    sandbox = await shared_sandbox()
    if "stdout" in test:
        execution = await sandbox.run(source, stdin=str(test["stdin"]).encode(), limits=limits)
        is_whole = execution.end is End.ENDED and execution.status == 0 and not execution.is_cut
        return is_whole and _lines(execution.stdout.decode(errors="replace")) == _lines(str(test["stdout"]))
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
    return _equal(returned, json.loads(json.dumps(test["returns"])))


def _lines(text: str) -> list[str]:
    """Split, as judges of programs do: blanks at the ends of lines and of the text do not count."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _equal(said: Any, expected: Any) -> bool:
    """Compare plain data; numbers within rounding, and never a truth value with a number."""
    if isinstance(said, bool) or isinstance(expected, bool):
        return said is expected
    if isinstance(said, int | float) and isinstance(expected, int | float):
        return said == expected or _is_close(said, expected)
    if isinstance(said, list) and isinstance(expected, list):
        return len(said) == len(expected) and all(map(_equal, said, expected))
    if isinstance(said, dict) and isinstance(expected, dict):
        return said.keys() == expected.keys() and all(_equal(said[key], expected[key]) for key in expected)
    return type(said) is type(expected) and bool(said == expected)


def _is_close(said: float, expected: float) -> bool:
    try:
        return math.isclose(said, expected, rel_tol=_RELATIVE_TOLERANCE)
    except OverflowError:  # a whole number beyond any float is close to none
        return False
