"""A run goes back to an earlier checkpoint: while it lives, when it is stopped, after its end, and by itself."""

import json
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from areal_async.launch.run_directory import RunDirectory
from areal_async.process.atomic_folders import LEDGER, versions_in
from areal_async.process.json_lines import read_json_lines
from areal_async.protocol.types import Version
from tests.e2e.scene import look
from tests.e2e.test_run import (
    DEADLINE_S,
    REPOSITORY,
    Run,
    assert_accounts,
    collect,
    events,
    said_by,
    wait_until,
)

pytestmark = [pytest.mark.timeout(1200), pytest.mark.whole_runs, pytest.mark.nightly]

NUM_STEPS = 10


def versions(run: Run) -> list[Version]:
    return [Version.parse(line["weights_version"]) for line in run.lines]


def assert_proved(run: Run) -> dict[str, Any]:
    """Have the doctor judge every promise over all lineages; return what it says."""
    judged = said_by("doctor", run.directory, "--json")
    diagnosis: dict[str, Any] = json.loads(judged.stdout)
    assert judged.returncode == 0, judged.stdout
    assert {one["verdict"] for one in diagnosis["rulings"]} == {"proved"}, judged.stdout
    return diagnosis


def test_a_run_goes_back_live_though_its_trainer_dies_of_it_then_stopped_then_finished(tmp_path: Path) -> None:
    run = Run(tmp_path, "back", run__steps=NUM_STEPS, trainer__keep_checkpoints=100, eval__limit=4)
    run.faults = "trainer.before_step:7:stop trainer.before_branch:1:kill"
    with run.start() as process:
        run.wait_for_fault("trainer.before_step-7", process)

        refused = said_by("rollback", run.directory, "--to", "1-3")
        assert refused.returncode == 2
        assert re.search(r"^--to: .* has no version 1-3, need one of 1-2, 1-4(, 1-6)?, best, last$", refused.stderr)
        ordered = said_by("rollback", run.directory, "--to", "1-2", "--why", "it diverged", "--by", "ann")
        assert ordered.returncode == 0, ordered.stderr

        run.wait_for_fault("trainer.before_branch-1", process)
        wait_until(lambda: len(versions(run)) >= 5 and versions(run)[-1].lineage == 3, "five steps, anew")
        bound = RunDirectory(run.directory).read_settings().rollout.max_groups_in_flight
        wait_until(lambda: 0 < (look(run).in_flight or 0) <= bound, f"{bound} groups in flight at the most")
        process.send_signal(signal.SIGINT)
        stopped = collect(process)
    assert stopped.returncode == 0, stopped.stdout
    assert "run back goes back to 1-2, as ann has ordered: it diverged" in stopped.stdout
    assert [one.lineage for one in versions(run)[:3]] == [1, 1, 3]

    newest = str(versions_in(run.directory / "checkpoints")[-1])
    with (run.directory / "checkpoints" / newest / LEDGER).open("ab") as ledger:
        ledger.write(b" ")
    refused = said_by("rollback", run.directory, "--to", newest)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"--to: got {newest}, whose files are not whole: ledger is not what was written")
    ordered = said_by("rollback", run.directory, "--to", "1-2", "--by", "bob")
    assert ordered.returncode == 0, ordered.stderr
    ordered = said_by("rollback", run.directory, "--to", "4", "--why", "once more")
    assert ordered.returncode == 0, ordered.stderr
    assert ordered.stdout.startswith("run back: this order replaces that of bob, to 1-2\n")
    run.faults = ""
    finished = run.finish()
    assert finished.returncode == 0, finished.stdout
    assert [one.lineage for one in versions(run)] == [1, 1, 3, 3] + [4] * (NUM_STEPS - 4)

    ordered = said_by("rollback", run.directory, "--to", "1-2")
    assert ordered.returncode == 0, ordered.stderr
    again = run.finish()
    assert again.returncode == 0, again.stdout
    assert "run back had finished, and goes back to 1-2, as" in again.stdout
    assert [one.lineage for one in versions(run)] == [1, 1] + [5] * (NUM_STEPS - 2)
    assert_accounts(run, num_steps=NUM_STEPS, max_staleness=2)

    shutil.rmtree(run.directory / "checkpoints" / newest)  # which the doctor would tell of
    assert assert_proved(run)["groups"]["rolled_back"] >= 4 * 4
    lines = read_json_lines(run.directory / "metrics_abandoned.jsonl")
    abandoned = Counter((line["abandoned_by"], Version.parse(line["weights_version"]).lineage) for line in lines)
    assert abandoned.keys() == {(3, 1), (4, 3), (5, 3), (5, 4)}
    assert abandoned[5, 4] == NUM_STEPS - 4
    evaluated = [line["eval_id"] for line in read_json_lines(run.directory / "eval.jsonl")]
    assert evaluated == ["1-0", f"4-{NUM_STEPS}", f"5-{NUM_STEPS}"]
    replayed = said_by("replay", run.directory, "--run.directory", str(tmp_path / "replays"))
    assert "losses reproduced" in replayed.stdout, replayed.stdout + replayed.stderr
    kept = {path.name for path in (run.directory / "checkpoints").iterdir()}
    assert {"1-2", "3-2", "4-4", "5-2", f"5-{NUM_STEPS}"} <= kept


