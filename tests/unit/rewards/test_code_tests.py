"""A program is scored by what it computes, whatever it says about itself."""

import math
import time
from typing import Any

import pytest

from areal_async.sandbox import SandboxLimits
from rewards.code_tests import passes_all, program_in, share_passed

pytestmark = pytest.mark.anyio

ADD = [{"function": "add", "arguments": [a, b], "returns": a + b} for a, b in ((1, 2), (3, 4), (-1, 1))]
SUM: list[dict[str, Any]] = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "5 6\n", "stdout": "11"}]
HONEST = "def add(a, b):\n    return a + b\n"


@pytest.fixture(scope="module")
def anyio_backend() -> object:
    return "asyncio", {"use_uvloop": True}


async def test_a_right_function_passes_and_a_wrong_one_does_not() -> None:
    assert await passes_all(HONEST, ADD) == 1.0
    assert await passes_all("def add(a, b):\n    return a - b\n", ADD) == 0.0


async def test_a_right_program_passes_and_a_wrong_one_does_not() -> None:
    assert await passes_all("print(sum(map(int, input().split())))", SUM) == 1.0
    assert await passes_all("print(3)", SUM) == 0.0


@pytest.mark.parametrize("end", ["1 / 0", "while True: pass", "print('x' * 100_000)"])
async def test_a_program_that_is_right_and_does_not_come_to_its_end_does_not_pass(end: str) -> None:
    tests = [{"stdin": "", "stdout": "3\n" + "x" * 65_534 if "x" in end else "3"}]
    assert await passes_all(f"print(3, flush=True)\n{end}", tests, limits=SandboxLimits(wall_s=1.0)) == 0.0


async def test_the_share_counts_each_test() -> None:
    assert await share_passed("print(3)", SUM) == 0.5
    assert await share_passed("def add(a, b):\n    return 3 if a == 1 else 7", ADD) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "program",
    [
        "print('PASSED')\nraise SystemExit(0)",
        "import os\nos._exit(0)",
        "class Odd:\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return Odd()",
        "class Odd(int):\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return Odd(99)",
        "class Odd(list):\n    def __eq__(self, other):\n        return True\ndef add(a, b):\n    return Odd()",
        "import json\njson.dumps = lambda value: '3'\ndef add(a, b):\n    return None",
        "import json\njson.loads = lambda text: {'function': 'add', 'arguments': [], 'mark': ''}\ndef add(): return 3",
        "import sys\ndef add(a, b):\n    return sys._getframe(1).f_globals.get('returns')",
        "def add(a, b):\n    raise SystemExit(0)",
        "def add(a, b):\n    return True",
        "def add(a, b):\n    while True: pass",
        "def add(a, b):\n    return float('nan')",
        "def add(a, b):\n    return [a + b]",
        "def add(a, b):\n    return str(a + b)",
        "def add(a, b):\n    return 10 ** 400",
        "def add(a, b):\n    return 10 ** 10_000",
        "def add(a, b):\n    return 1e400",
        "def add(a, b):\n    return {a: {b: [None] * 3}}",
        "def add(a, b):\n    deep = []\n    for _ in range(900): deep = [deep]\n    return deep",
        "add = None",
        "",
        "\0",
        "\ud800",
    ],
    ids=str,
)
async def test_no_program_passes_without_the_answer(program: str) -> None:
    limits = SandboxLimits(wall_s=1.0, cpu_s=1)
    assert await passes_all(program, ADD, limits=limits) == 0.0


@pytest.mark.parametrize(
    ("returns", "expected", "passes"),
    [
        ("(1, 2)", [1, 2], True),
        ("[1, 2, 3]", [1, 2], False),
        ("0.1 + 0.2", 0.3, True),
        ("2.0", 2, True),
        ("1", True, False),
        ("{'a': [1.0]}", {"a": [1]}, True),
        ("{'a': 1, 'b': 2}", {"a": 1}, False),
        ("None", None, True),
        ("'3'", 3, False),
        ("10**30", 10**30, True),
        ("10**400", 3.5, False),
        ("10**400", 10**400, True),
        ("1000000005", 1000000006, False),
        ("[10**18 + 1]", [10**18], False),
        ("1000000005.0", 1000000006, False),
        ("2.0000000001", 2, False),
        ("3", 3.0000000001, True),
        ("1e-12", 0.0, False),
    ],
)
async def test_what_is_returned_is_compared_as_data(returns: str, expected: Any, *, passes: bool) -> None:
    tests = [{"function": "f", "arguments": [], "returns": expected}]
    assert await passes_all(f"def f():\n    return {returns}", tests) == float(passes)


@pytest.mark.parametrize(
    ("returns", "expected", "tolerance", "passes"),
    [
        ("3.14", 3.1415926, 1e-2, True),
        ("3.14", 3.1415926, 1e-4, False),
        ("1e-7", 0.0, 1e-6, True),
        ("0.1 + 0.2", 0.3, 0, False),
        ("1000.5", 1000.0, 1e-3, True),
        ("[1000000005, 0.5]", [1000000006, 0.5], 1e-2, False),
        ("1.99999999", 2, 1e-6, True),
        ("float('inf')", 1.0, 1e300, False),
        ("float('nan')", 1.0, 1e300, False),
        ("10**400", 3.5, 0.1, False),
        ("{'a': [0.33]}", {"a": [1 / 3]}, 0.01, True),
    ],
)
async def test_fractions_differ_by_no_more_than_the_tests_tolerance(
    returns: str, expected: Any, tolerance: float, *, passes: bool
) -> None:
    tests = [{"function": "f", "arguments": [], "returns": expected, "tolerance": tolerance}]
    assert await passes_all(f"def f():\n    return {returns}", tests) == float(passes)


