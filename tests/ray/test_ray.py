"""With the real Ray: a cluster of three hosts, made of network namespaces with a raylet on each."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.compare_backends import COUNTED
from tools.faults_run import ENDLESS, FaultRun
from tools.one_ray import OneRay, one_ray, why_not

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_HOSTS = 3
NUM_STEPS, GROUPS = 15, 2
SMALL = {"trainer__checkpoint_every_steps": 2, "rollout__batch_groups": GROUPS}


@pytest.fixture(scope="module")
def cluster() -> Iterator[OneRay]:
    """One for all tests."""
    if reason := why_not():
        pytest.fail(reason) if "NEED_RAY" in os.environ else pytest.skip(reason)
    with one_ray(NUM_HOSTS) as made:
        yield made


class RayRun(FaultRun):
    """A run whose launcher is on the first host; ``is_job``: submitted there, as ``ray job submit`` does it."""

    def __init__(self, cluster: OneRay, parent: Path, *, is_job: bool = False, **settings: Any) -> None:
        self._cluster, self._is_job = cluster, is_job
        spread = {"launch__backend": "ray", "launch__num_hosts": NUM_HOSTS, "trainer__num_hosts": 2}
        super().__init__(parent, trainer__num_ranks=2, environment=cluster.environment, **spread, **SMALL, **settings)

    @property
    def command(self) -> list[str]:
        words = super().command
        return self._cluster.job(*words, folder=REPOSITORY) if self._is_job else self._cluster.command(*words)

    @property
    def num_joined(self) -> int:
        """How often a host has joined it."""
        return len(self.events("launcher", "host.joined"))

    def num_on(self, number: int) -> int:
        """Return how many processes of the run are on a host."""
        return len(set(self.all_pids()) & set(self._cluster.hosts.pids(number)))


@pytest.fixture
def spread(cluster: OneRay, tmp_path: Path) -> Iterator[RayRun]:
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


def test_a_submitted_job_has_the_accounts_of_a_run_on_this_host_alone(cluster: OneRay, tmp_path: Path) -> None:
    runs = [
        RayRun(cluster, tmp_path, is_job=True, name="spread", run__steps=NUM_STEPS),
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

    # How many more were admitted than trained is up to when the last cut came, of which none knows before.
    counted = [{name: one["slots"][name] for name in COUNTED} for one in (spread, alone)]
    assert counted[0] == counted[1]
    assert counted[0]["trained"] == NUM_STEPS * GROUPS * 8
    for one in (spread, alone):
        groups = one["groups"]
        assert groups["trained"] == groups["admitted"] - groups.get("abandoned", 0) == NUM_STEPS * GROUPS


def test_a_run_outlives_a_raylet_and_a_host_and_all_of_it_ends_with_its_launcher(
    cluster: OneRay, spread: RayRun
) -> None:
    run = spread
    run.start()
    run.wait_for_step(1)
    assert min(run.num_on(number) for number in range(NUM_HOSTS)) > 0

    os.kill(cluster.raylet(1), signal.SIGKILL)
    run.wait_until(lambda: run.num_on(1) == 0, "the end of all that ran there")
    cluster.join(1)
    cluster.wait_until_up()
    run.wait_until(lambda: run.num_joined == NUM_HOSTS + 1, "the host that was gone")
    run.wait_for_step(len(run.steps) + 2)
    cluster.hosts.kill(2)
    cluster.join(2)
    cluster.wait_until_up()
    run.wait_until(lambda: run.num_joined == NUM_HOSTS + 2, "the host that was gone")
    run.wait_for_step(len(run.steps) + 2)
    run.signal_launcher(signal.SIGKILL)
    run.wait_until(lambda: run.all_pids() == [], "no process to be left")

    slots = _accounts(run)["slots"]
    assert (slots["lost"], slots["twice"], slots["over age"]) == (0, 0, 0)
