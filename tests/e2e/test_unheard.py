"""A run whose terminal is closed goes on to its end, and its log says since when nobody sees it."""

import json
from pathlib import Path

import pytest

from tests.e2e.scene import has
from tests.e2e.terminal import Terminal
from tests.e2e.test_run import DEADLINE_S, Run

pytestmark = pytest.mark.timeout(240)


def test_a_run_goes_on_when_its_terminal_is_closed(tmp_path: Path) -> None:
    run = Run(tmp_path, "unseen", run__steps=3)
    terminal = Terminal((100, 30), program=run.command())
    terminal.wait(has("run unseen", "step", "0/3"), "the panel")

    terminal.close()

    assert terminal.process.wait(timeout=DEADLINE_S) == 0
    assert len(run.lines) == 3
    said = [json.loads(line)["event"] for line in (run.directory / "logs" / "launcher.jsonl").read_text().splitlines()]
    assert [line.startswith("stdout: got Input/output error") for line in said if "stdout" in line] == [True], said
