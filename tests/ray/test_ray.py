"""With the real Ray: a cluster of three hosts, made of network namespaces with a raylet on each."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tools.faults_run import ENDLESS, FaultRun
from tools.some_hosts import SomeHosts, some_hosts, why_not

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_HOSTS = 3
NUM_STEPS, GROUPS = 4, 2
PORT = 6379
DEADLINE_S = 60.0
STORE_BYTES = 80 << 20
OPEN = {"RAY_AUTH_MODE": "disabled"}
"""Nobody else reaches these hosts; by default Ray may take, or leave, a token in the user's home."""
HASTY = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "4"}
"""A host is given up after seconds; by default it takes half a minute."""
SMALL = {"trainer__checkpoint_every_steps": 2, "rollout__batch_groups": GROUPS}


class Cluster:
    """Raylets on hosts, the first beside the head."""

    def __init__(self, hosts: SomeHosts, folder: Path) -> None:
        self.hosts = hosts
        self.address = f"{hosts.addresses[0]}:{PORT}"
        self._folder = folder
        self._output = folder / "ray.out"
        self._started: list[subprocess.Popen[bytes]] = []

    def join(self, number: int) -> None:
        """Have a host join, as one that has booted."""
        ray = Path(sys.executable).with_name("ray")
        words = [ray, "start", "--block", f"--node-ip-address={self.hosts.addresses[number]}", "--num-cpus=1"]
        words += ["--disable-usage-stats", f"--object-store-memory={STORE_BYTES}"]
        head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={self._folder}/ray"]
        words += [f"--address={self.address}"] if number else head
        with open(self._output, "ab") as output:
            self._started.append(
                subprocess.Popen(
                    self.hosts.command(number, *words),
                    env={**os.environ, **OPEN, **HASTY},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )  # fmt: skip
            )

    def wait_until_up(self) -> None:
        """Return when all that were started have joined."""
        deadline = time.monotonic() + DEADLINE_S
        while self._output.read_text().count("Ray runtime started") < len(self._started):
            assert time.monotonic() < deadline, self._output.read_text()
            time.sleep(0.1)

    def wait(self) -> None:
        """Return when all is over that was started, as its hosts are."""
        for one in self._started:
            one.wait()

    def raylet(self, number: int) -> int:
        """Return the raylet of a host."""
        (pid,) = (pid for pid in self.hosts.pids(number) if _command(pid).split("\0")[0].endswith("/raylet"))
        return pid


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One for all tests."""
    reason = why_not() or ("" if importlib.util.find_spec("ray") else "got no package ray, need it; make ray")
    if reason:
        pytest.fail(reason) if "NEED_RAY" in os.environ else pytest.skip(reason)
    with some_hosts(NUM_HOSTS) as hosts, TemporaryDirectory(prefix="ray-") as folder:
        made = Cluster(hosts, Path(folder))
        for number in range(NUM_HOSTS):
            made.join(number)
            made.wait_until_up()
        yield made
    made.wait()


class RayRun(FaultRun):
    """A run whose launcher is on the first host."""

    def __init__(self, cluster: Cluster, parent: Path, **settings: Any) -> None:
        self._cluster = cluster
        spread = {"launch__backend": "ray", "launch__num_hosts": NUM_HOSTS, "trainer__num_hosts": 2}
        environment = {"RAY_ADDRESS": cluster.address, **OPEN}
        super().__init__(parent, trainer__num_ranks=2, environment=environment, **spread, **SMALL, **settings)

    @property
    def command(self) -> list[str]:
        return self._cluster.hosts.command(0, *super().command)

    @property
    def num_joined(self) -> int:
        """How often a host has joined it."""
        return len(self.events("launcher", "host.joined"))

    def num_on(self, number: int) -> int:
        """Return how many processes of the run are on a host."""
        return len(set(self.all_pids()) & set(self._cluster.hosts.pids(number)))


@pytest.fixture
def spread(cluster: Cluster, tmp_path: Path) -> Iterator[RayRun]:
    run = RayRun(cluster, tmp_path, run__steps=ENDLESS)
    try:
        yield run
    finally:
        run.kill_everything()
        run.close()


def _accounts(run: FaultRun) -> dict[str, Any]:
    """Return what the doctor counts of a run that has ended, and proves."""
    words = [sys.executable, "-m", "areal_async", "doctor", "--json", "--run", str(run.directory)]
    done = subprocess.run(words, cwd=REPOSITORY, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    accounts: dict[str, Any] = json.loads(done.stdout)
    return accounts


def test_a_run_has_the_accounts_of_one_on_this_host_alone(cluster: Cluster, tmp_path: Path) -> None:
    runs = [
        RayRun(cluster, tmp_path, name="spread", run__steps=NUM_STEPS),
        FaultRun(tmp_path, name="alone", run__steps=NUM_STEPS, trainer__num_ranks=2, **SMALL),
    ]
    try:
        for run in runs:
            run.start()
        for run in runs:
            run.finish()
        spread, alone = map(_accounts, runs)
    finally:
        for run in runs:
            run.kill_everything()
            run.close()

    assert spread["groups"] == alone["groups"]
    assert spread["slots"] == alone["slots"]
    assert spread["slots"]["trained"] == NUM_STEPS * GROUPS * 8


def test_a_run_outlives_a_raylet_and_a_host_and_all_of_it_ends_with_its_launcher(
    cluster: Cluster, spread: RayRun
) -> None:
    run = spread
    run.start()
    run.wait_for_step(1)
    assert min(run.num_on(number) for number in range(NUM_HOSTS)) > 0

    os.kill(cluster.raylet(1), signal.SIGKILL)
    run.wait_until(lambda: run.num_on(1) == 0, "the end of all that ran there")
    cluster.join(1)
    run.wait_until(lambda: run.num_joined == NUM_HOSTS + 1, "the host that was gone")
    run.wait_for_step(len(run.steps) + 2)
    cluster.hosts.kill(2)
    cluster.join(2)
    run.wait_until(lambda: run.num_joined == NUM_HOSTS + 2, "the host that was gone")
    run.wait_for_step(len(run.steps) + 2)
    run.signal_launcher(signal.SIGKILL)
    run.wait_until(lambda: run.all_pids() == [], "no process to be left")

    slots = _accounts(run)["slots"]
    assert (slots["lost"], slots["twice"], slots["over age"]) == (0, 0, 0)
