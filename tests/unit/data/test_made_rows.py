"""Rows that Python returns, or that are seeds, are rows like any other; what is none of both is one sentence."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_async import user_files
from areal_async.cli.starting.checks import check_dataset
from areal_async.config.settings import DatasetSettings
from areal_async.config.sources import load_settings
from areal_async.data import made_rows
from areal_async.data.rows import check_columns, load_rows
from areal_async.errors import UserError

FILE = """
from table_beside import ROWS

def rows():
    yield {"question": "1+1?", "board": [[1, 2], [3]]}
    yield {"question": "2+2?", "board": [], "level": 3}

def listed(): return ROWS
def empty(): return []
def helped(): return helper()
def helper(): return None
def leaving(): raise SystemExit(3)
def text(): return "rows"
def words(): return ["a"]
def numbered(): return [{1: 2}]
def mixed(): return [{"a": 1}, {"a": "x"}]
def raising(): return [{}[1]]
def endless():
    while True: yield {"a": 1}
def needs(count): return []
async def later(): return []
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(user_files, "_own_folders", [])
    monkeypatch.setattr(made_rows, "MAX_ROWS", 1000)
    (tmp_path / "table_beside.py").write_text("ROWS = ({'a': 1}, {'a': 2})\n")
    (tmp_path / "made.py").write_text(FILE)
    yield tmp_path / "made.py"
    sys.modules.pop("table_beside", None)


def test_a_function_gives_rows_with_the_columns_of_all(file: Path) -> None:
    rows = load_rows(DatasetSettings(python=str(file)))

    assert [rows[0], rows[1]] == [
        {"question": "1+1?", "board": [[1, 2], [3]], "level": None},
        {"question": "2+2?", "board": [], "level": 3},
    ]
    assert list(load_rows(DatasetSettings(python=f"{file}:listed")).select([1])) == [{"a": 2}]
    with pytest.raises(UserError, match=r"made.py has columns .*, need 'answer'"):
        check_columns(rows, ("answer",), DatasetSettings(python=str(file)))


def test_seeds_are_rows_by_their_numbers() -> None:
    rows = load_rows(DatasetSettings(seeds=(1000, 1003)))

    assert list(rows) == [{"seed": 1000}, {"seed": 1001}, {"seed": 1002}]


def test_what_is_no_rows_is_one_sentence(file: Path) -> None:
    for name, says in {
        "helped": "returned None, need a list of rows like",
        "leaving": "SystemExit: 3",
        "empty": "has no rows, need at least one; return some",
        "text": "returned a str, need a list of rows like",
        "words": "row 0 is a str 'a', need a dict of named values",
        "numbered": "row 0 is a dict {1: 2}, need a dict of named values",
        "mixed": "its rows fit no table (",
        "raising": "KeyError: 1",
        "endless": "returned more than 1000 rows, need at most so many; does it ever end?",
        "needs": "TypeError: needs() missing 1 required positional argument",
        "later": "got no plain function later in ",
        "nothing": "got no plain function nothing in ",
    }.items():
        with pytest.raises(UserError) as caught:
            load_rows(DatasetSettings(python=f"{file}:{name}"))
        assert str(caught.value).startswith(f"dataset: {file}:{name}")
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_function_that_is_not_there_is_told_without_importing_its_file(file: Path) -> None:
    file.write_text("raise RuntimeError\ndef rows(): return []\n")

    check_dataset(DatasetSettings(python=str(file)), "eval.dataset")
    with pytest.raises(UserError, match=r"^eval.dataset.python: no function other in .*made.py; write def other\(\)"):
        check_dataset(DatasetSettings(python=f"{file}:other"), "eval.dataset")
    with pytest.raises(UserError, match=r"^eval.dataset.python: no file no.py; name a Python file"):
        check_dataset(DatasetSettings(python="no.py"), "eval.dataset")


def test_a_function_that_returns_none_is_told_without_importing_its_file(file: Path) -> None:
    def check(code: str) -> None:
        file.write_text(f"raise RuntimeError\n{code}\n")
        check_dataset(DatasetSettings(python=str(file)), "eval.dataset")

    for nothing in (
        "def rows(): ...",
        "def rows(): return",
        "def rows():\n if limit: return None",
        "def rows():\n def inner(): return []\n inner()",
    ):
        with pytest.raises(
            UserError, match=r"^eval.dataset.python: rows\(\) in .*made.py returns None, need rows like"
        ):
            check(nothing)
    for perhaps in (
        "def rows(): raise NotImplementedError",
        "def rows():\n for n in range(9):\n  if n: yield {'a': n}",
        "def rows():\n with open('a') as file: return list(file)",
        "@cached\ndef rows(): ...",
        "def rows(): ...\nfrom elsewhere import rows",
    ):
        check(perhaps)


def test_rows_come_from_one_place() -> None:
    for words, says in (
        ("{split: test}", "tasks.0.dataset: got nothing, need one of path, python, seeds and environment"),
        (
            "{path: a/b, seeds: [0, 9]}",
            "got path and seeds, need one of path, python, seeds and environment; set the others to null",
        ),
        ("{python: a.py, split: test}", "got name or split with python, need none"),
        ("{seeds: [5, 5]}", "seeds: got [5, 5], need the first and one after the last, which is larger"),
        ("{seeds: [0]}", "tasks.0.dataset.seeds.1: got nothing, need a value"),
    ):
        with pytest.raises(UserError) as caught:
            load_settings(None, [f"--tasks=[{{dataset: {words}}}]"])
        assert says in str(caught.value)
    seeds = load_settings(None, ["--tasks.0.dataset.seeds", "[0, 9]"])
    assert seeds.tasks[0].dataset.source == "seeds (0, 9)"
