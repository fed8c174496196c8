"""A run goes back to an earlier checkpoint: while it lives, when it is stopped, and once more after its end."""

import json
import re
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest

from areal_async.launch.run_directory import RunDirectory
from areal_async.process.atomic_folders import LEDGER, versions_in
from areal_async.process.json_lines import read_json_lines
from areal_async.protocol.types import Version
from tests.e2e.scene import look
from tests.e2e.test_run import Run, assert_accounts, collect, said_by, wait_until

pytestmark = [pytest.mark.timeout(600), pytest.mark.whole_runs, pytest.mark.nightly]

NUM_STEPS = 10


def versions(run: Run) -> list[Version]:
    return [Version.parse(line["weights_version"]) for line in run.lines]


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
    ordered = said_by("rollback", run.directory, "--to", "4", "--why", "once more")
    assert ordered.returncode == 0, ordered.stderr
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
    judged = said_by("doctor", run.directory, "--json")
    diagnosis = json.loads(judged.stdout)
    assert judged.returncode == 0, judged.stdout
    assert {one["verdict"] for one in diagnosis["rulings"]} == {"proved"}, judged.stdout
    assert diagnosis["groups"]["rolled_back"] >= 4 * 4
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