@pytest.mark.parametrize(
    ("prints", "expected", "tolerance", "passes"),
    [
        ("0.3333333", "0.33333\n", 1e-4, True),
        ("0.3333333", "0.33333\n", None, False),
        ("0.3", "0.33333\n", 1e-4, False),
        ("1000000005", "1000000006", 1e-2, False),
        ("1000000005 0.5", "1000000006 0.5", 1e-2, False),
        ("case 1: .5e0\\n2", "case 1: 0.50\n2", 1e-9, True),
        ("1", "1.0", 1e-9, True),
        ("1.0", "1", 1e-9, False),
        ("0.5 0.5", "0.5", 1e-9, False),
        ("nan", "1.0", 1e9, False),
        ("inf", "1.0", 1e9, False),
        ("1_0.0", "10.0", 1e-9, False),
        ("1e999", "1.0", 1e9, False),
        ("x", "1.0", 1e9, False),
        ("0.5\\x0c0.5", "0.5 0.5", 1e-9, False),
        ("0.5 \\t 0.5\\r", "0.5 0.5", 1e-9, True),
        ("1e", "1.0", 1e9, False),
        ("1.5.", "1.5", 1e9, False),
        ("5.", "5.0", 1e-9, True),
        ("+5e-1", "0.5", 1e-9, True),
        (".", "0.5", 1e9, False),
    ],
)
async def test_fractions_that_are_printed_differ_only_where_a_test_says_so(
    prints: str, expected: str, tolerance: float | None, *, passes: bool
) -> None:
    test = {"stdin": "", "stdout": expected} | ({} if tolerance is None else {"tolerance": tolerance})
    assert await passes_all(f"print('{prints}')", [test]) == float(passes)


@pytest.mark.parametrize(
    "word", ["'1' * 60_000 + 'ex'", "'1' * 30_000 + '.' + '1' * 30_000 + 'x'", "'.' * 60_000", "'1' * 60_000"]
)
async def test_comparing_a_long_word_takes_no_time(word: str) -> None:
    test: dict[str, Any] = {"stdin": "", "stdout": "1.5", "tolerance": 1e-3}
    started = time.process_time()
    assert await passes_all(f"print({word})", [test]) == 0.0
    assert time.process_time() - started < 5.0, "it would be a minute, and the node would stand still"


@pytest.mark.parametrize("separator", ["\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029", "\r"])
async def test_only_a_newline_ends_a_line(separator: str) -> None:
    program = f"import sys\nsys.stdout.buffer.write({f'a{separator}b'!r}.encode())"
    assert await passes_all(program, [{"stdin": "", "stdout": f"a{separator}b\n"}]) == 1.0
    assert await passes_all(program, [{"stdin": "", "stdout": "a\nb\n"}]) == 0.0
    assert await passes_all(f"print('a' + {separator!r})", [{"stdin": "", "stdout": "a"}]) == float(separator == "\r")


async def test_lines_that_end_as_on_windows_pass() -> None:
    assert await passes_all("print('a\\r\\nb')", [{"stdin": "", "stdout": "a\nb\r\n\r\n"}]) == 1.0


async def test_bytes_that_are_no_text_equal_none() -> None:
    program = "import sys\nsys.stdout.buffer.write(b'\\xff')"
    assert await passes_all(program, [{"stdin": "", "stdout": "\ufffd"}]) == 0.0


async def test_what_a_function_prints_beside_its_result_does_not_count() -> None:
    assert await passes_all("def add(a, b):\n    print('thinking', end='')\n    return a + b", ADD) == 1.0


async def test_output_that_differs_in_blanks_at_the_ends_passes() -> None:
    assert await passes_all("print('3  ')\nprint()", [{"stdin": "", "stdout": "3"}]) == 1.0


async def test_the_last_block_of_python_is_the_program() -> None:
    text = f"First I tried\n```python\nwrong\n```\nbut\n```py\n{HONEST}```\nwhich prints\n```text\n3\n```\n"
    assert program_in(text) == HONEST
    assert program_in(HONEST) == HONEST


@pytest.mark.parametrize(
    ("tests", "needs"),
    [
        ([], "need at least one"),
        ([{"stdin": ""}], "need stdin and stdout, or"),
        *(([SUM[0] | {"tolerance": one}], "need a number of 0 or more") for one in (-1, math.inf, math.nan, "1", True)),
    ],
)
async def test_tests_that_prove_nothing_are_refused(tests: list[dict[str, Any]], needs: str) -> None:
    with pytest.raises(ValueError, match=needs):
        await passes_all(HONEST, tests)
    with pytest.raises(ValueError, match=needs):
        await share_passed(HONEST, tests)
