"""Each block of commands, settings or code in the documents is carried out by a test, or it stands here why not.

Carried out or not, the verbs, options, settings, files and make targets that they name are there.
"""

import ast
import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from areal_async.cli.main import VERBS, split_overrides
from areal_async.config.settings import Settings
from areal_async.config.tree import annotation_at
from areal_async.errors import UserError

ROOT = Path(__file__).parents[3]
FENCE = re.compile(r"^(#+) ([^\n]+)$|^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LANGUAGES = ("console", "python", "sh", "yaml")
E2E, UNIT = "tests/e2e", "tests/unit"
CARRIED_OUT = {
    ("README.md", "A first workflow"): f"{E2E}/test_readme.py",
    ("workflows/README.md", "Your first workflow"): f"{E2E}/test_readme.py",
    ("areal_async/cli/README.md", "Operating a run"): f"{E2E}/test_operating.py",
    ("areal_async/cli/README.md", "Settings that may change"): f"{E2E}/test_operating.py",
    ("areal_async/cli/README.md", "What has become of everything"): f"{E2E}/test_doctor.py",
    ("areal_async/bus/README.md", "With plain NATS tools"): f"{E2E}/test_operating.py",
    ("areal_async/monitor/README.md", "Commands"): f"{E2E}/test_replay.py",
    ("areal_async/monitor/README.md", "Evaluation"): f"{E2E}/test_evaluate.py",
    ("areal_async/doctor/README.md", "The doctor"): f"{E2E}/test_doctor.py",
    ("areal_async/rollout/README.md", "A whole group at once"): f"{UNIT}/rollout/test_readme.py",
    ("areal_async/trainer/README.md", "Reward models"): f"{E2E}/test_preference.py",
    ("areal_async/launch/README.md", "Joining a live run"): f"{E2E}/test_join.py",
    ("areal_async/launch/README.md", "Under Slurm"): "tests/slurm",
    ("areal_async/inference/README.md", "The real SGLang"): "tests/sglang",
    ("configs/README.md", "The real SGLang on a CPU"): "tests/sglang",
    ("configs/README.md", "Several tasks"): f"{E2E}/test_mixed.py",
    ("workflows/README.md", "The workflows that ship"): f"{E2E}/test_workflows.py",
    ("rewards/README.md", "What a mathematical answer is worth"): f"{UNIT}/rewards/test_math_corpus.py",
}
"""File and heading -> the test that carries it out: from the text itself, or the same commands on hosts of its own."""
NOT_CARRIED_OUT = {
    (
        "README.md",
        "Install",
    ): "installs into the environment that runs the tests; `.ci/run` does the same on a clean clone",
    (
        "README.md",
        "Two commands",
    ): "the main job of 40 steps; a short one is in tests/e2e/test_run.py, doctor in test_doctor.py",
    ("CONTRIBUTING.md", "Working on areal_async"): "the tests themselves",
    (
        "configs/README.md",
        "Settings and runs",
    ): "whole runs with other settings; these are held against what settings there are",
    ("workflows/README.md", "What they learn on a CPU"): "eleven runs under three seeds: an hour",
    ("areal_async/algorithms/README.md", "The step as a graph"): "a function; tests/unit/algorithms calls ones like it",
    ("areal_async/bus/SECURITY.md", "A broker of your own"): "a broker under /var/lib with a host's certificate; "
    "tests/bus has one with the same accounts, and tools/two_hosts.py one with TLS",
    ("areal_async/rollout/README.md", "What a workflow is given"): "files of the reader's",
    ("areal_async/rollout/README.md", "What a node has once"): "a browser of the reader's",
    ("areal_async/rollout/README.md", "The chat template"): "a file of the reader's",
    ("areal_async/rollout/README.md", "What a single call may ask for"): "a call in the middle of a workflow",
    ("areal_async/rollout/README.md", "A number for each reply"): "the last line of a workflow",
    ("areal_async/rollout/README.md", "Several policies in one workflow"): "a frozen model of 7 B parameters",
    ("areal_async/rollout/README.md", "A reward model"): "half of workflows/preference.py, which tests/e2e runs",
    ("areal_async/rollout/endpoint/README.md", "Agents that speak OpenAI's or Anthropic's API"): "settings alone",
}
"""File and heading -> why no test carries it out."""
OF_THE_READER = ("FILE.py", "FILE.yaml", "workflows/mine.py", "workflows/mine_tool.py", "workflows/last_word.py")
"""Files that the reader writes."""


class Block(NamedTuple):
    file: str
    heading: str
    language: str
    body: str


def blocks() -> Iterator[Block]:
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for file in listed:
        heading = ""
        for _, title, language, body in FENCE.findall((ROOT / file).read_text(encoding="utf-8")):
            heading = title or heading
            if language in LANGUAGES:
                yield Block(file, heading, language, body)


ALL = list(blocks())


def commands(body: str) -> Iterator[list[str]]:
    """Yield the words of each command of a block, without what is piped or kept of it."""
    lines = body.replace("\\\n", " ").splitlines()
    prompts = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")] or lines
    for line in prompts:
        words = shlex.split(line, comments=True)
        if words[:1] == ["sbatch"]:
            words = shlex.split(words[-1].removeprefix("exec "))
        yield [word for word in words if word not in (">", "accounts.json")]


def test_each_block_is_carried_out_or_it_is_said_why_not() -> None:
    found = {(block.file, block.heading) for block in ALL}

    assert not CARRIED_OUT.keys() & NOT_CARRIED_OUT.keys()
    assert found == CARRIED_OUT.keys() | NOT_CARRIED_OUT.keys()
    assert [test for test in CARRIED_OUT.values() if not (ROOT / test).exists()] == []
    assert all(NOT_CARRIED_OUT.values())


def test_each_command_is_of_verbs_options_settings_files_and_targets_that_are_there() -> None:
    num_checked = 0
    for block in ALL:
        for words in commands(block.body) if block.language in ("console", "sh") else ():
            match words:
                case ["python", "-m", "areal_async", verb, *rest]:
                    check_verb(verb, rest)
                case ["make", target]:
                    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
                case ["python", "-m", module, *_]:
                    assert module == "pytest" or find_module(module), words
                case ["python", file, *_]:
                    assert (ROOT / file).exists(), words
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
    assert [file for file in files if file not in OF_THE_READER and not (ROOT / file).exists()] == []


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
