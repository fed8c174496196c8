"""A run that promotes by itself: once, though its controller is killed between comparison, tag and event."""

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from areal_async.launch.run import visit
from areal_async.launch.run_directory import RunDirectory
from areal_async.monitor.snapshot import read_events
from areal_async.versions import tags
from tests.e2e.test_run import Run, said, wait_until

pytestmark = [pytest.mark.timeout(600), pytest.mark.whole_runs]

WORKFLOW = """
import asyncio


async def gsm8k(prompt, policy):
    # Only the second version is right, and a step takes longer than an evaluation.
    await asyncio.sleep(prompt["pause_s"])
    await policy.chat([{"role": "user", "content": prompt["question"]}], max_new_tokens=2)
    return float(policy.turns[-1].spans[-1].version.endswith("-2"))
"""
FIRST = ("promote", "1-1", "--tag", "first", "--force", "--why", "to go back to")


def _rows(file: Path, *, count: int, pause_s: float) -> Path:
    rows = ({"question": f"{row} + 1 = ", "pause_s": pause_s} for row in range(count))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


async def _events(directory: Path) -> list[dict[str, Any]]:
    async with visit(RunDirectory(directory)) as (_, bus):
        return await read_events(bus, limit=1000)


def test_a_better_version_is_promoted_once_and_a_worse_one_raises_an_alarm(tmp_path: Path) -> None:
    workflow = tmp_path / "gsm8k.py"
    workflow.write_text(WORKFLOW)
    run = Run(
        tmp_path, "gated", run__steps=3, rollout__batch_groups=2, rollout__group_size=2, rollout__min_group_size=1,
        rollout__max_staleness=0, trainer__checkpoint_every_steps=1, trainer__keep_checkpoints=1, eval__every_steps=1,
        gate__action="promote", gate__at_least=0.5,
        tasks__0__dataset__path=_rows(tmp_path / "train.jsonl", count=64, pause_s=1.0),
        eval__dataset__path=_rows(tmp_path / "test.jsonl", count=8, pause_s=0.0),
    )  # fmt: skip
    run.faults = "controller.after_tag:1:kill controller.after_comparison:1:kill"

    place = ("--run", str(run.directory))
    with run.start(workflow=str(workflow)) as process:
        run.wait_for_fault("controller.after_tag", process)
        wait_until(lambda: said(*FIRST, *place).returncode == 0 or process.poll() is not None, "another controller")
        output, _ = process.communicate(timeout=300)

    assert process.returncode == 0, output
    assert run.has_fired("controller.after_comparison")
    history = list(tags.history(run.directory))
    promoted = [(line.version, line.was, line.comparison) for line in history if line.tag == "champion"]
    assert promoted == [("1-1", "", ""), ("1-2", "1-1", "gate_1-1_1-2")]
    assert sorted(path.name for path in run.directory.glob("checkpoints/1-*")) == ["1-1", "1-2", "1-3"]
    told = [
        event for event in anyio.run(_events, run.directory) if event["event"] in ("version.tagged", "alarm.raised")
    ]
    what = [(one["event"], one.get("tag", "gate"), one.get("version", "1-3")) for one in told]
    what.remove(("version.tagged", "first", "1-1"))  # whenever the command was done
    assert what == [
        ("version.tagged", "champion", "1-1"), ("version.tagged", "champion", "1-2"), ("alarm.raised", "gate", "1-3"),
    ]  # fmt: skip
    assert next(one["sentence"] for one in told if one["event"] == "alarm.raised").startswith(
        "1-3 does worse: accuracy -1.000 against champion 1-2"
    )

    refused = said("promote", "3", *place)
    assert refused.returncode == 2
    assert "in comparison gate_1-2_1-3 1-3 gets -1" in refused.stderr
    assert said("promote", "first", *place, "--comparison", "gate_1-1_1-2").returncode == 2
    assert said("promote", "first", *place, "--force").stdout == "gated: champion is 1-1 now, in place of 1-2\n"
    kept = [json.loads(line) for line in said("models", *place, "--json").stdout.splitlines()]
    assert [(one["version"], one["tags"], one["accuracy"]) for one in kept if "checkpoint" in one["kinds"]] == [
        ("1-1", ["champion", "first"], 0.0), ("1-2", [], 1.0), ("1-3", [], 0.0),
    ]  # fmt: skip
    whole = said("doctor", *place)
    assert whole.returncode == 0, whole.stdout
