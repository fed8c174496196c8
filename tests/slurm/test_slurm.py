"""With the real Slurm: three hosts, each with network and processes of its own, and what a user types there."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tools.one_slurm import Slurm, SlurmError, one_slurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

DEADLINE_S = 200.0
GROUPS, SIZE = 2, 4
SMALL = {
    "eval.dataset": "null", "rollout.batch_groups": GROUPS, "rollout.group_size": SIZE, "rollout.min_group_size": 2,
    "trainer.checkpoint_every_steps": 4,
}  # fmt: skip
ENDLESS, NUM_STEPS = 100_000, 15


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    """One for all tests: each has an allocation to itself, or waits for one."""
    with TemporaryDirectory(prefix="slurm-") as folder:
        try:
            with one_slurm(Path(folder), num_hosts=3) as running:
                yield running
        except SlurmError as exc:
            pytest.fail(str(exc)) if "NEED_SLURM" in os.environ else pytest.skip(f"{exc}; make test-slurm has one")


class Job:
    """A job whose script is one command: a run."""

    def __init__(self, slurm: Slurm, folder: Path, name: str) -> None:
        self.slurm = slurm
        self.directory = folder / name
        self.output = folder / f"{name}.out"
        self.id = ""

    def submit(self, *options: str, steps: int, **trainer: int) -> None:
        """Have it queued."""
        settings = SMALL | {f"trainer.{name}": value for name, value in trainer.items()}
        settings |= {"run.directory": self.directory.parent, "run.name": self.directory.name, "run.steps": steps}
        run = [sys.executable, "-m", "areal_async", "run", "workflows/gsm8k.py", "--config", "configs/gsm8k_cpu.yaml"]
        run += ["--no-display", "--launch.backend", "slurm"]
        run += [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        script = f"exec {shlex.join(run)}"
        words = ["sbatch", "--parsable", "--open-mode=append", f"--output={self.output}", *options, "--wrap", script]
        self.id = self.slurm.ask(*words)

    @property
    def num_steps(self) -> int:
        path = self.directory / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    @property
    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def wait_for_steps(self, number: int) -> None:
        """Wait until so many are trained."""
        self.wait_until(lambda: self.num_steps >= number, f"{number} steps")

    def wait_for_end(self) -> str:
        """Wait until the job has left its hosts; return its state and exit status."""
        self.wait_until(lambda: not self.slurm.ask("squeue", "--noheader", f"--jobs={self.id}"), "the job's end")
        told = dict(word.split("=", 1) for word in self.show().split() if "=" in word)
        return f"{told['JobState']} {told['ExitCode']}"

    def show(self) -> str:
        return self.slurm.ask("scontrol", "show", "job", self.id)

    def steps(self) -> dict[str, tuple[str, str]]:
        """Return id and host of each of its steps that runs, by name; of all of its components, each a job to Slurm."""
        lines = self.slurm.ask("squeue", "--steps", "--noheader", "--format=%j %i %N").splitlines()
        return {name: (step, host) for name, step, host in map(str.split, lines)}

    def processes(self) -> list[str]:
        """Return the command lines of all that still runs of it, on any host."""
        mark = str(self.directory)
        return [words for words in command_lines() if mark in words and "sbatch" not in words]

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        wait_until(is_so, lambda: f"{what}: {self.said}\n{self.slurm.log()}")


def wait_until(is_so: Callable[[], bool], what: Callable[[], str]) -> None:
    """Return when something that another process brings about has come true."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, f"waited for {what()}"
        time.sleep(0.1)


