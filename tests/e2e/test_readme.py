"""What the first workflow of README.md and the tutorial say is so: files are written, commands run, claims hold.

A ``python`` block is the file that its first line names. In a ``console`` block a line after ``$`` is run by a shell,
and the lines below it must be in what it prints, in their order, where ``...`` stands for anything.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
COPIED = ("areal_async", "configs", "rewards", "workflows")
DEADLINE_S = 240.0
FIRST = ("README.md", "A first workflow")
TUTORIAL = ("workflows/README.md", "Your first workflow")
MAX_LINES = {FIRST: 40, TUTORIAL: 120}
"""A page is enough for the tutorial, half of one for README.md."""
MAX_README_LINES = 160

pytestmark = [pytest.mark.timeout(480), pytest.mark.whole_runs]


def chapter(file: str, title: str) -> str:
    text = (REPOSITORY / file).read_text(encoding="utf-8")
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return str(found)


def blocks(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(block: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a console block, and the lines that are shown below it."""
    for part in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
        command, *shown = part.splitlines()
        yield command, shown


def assert_shows(output: str, shown: list[str], command: str) -> None:
    """Hold what was printed against what the chapter shows: the very lines, but for ``...``."""
    pattern = "".join(
        r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(re.escape("..."), ".*") + r"\n" for line in shown
    )
    assert re.fullmatch(pattern, output.rstrip("\n") + "\n"), f"$ {command}\n{output}\nis not\n" + "\n".join(shown)


def carry_out(text: str, folder: Path, *, num_commands: int) -> dict[str, Any]:
    """Do what a chapter says in a copy of the repository; return the last line of its run's ``metrics.jsonl``."""
    for name in COPIED:
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "80",
    }
    num_done = 0
    for language, body in blocks(text):
        if language == "python":
            head = body.partition("\n")[0]
            file = folder / head.removeprefix("# ")
            assert head.startswith("# "), f"no file is named above {head}"
            assert not file.exists(), f"{file.name} is there already"
            file.write_text(body, encoding="utf-8")
            continue
        for command, shown in commands(body):
            num_done += 1
            done = subprocess.run(
                ["bash", "-c", command], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=DEADLINE_S, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"$ {command}\n{done.stdout}\n{done.stderr}"
            assert_shows(done.stdout, shown, command)
    assert num_done == num_commands
    (metrics,) = (folder / "runs").glob("*/metrics.jsonl")
    last: dict[str, Any] = json.loads(metrics.read_text().splitlines()[-1])
    assert last["failed"] == 0
    assert last["logprob_gap_mean"] < 1e-3
    return last


def test_the_first_workflow_of_the_readme_does_what_it_says(tmp_path: Path) -> None:
    carry_out(chapter(*FIRST), tmp_path, num_commands=2)


def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    text = chapter(*TUTORIAL)

    last = carry_out(text, tmp_path, num_commands=3)

    told = re.findall(r"^\| `(\S+)` \|", text, re.MULTILINE)
    assert len(told) >= 4
    assert set(told) <= last.keys(), "the table names what metrics.jsonl does not have"


def test_the_chapters_are_short_and_their_other_options_exist() -> None:
    words = set(re.findall(r"`(--[a-z]+)", chapter(*TUTORIAL)))

    shown = subprocess.run(
        [sys.executable, "-m", "areal_async", "try", "--help"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    for found, most in MAX_LINES.items():
        assert len(chapter(*found).splitlines()) <= most, found
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES
    assert words
    assert all(f" {word} " in shown.replace("\n", " ") for word in words)
