"""Every command of the documents that can be run here does what is said of it, and every file of Python in them works.

The documents are carried out in the order of the site, in one copy of the repository: what an earlier one has made, a
later one looks into. A ``python`` block is the file that its first line names; one that names none is executed. In a
``console`` block a line after ``$`` is run by a shell, and the lines below it must be in what it prints, in order:
``...`` stands for anything. Runs are small (``SHORT``) unless their command says how large they are.

What is carried out elsewhere, or not at all, says so in a comment above it (``tests/documents.py``).
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.documents import NUMBERS_DIFFER, ROOT, Block, blocks_of, chapter, commands, document_files
from tests.e2e.test_run import said

COPIED = ("areal_async", "configs", "rewards", "workflows")
SHORT = {
    "AREAL_ASYNC_RUN__STEPS": "2",
    "AREAL_ASYNC_ROLLOUT__BATCH_GROUPS": "4",
    "AREAL_ASYNC_EVAL__LIMIT": "8",
    "AREAL_ASYNC_METRICS__TENSORBOARD": "false",
}
DEADLINE_S = 240.0
VERB = "python -m areal_async "
TOLD = {
    "doctor workflows/gsm8k.py": "0 errors",
    "doctor --run gsm8k": "P7 covered +. proved",
    "doctor --run gsm8k --json": '"verdict": ?"proved"',
    "trajectories --run gsm8k --max-reward 0 --limit 10": r"10 listed",
    "trajectories --run gsm8k --failed": "no trajectories",
    "trajectories --run gsm8k --show 0-11-0.3": "0-11-0.3",
    "trajectories --run gsm8k --export all.jsonl": r"\d+ trajectories written to all.jsonl",
    "status --run gsm8k --html report.html": "report of 2 steps written to report.html",
    "replay --run gsm8k": "losses reproduced: largest difference",
    "replay --run gsm8k --algorithm.name rloo": "changed: algorithm.name",
    "eval workflows/gsm8k.py --model configs/models/tiny": "gsm8k: accuracy 0.500 .*8 rows scored",
    "eval --run gsm8k": "8 rows scored",
    "eval --run gsm8k --version best": "8 rows scored",
    "eval --run gsm8k --samples 8": r"avg@8 .* pass@8 .* 64 answers scored",
    "compare --run gsm8k --versions last --samples 4 --b rollout.sampling.temperature=0.5": "8 rows: .* tied",
    "dead --run gsm8k": "no dead letters",
    'promote last --run gsm8k --force --why "it is the first"': "gsm8k: champion is 1-2 now",
    "promote 2 --run gsm8k --tag candidate --force": "gsm8k: candidate is 1-2 now",
    "eval --run gsm8k --version candidate": "8 rows scored",
    "promote --remove --run gsm8k --tag candidate": "candidate is no version now, in place of 1-2",
    "models": r"gsm8k +1-2 +champion .*checkpoint.*model",
    "models --run gsm8k --json": '"tags":."champion".',
    "models --delete untagged --keep-newest 2": r"folders of .* would be deleted; --yes deletes them",
    "models --run gsm8k --audit": "tag champion: none -> 1-2 by force +it is the first",
    "run --help-settings": "rollout.max_staleness",
}
"""Command, without what is the same in all of them -> what it prints, where the document says it in a comment alone."""
OF_ONE_PROCESS = ("doctor", "trajectories", "status", "replay", "eval", "compare", "dead", "promote", "models")
"""Verbs that start no roles of a run.

Not ``try``: what the documents have it try imports a file that they have just made in ``rewards``, and a process that
has imported this repository's ``rewards`` for another test looks for it there.
"""
TUTORIAL = ("workflows/README.md", "Your first workflow")

CARRIED_OUT = {
    file: found for file in document_files() if (found := [one for one in blocks_of(file) if one.is_carried_out])
}

pytestmark = [pytest.mark.timeout(1200), pytest.mark.whole_runs]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clone")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name)
    return folder


@pytest.mark.parametrize("file", CARRIED_OUT)
def test_each_command_does_what_the_document_says(file: str, clone: Path) -> None:
    for block in CARRIED_OUT[file]:
        if block.language == "python":
            _write_or_execute(block, clone)
            continue
        for command, shown in commands(block.body):
            command = command.partition("  #")[0].rstrip()
            done = _say(command, clone) if _is_of_one_process(command) else _carry_out(command, clone)
            if shown:
                assert_shows(done.stdout, shown, command, are_numbers_free=block.mark == NUMBERS_DIFFER)
            told = TOLD.get(command.removeprefix(VERB), "")
            assert re.search(told, done.stdout + done.stderr), f"$ {command}\n{done.stdout}\ndoes not tell {told}"


def _write_or_execute(block: Block, clone: Path) -> None:
    head = block.body.partition("\n")[0]
    if not head.startswith("# "):
        exec(compile(block.body, f"{block.file}, {block.heading}", "exec"), ModuleType("example").__dict__)
        return
    file = clone / head.removeprefix("# ")
    assert not file.exists(), f"{file.name} is there already"
    file.write_text(block.body, encoding="utf-8")


def _environment(clone: Path) -> dict[str, str]:
    return SHORT | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(clone),
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "160",
    }


def _carry_out(command: str, clone: Path) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        ["bash", "-c", command], cwd=clone, env=os.environ | _environment(clone), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"$ {command}\n{done.stdout}\n{done.stderr}"
    return done


def _is_of_one_process(command: str) -> bool:
    return command.startswith(VERB) and command.removeprefix(VERB).split()[0] in OF_ONE_PROCESS


def _say(command: str, clone: Path) -> "subprocess.CompletedProcess[str]":
    """Do what a verb of one process does in this one: most of its seconds are the start of an interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(clone)
        for name, value in _environment(clone).items():
            patch.setenv(name, value)
        done = said(*shlex.split(command.removeprefix(VERB)))
    assert done.returncode == 0, f"$ {command}\n{done.stdout}\n{done.stderr}"
    return done


def assert_shows(output: str, shown: list[str], command: str, *, are_numbers_free: bool) -> None:
    """Hold what was printed against what the document shows: the very lines, but for ``...``."""
    pattern = "".join(
        r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(re.escape("..."), ".*") + r"\n" for line in shown
    )
    if are_numbers_free:
        pattern = re.sub(r"(?<![\w\\])(\\-)?\d+(\\\.\d+)?(?!\w)", lambda _: r"-?\d+(\.\d+)?", pattern)
    assert re.fullmatch(pattern, output.rstrip("\n") + "\n"), f"$ {command}\n{output}\nis not\n" + "\n".join(shown)


def test_what_the_tutorial_says_of_its_run_holds(clone: Path) -> None:
    metrics = clone / "runs" / "mine" / "metrics.jsonl"
    last: dict[str, Any] = json.loads(metrics.read_text().splitlines()[-1])
    told = re.findall(r"^\| `(\S+)` \|", chapter(*TUTORIAL), re.MULTILINE)

    assert len(told) >= 4
    assert set(told) <= last.keys(), "the table names what metrics.jsonl does not have"
    assert last["failed"] == 0
    assert last["logprob_gap_mean"] < 1e-3


def test_what_is_to_be_told_is_of_commands_that_are_carried_out() -> None:
    found = {
        command.partition("  #")[0].strip().removeprefix(VERB)
        for blocks in CARRIED_OUT.values()
        for block in blocks
        if block.language == "console"
        for command, _ in commands(block.body)
    }

    assert TOLD.keys() <= found
    assert len(found) > 20
