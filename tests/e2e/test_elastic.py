"""A run that becomes larger and smaller while it runs, and what was ordered outlives its processes."""

from pathlib import Path

import pytest

from tests.e2e.scene import look
from tests.e2e.test_run import Run, assert_accounts, collect, events, said_by, wait_until

pytestmark = [pytest.mark.timeout(600), pytest.mark.whole_runs]


def _serving(run: Run) -> list[str]:
    return [str(one["id"]) for one in look(run).servers if not one["is_fenced"]]


def _ordered(run: Run, *words: str) -> str:
    done = said_by("servers", run.directory, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_servers_come_and_go_by_order_and_who_is_removed_is_missed_by_nobody(tmp_path: Path) -> None:
    run = Run(tmp_path, "run", run__steps=5000)
    with run.start() as process:
        run.wait_for_step(1, process)
        assert "run run: 0-1: started on node 0 now" in _ordered(run, "add", "--by", "ann")
        wait_until(lambda: _serving(run) == ["0-0", "0-1"] or process.poll() is not None, "the second server")
        assert "run run: 0-0: gets nothing more" in _ordered(run, "remove", "0-0")
        wait_until(lambda: [one["id"] for one in look(run).servers] == ["0-1"], "the first one's end")
        run.wait_for_step(len(run.lines) + 2, process)
        wait_until(lambda: look(run).notes == [], "nobody who is missed")
        last = said_by("servers", run.directory, "remove", "0-1")
        process.kill()  # its launcher: all processes go with it
        told, _ = process.communicate()
    assert "run.ordered order=add-servers 0-1 by=ann" in told
    assert (last.returncode, last.stderr.count("\n")) == (2, 1)

    num_steps = len(run.lines) + 4
    with run.start("--run.steps", str(num_steps)) as again:
        wait_until(lambda: _serving(run) == ["0-1"] or again.poll() is not None, "the server that was ordered")
        ended = collect(again)

    assert ended.returncode == 0, ended.stdout
    assert [one["server_id"] for one in events(run, "node-0", "server.started")] == ["0-0", "0-1", "0-1"]
    assert_accounts(run, num_steps=num_steps, max_staleness=2)
    refused = said_by("servers", run.directory, "add")
    assert (refused.returncode, refused.stderr) == (2, "run run: it does not run now; start it first\n")
    doctor = said_by("doctor", run.directory)
    assert doctor.returncode == 0, doctor.stdout
