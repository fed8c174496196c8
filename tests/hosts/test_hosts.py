"""Ranks of the trainer on several hosts, each with a network of its own, and what may become of hosts and links."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.torch import load_file

from areal_async.protocol.types import Version
from tests.e2e.test_run import unhurried
from tools.compare_ranks import Part, random_rows, read_output, vocab_size, write_batch
from tools.faults_run import FaultRun
from tools.some_hosts import REMOTE_COMMAND, SomeHosts, some_hosts, why_not

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_HOSTS = 3
NUM_STEPS = 12
CUT_S = 30.0
DEADLINE_S = 200.0


@pytest.fixture
def hosts() -> Iterator[SomeHosts]:
    if reason := why_not():
        pytest.fail(reason) if "NEED_HOSTS" in os.environ else pytest.skip(reason)
    with some_hosts(NUM_HOSTS) as made:
        yield made


class SpreadRun(FaultRun):
    """A run whose launcher is on the first host."""

    def __init__(self, hosts: SomeHosts, parent: Path, **settings: Any) -> None:
        self._hosts = hosts
        others = json.dumps(hosts.addresses[1:])
        spread = {"launch__hosts": others, "launch__remote_command": REMOTE_COMMAND, "trainer__num_hosts": 2}
        super().__init__(parent, **{"trainer__num_ranks": 2, **spread, **settings})

    @property
    def command(self) -> list[str]:
        return self._hosts.command(0, *super().command)

    def doctor(self) -> str:
        """Have the run examined that has ended; return what is found.

        Raises:
            AssertionError: something is not proved.
        """
        return self.said("doctor")

    def said(self, *words: str, status: int = 0) -> str:
        """Return what a verb says of the run, asked on the first host, and that ends with this status."""
        command = [sys.executable, "-m", "areal_async", *words, "--run", str(self.directory)]
        done = subprocess.run(
            self._hosts.command(0, *command), cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stdout
        return done.stdout

    def presences(self) -> dict[str, str]:
        """Return of each process that the run is to have whether it is there."""
        status = json.loads(self.said("status", "--json"))
        return {f"{one['role']} {one['instance']}": one["presence"] for one in status["members"]}

    def rank_on(self, number: int) -> list[int]:
        """Return the processes of ranks on a host."""
        return sorted(set(self.role_pids("trainer")) & set(self._hosts.pids(number)))


@pytest.fixture
def spread(hosts: SomeHosts, tmp_path: Path) -> Iterator[SpreadRun]:
    run = SpreadRun(hosts, tmp_path, run__steps=NUM_STEPS, trainer__checkpoint_every_steps=2, rollout__batch_groups=2)
    try:
        yield run
    finally:
        run.kill_everything()
        run.close()


def test_a_run_outlives_a_cut_link_a_host_of_ranks_and_one_of_servers(hosts: SomeHosts, spread: SpreadRun) -> None:
    run = spread
    run.start()
    run.wait_for_step(1)
    assert [len(run.rank_on(number)) for number in range(NUM_HOSTS)] == [1, 1, 0]

    ranks = run.role_pids("trainer")
    hosts.cut(1)
    num_steps = len(run.steps)
    time.sleep(CUT_S)
    assert len(run.steps) <= num_steps + 1  # a step that was ready at the cut
    hosts.mend(1)
    run.wait_for_step(num_steps + 2)
    assert run.role_pids("trainer") == ranks, "TCP has sent it again"

    frozen = _freeze(hosts, run)
    run.wait_until(lambda: run.rank_on(2) != [], "a rank beside the servers")
    run.wait_for_step(len(run.steps) + 1)
    for pid in frozen:  # the agent stays as it is: it would end them
        os.kill(pid, signal.SIGCONT)
    run.wait_until(lambda: not any(map(_lives, frozen)), "the end of ranks that nobody waits for")
    hosts.kill(1)
    hosts.revive(1)
    run.wait_until(lambda: len(run.events("launcher", "host.joined")) == 3, "the host that was gone")

    hosts.kill(2)  # a rank, and all servers
    run.wait_until(lambda: "node-0 waits for host" in run.output, "a sentence about the servers' host")
    hosts.revive(2)
    run.finish()

    assert len(run.steps) == NUM_STEPS
    lineages = {Version.parse(line["weights_version"]).lineage for line in run.steps}
    assert len(lineages) == 3
    print(run.output, run.doctor())


def _freeze(hosts: SomeHosts, run: SpreadRun) -> list[int]:
    """Stop all that runs on the second host, and have the launcher lose it; return the ranks."""
    frozen = run.rank_on(1)
    assert frozen
    for pid in hosts.pids(1):
        os.kill(pid, signal.SIGSTOP)
    (shell,) = run.pids("areal_async.launch.agent", hosts.addresses[1])
    os.kill(shell, signal.SIGKILL)
    return frozen


def _lives(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    return False


def test_a_host_is_added_and_another_removed_by_order_and_both_orders_outlive_the_launcher(
    hosts: SomeHosts, tmp_path: Path
) -> None:
    _, second, third = hosts.addresses
    settings = {"trainer__num_ranks": 1, "trainer__num_hosts": 1, "launch__hosts": json.dumps([second])}
    workflow = unhurried(tmp_path)
    run = SpreadRun(hosts, tmp_path, workflow=workflow, run__steps=200, rollout__batch_groups=2, **settings)
    try:
        run.start()
        run.wait_for_step(1)
        assert "it is the launcher's own" in run.said("hosts", "remove", "127.0.0.1", status=2)
        assert "it is the last one that generates" in run.said("hosts", "remove", second, status=2)
        assert f"host {third}: a node starts there" in run.said("hosts", "add", third)
        run.wait_until(lambda: run.presences().get("node 1") == "ok", "the node of the host that was added")
        assert f"host {second}: its node takes nothing more" in run.said("hosts", "remove", second)
        run.wait_until(lambda: run.presences()["node 0"] == "ended", "the end of the node that was removed")
        run.wait_until(lambda: hosts.pids(1) and run.role_pids("node") != [], "a node")
        assert not set(run.role_pids("node")) & set(hosts.pids(1))
        run.wait_for_step(len(run.steps) + 2)
        assert "the run has none of that name" in run.said("hosts", "remove", second, status=2)

        run.stop()
        run.start()
        run.wait_for_step(len(run.steps) + 2)
        assert [bool(set(run.role_pids("node")) & set(hosts.pids(number))) for number in range(3)] == [
            False,
            False,
            True,
        ]
        assert f"host {second}: a node starts there" in run.said("hosts", "add", second)
        run.wait_until(lambda: run.presences().get("node 0") == "ok", "the node that it had")
        run.stop()
        print(run.output, run.doctor())
    finally:
        run.kill_everything()
        run.close()


@pytest.mark.nightly
def test_an_elastic_run_trains_on_with_the_hosts_that_are_left_and_with_all_once_they_are_back(
    hosts: SomeHosts, tmp_path: Path
) -> None:
    second = hosts.addresses[1]
    settings = {"launch__hosts": json.dumps([second]), "trainer__replicas": 2, "trainer__elastic": True}
    run = SpreadRun(hosts, tmp_path, workflow=unhurried(tmp_path), run__steps=300, rollout__batch_groups=2, **settings)

    def num_ranks() -> list[int]:
        return [len(run.rank_on(number)) for number in range(2)]

    try:
        run.start()
        run.wait_for_step(1)
        assert num_ranks() == [1, 1]
        hosts.kill(1)
        run.wait_until(lambda: num_ranks() == [1, 0], "the rank that is left")
        run.wait_for_step(len(run.steps) + 2)
        assert [name for name in run.presences() if name.startswith("trainer")] == ["trainer 0"]

        hosts.revive(1)
        run.wait_until(lambda: num_ranks() == [1, 1], "ranks on both hosts")
        run.wait_for_step(len(run.steps) + 2)
        assert "trainer ends in good order, to go on with other hosts" in run.output
        assert f"host {second}: its node takes nothing more" in run.said("hosts", "remove", second)
        run.wait_until(lambda: num_ranks() == [1, 0], "the end of the rank on the host that was removed")
        run.wait_for_step(len(run.steps) + 2)
        run.stop()
    finally:
        run.kill_everything()
        run.close()

    lineages = [Version.parse(line["weights_version"]).lineage for line in run.steps]
    assert max(lineages) == 4, "a start each: at first, with fewer, with all, with fewer"
    for lineage in set(lineages):  # a step takes every group that is due, so single ones may have more
        steps = [line for line in run.steps if Version.parse(line["weights_version"]).lineage == lineage]
        assert 2 <= min(line["num_groups"] for line in steps) < 4, "the batch stays as it is"
    print(run.output, run.doctor())


@pytest.mark.nightly
def test_ranks_on_two_hosts_go_back_live(hosts: SomeHosts, tmp_path: Path) -> None:
    kept = {"trainer__checkpoint_every_steps": 2, "trainer__keep_checkpoints": 100, "run__steps": NUM_STEPS}
    run = SpreadRun(hosts, tmp_path, workflow=unhurried(tmp_path), rollout__batch_groups=2, **kept)
    try:
        run.start()
        run.wait_for_step(3)
        run.said("rollback", "--to", "2")
        run.finish(deadline_s=2 * DEADLINE_S)
    finally:
        run.kill_everything()
        run.close()

    lineages = [Version.parse(line["weights_version"]).lineage for line in run.steps]
    assert lineages == [1] * 2 + [2] * (NUM_STEPS - 2)
    print(run.output, run.doctor())


def test_ranks_on_two_hosts_have_the_gradients_of_ranks_on_one(hosts: SomeHosts, tmp_path: Path) -> None:
    batch, model = tmp_path / "batch.npz", REPOSITORY / "configs" / "models" / "tiny"
    sequences = random_rows(16, max_tokens=48, vocab_size=vocab_size(model), seed=1)
    write_batch(batch, sequences)

    def part(name: str) -> Part:
        trainer = {"lr": 1e-4, "token_budget": 192, "num_ranks": 2}
        return Part(model=str(model), batch=str(batch), last=2, output=str(tmp_path / name), trainer=trainer)

    ranks = []
    for name, places in (("one", (0, 0)), ("two", (0, 1))):
        shared = {"MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": f"29{len(ranks)}00", "RENDEZVOUS_ID": name}
        shared |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "tools/compare_ranks.py", "--parts", msgspec.json.encode([part(name)]).decode()]
        for rank, place in enumerate(places):
            environment = os.environ | shared | {"RANK": str(rank)}
            ranks.append(subprocess.Popen(hosts.command(place, *words), cwd=REPOSITORY, env=environment))
    assert [rank.wait(timeout=DEADLINE_S) for rank in ranks] == [0] * 4
    one, two = (read_output(part(name), num_ranks=2) for name in ("one", "two"))

    assert one.keys() == two.keys()
    assert any("gradient" in name for name in one)
    for name, values in one.items():
        assert np.linalg.norm(values - two[name]) <= 1e-6 * np.linalg.norm(values), name


@pytest.mark.parametrize("verb", ["sft", "reward-model"])
def test_two_hosts_learn_from_data_what_one_does(hosts: SomeHosts, tmp_path: Path, verb: str) -> None:
    def tuned(name: str, *words: str) -> dict[str, Any]:
        config = f"configs/{verb.replace('-', '_')}_tiny.yaml"
        command = [sys.executable, "-m", "areal_async", verb, "--config", config]
        chosen = [
            "--model.path",
            "configs/models/tiny",
            "--eval.limit",
            "0",
            "--run.name",
            name,
            "--run.directory",
            str(tmp_path),
            "--run.steps",
            "3",
            "--trainer.num_ranks",
            "2",
        ]
        done = subprocess.run(
            hosts.command(0, *command, *chosen, *words), cwd=REPOSITORY, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        (path,) = (tmp_path / name / "model").glob("*.safetensors")
        return load_file(path)

    others = ["--trainer.num_hosts", "2", "--launch.hosts", json.dumps(hosts.addresses[1:2])]
    one, two = tuned("one"), tuned("two", *others, "--launch.remote_command", REMOTE_COMMAND)

    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert (tensor.double() - two[name].double()).norm() <= 1e-6 * tensor.double().norm(), name
