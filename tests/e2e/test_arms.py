"""A real run with an arm and a gate whose controller, broker and node are killed: its share, pairs and champions."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest
from safetensors.torch import load_file, save_file

from areal_async.launch.run import visit
from areal_async.launch.run_directory import RunDirectory
from areal_async.monitor.snapshot import NUM_READ, read_events
from areal_async.protocol.arms import Arms, ArmState
from areal_async.protocol.subjects import ADMITTED, ARMS
from areal_async.protocol.types import Admitted
from areal_async.versions import tags
from tests.documents import ROOT
from tests.e2e.scene import broker_pid, look
from tests.e2e.test_run import Run, assert_accounts, collect, role_processes, said_by, wait_until

pytestmark = [pytest.mark.timeout(1800), pytest.mark.nightly]

NUM_STEPS = 80
SHARE = 0.1
EVERY_STEPS = 16


def spoiled(folder: Path) -> Path:
    """Return a model that answers at random: every weight has changed its place."""
    shutil.copytree(ROOT / "configs" / "models" / "tiny", folder)
    for file in folder.glob("*.safetensors"):
        turned = {name: one.flatten().flip(0).reshape(one.shape).contiguous() for name, one in load_file(file).items()}
        save_file(turned, file, metadata={"format": "pt"})
    return folder


async def _left(run: Run) -> tuple[Admitted, ArmState, list[dict[str, Any]]]:
    """Return the record of admissions, what the arm came to, and all events."""
    async with visit(RunDirectory(run.directory.absolute())) as (_, bus):
        admitted, _ = await bus.get(ADMITTED, Admitted)
        arms, _ = await bus.get(ARMS, Arms)
        state, _ = await bus.get(bus.names.arm_key("noise"), ArmState)
        assert admitted is not None
        assert arms is not None
        assert state is not None
        assert state.arm_id == arms.by_name["noise"].arm_id
        return admitted, state, await read_events(bus, limit=NUM_READ)


def test_shares_are_exact_nothing_of_an_arm_is_trained_and_each_champion_is_made_once_whoever_is_killed(
    tmp_path: Path,
) -> None:
    """Each version that is evaluated is promoted, as the gate asks for no more than -1."""
    noise = spoiled(tmp_path / "noise")
    run = Run(
        tmp_path, "armed", run__steps=NUM_STEPS, rollout__batch_groups=8, arms__noise__path=noise,
        arms__noise__share=SHARE, eval__every_steps=EVERY_STEPS, gate__action="promote", gate__at_least=-1,
    )  # fmt: skip
    run.faults = "controller.after_comparison:1:kill controller.after_tag:2:kill"
    with run.start() as process:
        run.wait_for_step(10, process)
        wait_until(lambda: look(run).arms["noise"]["num_pairs"] > 0, "a pair")
        victims = {
            18: lambda: role_processes(run, "controller"),
            28: lambda: [broker_pid(run)],
            38: lambda: role_processes(run, "node"),
            48: lambda: [*role_processes(run, "controller"), broker_pid(run)],
        }
        for step, found in victims.items():
            run.wait_for_step(step, process)
            for pid in found():
                os.kill(pid, signal.SIGKILL)
        ended = collect(process)

    assert ended.returncode == 0, ended.stdout
    admitted, state, events = anyio.run(_left, run)
    told = [one for one in events if one["event"] == "arm.decided"]
    print(f"{admitted.total} admitted, {state.num_asked} asked, {state.num_pairs} pairs, {told}")
    assert abs(state.num_asked / admitted.total - SHARE) <= 0.02 * SHARE + 1 / admitted.total
    assert state.num_asked - len(state.open) == state.num_pairs + state.num_failed
    assert len(told) == 1
    assert told[0]["high"] <= 0
    assert state.is_told
    assert_accounts(run, num_steps=NUM_STEPS, max_staleness=2)
    groups = {row["group_id"] for row in run.trained}
    assert all("arm" not in str(row.get("sample_uid", "")) for row in run.trained)
    assert len(groups) <= admitted.total
    proved = said_by("doctor", run.directory, "--json")
    assert proved.returncode == 0, proved.stdout
    assert "arm noise" in ended.stdout
    lines = [json.loads(line) for line in (run.directory / "arms.jsonl").read_text().splitlines()]
    counts = [line["num_pairs"] for line in lines]
    assert counts == sorted(counts)
    assert run.has_fired("controller.after_comparison")
    assert run.has_fired("controller.after_tag")
    champions = [(line.version, line.was, line.comparison) for line in tags.history(run.directory)]
    versions = [version for version, _, _ in champions]
    print(f"champions {champions}")
    assert [int(version.partition("-")[2]) for version in versions] == [*range(EVERY_STEPS, NUM_STEPS + 1, EVERY_STEPS)]
    before = ["", *versions[:-1]]
    assert champions == [(one, was, was and f"gate_{was}_{one}") for one, was in zip(versions, before, strict=True)]
    assert [one["version"] for one in events if one["event"] == "version.tagged"] == versions
