"""What the README's chapter "Your first workflow" says is so: its files are written, its commands run, its claims hold.

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

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
COPIED = ("areal_async", "configs", "rewards", "workflows")
DEADLINE_S = 240.0
MAX_LINES = 120
"""One page."""

pytestmark = [pytest.mark.timeout(480), pytest.mark.whole_runs]


def chapter() -> str:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"^## Your first workflow\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
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


def test_the_first_workflow_does_what_the_chapter_says(tmp_path: Path) -> None:
    for name in COPIED:
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "80",
    }
    num_commands = 0
    for language, body in blocks(chapter()):
        if language == "python":
            head = body.partition("\n")[0]
            file = tmp_path / head.removeprefix("# ")
            assert head.startswith("# "), f"no file is named above {head}"
            assert not file.exists(), f"{file.name} is there already"
            file.write_text(body, encoding="utf-8")
            continue
        for command, shown in commands(body):
            num_commands += 1
            done = subprocess.run(
                ["bash", "-c", command], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=DEADLINE_S, check=False,
            )  # fmt: skip
            assert done.returncode == 0, f"$ {command}\n{done.stdout}\n{done.stderr}"
            assert_shows(done.stdout, shown, command)

    assert num_commands >= 3
    (metrics,) = (tmp_path / "runs").glob("*/metrics.jsonl")
    last = json.loads(metrics.read_text().splitlines()[-1])
    told = re.findall(r"^\| `(\S+)` \|", chapter(), re.MULTILINE)
    assert len(told) >= 4
    assert set(told) <= last.keys(), "the table names what metrics.jsonl does not have"
    assert last["failed"] == 0
    assert last["logprob_gap_mean"] < 1e-3


def test_the_chapter_is_one_page_and_its_other_options_exist() -> None:
    text = chapter()
    words = set(re.findall(r"`(--[a-z]+)", text))

    shown = subprocess.run(
        [sys.executable, "-m", "areal_async", "try", "--help"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert len(text.splitlines()) <= MAX_LINES
    assert words
    assert all(f" {word} " in shown.replace("\n", " ") for word in words)