def command_lines() -> Iterator[str]:
    """Yield those of all processes of this machine, in whatever namespace."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                yield (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue


def test_steps_are_explained_asked_and_ended_on_every_host_of_the_allocation(slurm: Slurm, tmp_path: Path) -> None:
    inside = [sys.executable, "-m", "tests.slurm.in_allocation", tmp_path]
    step = ["srun", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--exact", *inside]
    words = slurm.ask("salloc", "--nodes=2", "--ntasks-per-node=2", "--gres=gpu:2", "--mem=2000", *step)

    told = json.loads(words)

    assert told["hosts"] == list(slurm.hosts[:2])
    assert told["address"] == "10.87.0.2"  # of the first host, not the loopback that each has
    assert told["address alone"]
    assert told["broker here"] == ["good", "1 beside this one (host-1), which reach the broker's address 10.87.0.2"]
    assert told["broker at the loopback"][0] == "error"
    refused = "the broker's address 10.87.0.2:9 cannot be reached from host-1: [Errno 111] Connection refused"
    assert told["broker nowhere"] == ["error", refused]
    assert told["failed"] == [1, "hello"]  # its own words, not Slurm's after them
    assert told["silent"] == [3, "srun: error: host-0: task 0: Exited with exit code 3"]
    for place in ("here", "there"):
        asked, killed = told[f"terminate {place}"], told[f"kill {place}"]
        # Who is asked to end decides about its children; who is killed takes them along.
        assert (asked["status"], asked["child_lived"], killed["status"]) == (0, True, -signal.SIGKILL)
    assert not [words for words in command_lines() if f"child of {tmp_path}" in words]
    assert told["gpus there"] == "0,1"
    # A launcher that has one CPU, as this one, holds back none of the job's two.
    assert (told["own cpus"], told["cpus"]) == (1, min(2, os.cpu_count() or 1))


def test_a_run_spans_its_allocation_outlives_killed_steps_and_a_cancelled_job_and_goes_on(
    slurm: Slurm, tmp_path: Path
) -> None:
    job = Job(slurm, tmp_path, "spans")
    job.submit("--nodes=2", ":", "--nodes=1", steps=ENDLESS, num_ranks=2, num_hosts=2)
    job.wait_for_steps(1)

    before = job.steps()
    status = slurm.ask(sys.executable, "-m", "areal_async", "status", "--run", job.directory)
    killed = ("node-0", "trainer-1")
    slurm.ask("scancel", "--signal=KILL", *(before[name][0] for name in killed))
    job.wait_until(lambda: all(job.steps().get(name, before[name]) != before[name] for name in killed), "new steps")
    num_steps = job.num_steps
    job.wait_for_steps(num_steps + 2)

    slurm.ask("scancel", job.id)  # SIGTERM to all processes of all steps at once
    cancelled = job.wait_for_end()
    job.wait_until(lambda: job.processes() == [], "no process to be left")
    num_steps, last = job.num_steps, max(job.num_steps + 2, NUM_STEPS)
    job.submit("--nodes=2", steps=last, num_hosts=1)
    resumed = job.wait_for_end()

    assert {name: host for name, (_, host) in before.items() if name != "batch"} == {
        "controller": "host-0",
        "trainer-0": "host-0",
        "trainer-1": "host-1",
        "node-0": "host-2",
    }
    assert "the broker listens at 10.87.0.2" in job.said
    assert "run spans: running" in status, "the login host sees the run"
    assert "node-0 ended by SIGKILL; starting node-0 again" in job.said
    assert "trainer-1 ended by SIGKILL; starting trainer again" in job.said
    assert cancelled == "CANCELLED 0:0"
    assert "run spans stopped" in job.said
    assert f"another start goes on from step {num_steps}" in job.said
    assert f"run spans goes on from step {num_steps}" in job.said
    assert "run spans finished" in job.said
    assert resumed == "COMPLETED 0:0"
    assert job.num_steps == last
    assert job.processes() == []
    found = slurm.ask(sys.executable, "-m", "areal_async", "doctor", "--json", "--run", job.directory)
    slots = json.loads(found)["slots"]
    assert slots["trained"] == last * GROUPS * SIZE
    assert (slots["lost"], slots["twice"], slots["over age"]) == (0, 0, 0)


def test_where_salloc_runs_its_command_on_the_login_host_a_run_is_refused(slurm: Slurm) -> None:
    run = [sys.executable, "-m", "areal_async", "run", "workflows/gsm8k.py", "--launch.backend", "slurm"]
    ended = subprocess.run(
        slurm.command("salloc", "--quiet", *run), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )

    assert ended.returncode == 2
    assert "launch.backend: got slurm on a host outside of the allocation" in ended.stderr


def test_a_slurm_that_is_told_to_end_takes_all_along(slurm: Slurm) -> None:
    del slurm  # skips where there can be none
    tool = subprocess.Popen(
        [sys.executable, "-m", "tools.one_slurm", "--hosts", "1", "--", "srun", "sh", "-c", 'echo "$SLURM_CONF"; cat'],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with tool:
        assert tool.stdout is not None
        folder = Path(tool.stdout.readline().strip()).parent
        assert [words for words in command_lines() if str(folder) in words]
        tool.terminate()
        status = tool.wait(timeout=DEADLINE_S)

    assert status == 128 + signal.SIGTERM
    assert not folder.exists()
    wait_until(lambda: not any(str(folder) in words for words in command_lines()), lambda: "its processes to be gone")