@pytest.mark.parametrize("layout", [{}, {"trainer__pipeline_parallel": 2}], ids=["sharded", "pipeline"])
def test_two_ranks_go_back_live_and_stopped_with_their_optimizer(tmp_path: Path, layout: dict[str, int]) -> None:
    """Losses come out again when all that survives is trained in one go: an optimizer begun anew would show in them."""
    run = Run(tmp_path, "ranks", run__steps=8, trainer__num_ranks=2, trainer__keep_checkpoints=100, **layout)
    run.faults = "trainer.before_step:5:stop"
    with run.start() as process:
        run.wait_for_fault("trainer.before_step-5", process)
        assert said_by("pause", run.directory).returncode == 0
        ordered = said_by("rollback", run.directory, "--to", "2")
        assert ordered.returncode == 0, ordered.stderr
        assert ordered.stdout.endswith("run ranks: is paused, and admits nothing before it is resumed\n")
        assert said_by("resume", run.directory).returncode == 0
        wait_until(lambda: len(versions(run)) >= 5 and versions(run)[-1].lineage == 2, "five steps, anew")
        process.send_signal(signal.SIGINT)
        stopped = collect(process)
    assert stopped.returncode == 0, stopped.stdout
    assert [one.lineage for one in versions(run)[:3]] == [1, 1, 2]

    ordered = said_by("rollback", run.directory, "--to", "2-4")
    assert ordered.returncode == 0, ordered.stderr
    run.faults = ""
    finished = run.finish()

    assert finished.returncode == 0, finished.stdout
    assert [one.lineage for one in versions(run)] == [1, 1, 2, 2, 3, 3, 3, 3]
    assert_accounts(run, num_steps=8, max_staleness=2)
    assert assert_proved(run)["groups"]["rolled_back"] >= 2 * 4
    replayed = subprocess.run(  # ranks write to the terminal themselves
        [sys.executable, "-m", "areal_async", "replay", "--run", str(run.directory)],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert "losses reproduced" in replayed.stdout, replayed.stdout + replayed.stderr


def test_a_poisoned_learning_rate_has_the_run_go_back_by_itself_twice_and_no_third_time(tmp_path: Path) -> None:
    """Step 5 spoils the weights, answers of which are all alike: checkpoint 5 shows it, and 4 is gone back to."""
    run = Run(
        tmp_path, "poisoned", run__steps=4, rollout__max_staleness=0, trainer__checkpoint_every_steps=1,
        trainer__keep_checkpoints=100, health__rollback="true", health__equal_rewards_steps=2,
    )  # fmt: skip
    assert run.finish().returncode == 0

    ended = run.finish("--run.steps", "16", "--trainer.lr", "50")

    assert ended.returncode == 0, ended.stdout
    orders = [one for one in read_json_lines(run.directory / "orders.jsonl") if one["order"] != "start"]
    assert [(one["order"], one["by"]) for one in orders] == [
        ("rollback to 1-4", "alarm equal_rewards"), ("rollback to 3-4", "alarm equal_rewards"),
    ]  # fmt: skip
    assert [one.lineage for one in versions(run)] == [1] * 4 + [4] * 12
    refused = [one for one in events(run, "trainer-0", "rollback.not_ordered") if one["alarm"] == "equal_rewards"]
    assert [one["reason"] for one in refused] == ["ordered 2 times, or just now"]
    assert run.lines[-1]["alarm_names"] == "equal_rewards"
    assert_proved(run)
