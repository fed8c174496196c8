"""Each block of commands or code in the documents is carried out by a test, or says above it why not.

Carried out or not, the verbs, options, settings, files and make targets that they name are there.
"""

import ast
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
import yaml

from areal_async.cli.main import VERBS, split_overrides
from areal_async.config.settings import Settings
from areal_async.config.tree import annotation_at
from areal_async.errors import UserError
from tests.documents import (
    COMMANDS,
    NO_RUN,
    NOT_RUN,
    ROOT,
    RUN_BY,
    Block,
    blocks_of,
    chapter,
    commands,
    document_files,
    text_of,
)

LANGUAGES = {*COMMANDS, "yaml", "", "{toctree}"}
READERS_FILES = (
    "FILE.py",
    "FILE.yaml",
    "workflow.py",
    "workflows/mine.py",
    "workflows/mine_tool.py",
    "workflows/last_word.py",
)
"""Files that the reader writes."""
ALL = [block for file in document_files() for block in blocks_of(file)]
MAX_LINES = {("README.md", "A first workflow"): 40, ("workflows/README.md", "Your first workflow"): 120}
"""A page is enough for the tutorial, half of one for README.md."""
MAX_README_LINES = 160


def words_of(block: Block) -> Iterator[list[str]]:
    """Yield the words of each command of a block, without what is piped or kept of it."""
    for command, _ in commands(block.body):
        words = shlex.split(command, comments=True)
        if words[:1] == ["sbatch"]:
            words = shlex.split(words[-1].removeprefix("exec "))
        yield [word for word in words if word not in (">", "accounts.json")]


def complaint(block: Block) -> str | None:
    """Return what is wrong with what stands above a block that is carried out by no test of the documents."""
    if block.mark.startswith(RUN_BY):
        test = block.mark.removeprefix(RUN_BY)
        return None if test.startswith("tests/") and (ROOT / test).is_file() else f"there is no {test}"
    kind = block.mark.removeprefix(NO_RUN).partition(";")[0]
    return None if block.mark.startswith(NO_RUN) and kind in NOT_RUN else f"no kind of reason: {block.mark}"


def test_each_block_of_commands_is_run_or_says_above_it_which_test_runs_it_or_why_none_does() -> None:
    left_out = [one for one in ALL if one.language in COMMANDS and not one.is_carried_out]

    assert [(one.file, one.heading, said) for one in left_out if (said := complaint(one))] == []
    assert left_out


def test_a_reason_that_is_none_is_found() -> None:
    said = "not run: I would rather not", "not run", "run by tests/e2e/test_dreams.py", "run by README.md"

    assert all(complaint(Block("README.md", "Install", mark, "console", "$ true\n")) for mark in said)


def test_each_reason_stands_right_above_a_block_of_commands() -> None:
    for file in document_files():
        marks = re.findall(r"^<!-- ((?:not run|run by|numbers differ)[^\n]*) -->$", text_of(file), re.MULTILINE)

        assert marks == [one.mark for one in blocks_of(file) if one.mark and one.language in COMMANDS], file


def test_each_block_is_in_a_language_that_is_looked_after() -> None:
    assert {one.language.split()[0] if one.language else "" for one in ALL} <= LANGUAGES | {"{reference}"}


def test_each_command_is_of_verbs_options_settings_files_and_targets_that_are_there() -> None:
    num_checked = 0
    for block in ALL:
        for words in words_of(block) if block.language == "console" else ():
            match words:
                case ["python", "-m", "areal_async", verb, *rest] | ["areal-async", verb, *rest]:
                    check_verb(verb, rest)
                case ["make", target]:
                    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
                case ["python", "-m", module, *_]:
                    assert module == "pytest" or find_module(module), words
                case ["python", file, *_]:
                    assert (ROOT / file).exists() or file == "plain.py", words
                case _:
                    continue
            num_checked += 1

    assert num_checked > 40


def check_verb(verb: str, rest: list[str]) -> None:
    """Hold options, settings and files of one command against what there is."""
    own, overrides = split_overrides(rest, VERBS[verb])
    known = {name for name, _ in VERBS[verb].arguments} | {"--help"}
    assert {word.partition("=")[0] for word in own if word.startswith("--")} <= known, rest
    for name in (word.removeprefix("--").partition("=")[0] for word in overrides if word.startswith("--")):
        assert annotation_at(Settings, name.split(".")) is not None, name
    files = [word.partition(":")[0] for word in own if word.endswith((".py", ".yaml"))]
    assert [file for file in files if file not in READERS_FILES and not (ROOT / file).exists()] == []


def find_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


def test_a_verb_an_option_and_a_setting_that_are_not_there_are_found() -> None:
    with pytest.raises(KeyError):
        check_verb("ruin", [])
    with pytest.raises(UserError):
        check_verb("pause", ["--runn", "x"])
    with pytest.raises(AssertionError):
        check_verb("run", ["workflows/gsm8k.py", "--rollout.group_sizes", "8"])
    with pytest.raises(AssertionError):
        check_verb("run", ["workflows/gsm9k.py"])


def test_each_block_of_settings_is_of_settings_that_are_there() -> None:
    told = [(block, place) for block in ALL if block.language == "yaml" for place in places(yaml.safe_load(block.body))]

    unknown = [(block.file, place) for block, place in told if annotation_at(Settings, place) is None]

    assert len(told) > 40
    assert unknown == []


def places(value: object, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield where each value of a file of settings stands."""
    if isinstance(value, list):
        value = dict(enumerate(value)) if value and isinstance(value[0], dict) else None
    if above and above[-1] == "arguments":
        value = None  # of the template, whose names are the user's
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from places(inner, (*above, str(name)))
    else:
        yield above


def test_each_block_of_python_can_be_parsed() -> None:
    for block in ALL:
        if block.language == "python":
            ast.parse(f"async def _() -> object:\n{textwrap.indent(block.body, '    ')}", filename=block.file)


def test_the_chapters_are_short_and_the_options_that_they_name_in_passing_are_there() -> None:
    words = set(re.findall(r"`(--[a-z]+)", chapter("workflows/README.md", "Your first workflow")))

    shown = subprocess.run(
        [sys.executable, "-m", "areal_async", "try", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout

    assert {found: most for found, most in MAX_LINES.items() if len(chapter(*found).splitlines()) > most} == {}
    assert len(text_of("README.md").splitlines()) <= MAX_README_LINES
    assert words
    assert all(f" {word} " in shown.replace("\n", " ") for word in words)
