"""A workflow that computes for ever: it is named within seconds, its node starts again, and the run goes on.

One that holds up the loop for a while: row 23 of the faults. What ends the node: ``test_loop_watchdog.py``. What is
made of what it leaves: ``tests/bus/test_recovery.py``.
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_run import REPOSITORY, Run, said_by

pytestmark = [pytest.mark.timeout(420), pytest.mark.nightly]

# The first prompt to come is the one: its first sibling holds up the loop in each attempt, the other one does not.
WORKFLOW = """
import time
from pathlib import Path

HERE = Path(__file__).parent


def look_for_ever(prompt):
    with (HERE / "blocked_at").open("a") as file:
        file.write(f"{time.time()}\\n")
    while True:
        pass


async def endless(prompt, policy):
    poison, calls = HERE / "poison", HERE / "calls"
    if prompt["kind"] == "trained" and not poison.exists():
        poison.write_text(str(prompt.index))
    if prompt["kind"] == "trained" and poison.read_text() == str(prompt.index):
        with calls.open("a") as file:
            file.write("x")
        if calls.stat().st_size % 2:
            look_for_ever(prompt)
    await policy.chat([{"role": "user", "content": prompt["question"]}])
    return 0.0
"""


def logged(run: Run, event: str) -> list[dict[str, Any]]:
    lines = (run.directory / "logs" / "node-0.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == event]


def rows(path: Path, kind: str) -> Path:
    lines = (REPOSITORY / "configs" / "data" / "gsm8k_tiny_train.jsonl").read_text().splitlines()[:64]
    path.write_text("".join(json.dumps({**json.loads(line), "kind": kind}) + "\n" for line in lines))
    return path


def test_what_blocks_the_loop_is_named_and_its_prompt_is_dead_after_its_attempts(tmp_path: Path) -> None:
    workflow = tmp_path / "endless.py"
    workflow.write_text(WORKFLOW)
    run = Run(
        tmp_path, "blocked", run__steps=8, eval__limit=2, rollout__group_size=2, rollout__min_group_size=2,
        rollout__batch_groups=2, rollout__max_attempts=2, rollout__loop_deadline_s=5,
        rollout__sampling__max_new_tokens=8, tasks__0__dataset__path=rows(tmp_path / "train.jsonl", "trained"),
        eval__dataset__path=rows(tmp_path / "test.jsonl", "held out"),
    )  # fmt: skip

    with run.start(workflow=str(workflow)) as process:
        output, _ = process.communicate(timeout=400)

    assert process.returncode == 0, output
    assert [line["step"] for line in run.lines] == list(range(1, 9)), "the other prompts train"
    index = (tmp_path / "poison").read_text()
    began_s = [float(line) for line in (tmp_path / "blocked_at").read_text().splitlines()]
    # On a busy machine any loop is a second late now and then: that is logged too, and is no slot's doing.
    named = [line for line in logged(run, "loop.blocked") if line.get("slot", "").startswith(f"slot 0-{index}-")]
    named_after_s = [
        datetime.fromisoformat(line["timestamp"]).timestamp() - at_s for line, at_s in zip(named, began_s, strict=True)
    ]
    figures = [round(after_s, 2) for after_s in named_after_s]
    print(f"named after {figures} s")  # 5 on a free machine; no test has a clock
    assert len(named) == 2, "once in each attempt"
    places = {f"{workflow}:{line} look_for_ever" for line in (11, 12)}
    for line in named:
        assert line["workflow"] == "endless"
        assert line["place"] in places
    assert f"workflow endless, slot 0-{index}-0.0, holds up the event loop of node 0, at {workflow}:1" in output
    assert output.count("starting node-0 again") == 2
    assert "nothing was learned: the reward was 0 in all 8 steps" in " ".join(output.split())
    told = said_by("dead", run.directory, "--json")
    assert told.returncode == 0, told.stderr
    (letter,) = map(json.loads, told.stdout.splitlines())
    assert (letter["prompt"], letter["attempts"]) == (int(index), 2)
    assert letter["reason"].startswith("workflow endless: held up the event loop of node 0 for ")
    assert any(place in letter["reason"] for place in places)
    assert not list((run.directory / "blocked").glob("*")), "nothing is left to make amends for"
