"""A run that becomes larger and smaller while it runs, and goes on at another broker with all that it had."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from areal_async.bus.accounts import accounts
from areal_async.bus.server import find_binary
from areal_async.process.host import free_port
from areal_async.protocol.subjects import Names
from tests.e2e.scene import look
from tests.e2e.test_run import Run, assert_accounts, collect, events, said_by, unhurried, wait_until

pytestmark = [pytest.mark.timeout(600), pytest.mark.whole_runs]

MORE_STEPS = 4


@contextmanager
def _broker(folder: Path, keys: Path) -> Iterator[str]:
    """A broker of one's own, as ``bus/SECURITY.md`` says; yields its address."""
    folder.mkdir()
    port = free_port(setting="a broker")
    config: dict[str, Any] = {
        "listen": f"127.0.0.1:{port}",
        "max_payload": 9 << 20,
        "jetstream": {"store_dir": str(folder), "sync_interval": "always"},
        "accounts": accounts(Names("run"), keys),
    }
    (folder / "nats.conf").write_text(json.dumps(config))
    command = [find_binary(), "-c", folder / "nats.conf"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"nats://127.0.0.1:{port}"
        finally:
            process.terminate()


def _serving(run: Run) -> list[str]:
    return [str(one["id"]) for one in look(run).servers if not one["is_fenced"]]


def _ordered(run: Run, *words: str) -> str:
    done = said_by("servers", run.directory, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _examined(run: Run) -> dict[str, Any]:
    done = said_by("doctor", run.directory, "--json")
    assert done.returncode == 0, done.stdout
    found: dict[str, Any] = json.loads(done.stdout)
    return {key: value for key, value in found.items() if key != "is_live"}  # of the broker's store, which is not ours


def test_servers_come_and_go_by_order_and_the_run_goes_on_at_another_broker_as_it_was(tmp_path: Path) -> None:
    run, workflow = Run(tmp_path, "run", run__steps=5000, eval__dataset="null"), unhurried(tmp_path)
    with run.start(workflow=workflow) as process:
        run.wait_for_step(1, process)
        _have_one_server_for_another(run, process)
        run.wait_for_step(len(run.lines) + 2, process)
        live = said_by("bus", run.directory, "move", "--to", "nats://127.0.0.1:1")
        process.send_signal(signal.SIGINT)
        stopped = collect(process)
    assert stopped.returncode == 0, stopped.stdout
    assert "run.ordered order=add-servers 0-1 by=ann" in stopped.stdout
    assert (live.returncode, live.stderr) == (2, "run run: it runs now; stop it first\n")
    before, num_steps = _examined(run), len(run.lines) + MORE_STEPS

    keys = tmp_path / "keys"
    with _broker(tmp_path / "broker", keys) as url:
        moved = said_by("bus", run.directory, "move", "--to", url, "--credentials", str(keys))
        assert moved.returncode == 0, moved.stderr
        assert _examined(run) == before
        again = said_by("bus", run.directory, "move", "--to", url, "--credentials", str(keys))
        assert (again.returncode, again.stderr.count("\n")) == (2, 1)

        back = run.finish("--bus.url", "embedded", workflow=workflow)
        assert (back.returncode, "all that it knows lies in that broker" in back.stdout) == (2, True), back.stdout
        ended = run.finish("--run.steps", str(num_steps), workflow=workflow)
        assert ended.returncode == 0, ended.stdout
        assert [one["server_id"] for one in events(run, "node-0", "server.started")] == ["0-0", "0-1", "0-1"]
        assert_accounts(run, num_steps=num_steps, max_staleness=2)
        _examined(run)
        refused = said_by("servers", run.directory, "add")
    assert (refused.returncode, refused.stderr) == (2, "run run: it does not run now; start it first\n")


def _have_one_server_for_another(run: Run, process: "subprocess.Popen[str]") -> None:
    """Who is removed is missed by nobody, and the last one cannot be."""
    assert "run run: 0-1: started on node 0 now" in _ordered(run, "add", "--by", "ann")
    wait_until(lambda: _serving(run) == ["0-0", "0-1"] or process.poll() is not None, "the second server")
    assert "run run: 0-0: gets nothing more" in _ordered(run, "remove", "0-0")
    wait_until(lambda: [one["id"] for one in look(run).servers] == ["0-1"], "the first one's end")
    wait_until(lambda: look(run).notes == [], "nobody who is missed")
    last = said_by("servers", run.directory, "remove", "0-1")
    assert (last.returncode, last.stderr.count("\n")) == (2, 1)
