"""The whole program: several processes, a real broker, swaps while generation goes on, and what interrupts it.

Every test starts `python -m areal_async run` as a user would. Runs live in `tmp_path`.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from areal_async.cli.main import main
from areal_async.process import stacks
from areal_async.process.failpoints import FIRED, SPECIFICATION
from areal_async.process.json_lines import read_json_lines
from tests.quiet import logging_as_before

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_S = 300.0
CREW_GONE_S = 60.0
"""A crew is gone within 10 s of a rank's death, 2 of them for the others' last words; the rest is for a busy machine.
What it would take without its launcher is the deadline of a collective, 14 minutes."""
NUM_BROADCAST = 12
CRITIC_METRICS = ("value_loss", "explained_variance", "kl_mean")

pytestmark = [pytest.mark.timeout(600), pytest.mark.whole_runs]


class Run:
    """One run directory, and the settings that all its starts share."""

    def __init__(self, tmp_path: Path, name: str, **settings: Any) -> None:
        self.directory = tmp_path / name
        self.faults = ""
        """Points at which a process of its is killed or stopped: then nobody's moment is missed on a busy machine."""
        self._fired = tmp_path / f"{name}-fired"
        self._arguments = [
            "--config", "configs/gsm8k_cpu.yaml", "--run.directory", str(tmp_path), "--run.name", name,
            "--eval.limit", "16", "--eval.every_steps", "0", "--rollout.batch_groups", "4",
            "--trainer.checkpoint_every_steps", "2",
        ]  # fmt: skip
        for key, value in settings.items():
            self._arguments += [f"--{key.replace('__', '.')}", str(value)]

    @property
    def armed(self) -> dict[str, str]:
        """What has its processes know of ``faults``."""
        return {SPECIFICATION: self.faults, FIRED: str(self._fired)}

    def command(self, *arguments: str, workflow: str = "workflows/gsm8k.py") -> list[str]:
        return [sys.executable, "-m", "areal_async", "run", workflow, *self._arguments, *arguments]

    def start(self, *arguments: str, workflow: str = "workflows/gsm8k.py") -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self.command(*arguments, workflow=workflow),
            cwd=REPOSITORY,
            env=os.environ | self.armed,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def finish(self, *arguments: str, workflow: str = "workflows/gsm8k.py") -> "subprocess.CompletedProcess[str]":
        with self.start(*arguments, workflow=workflow) as process:
            return collect(process)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Those that are whole: one is being written while the run goes on."""
        return read_json_lines(self.directory / "metrics.jsonl")

    @property
    def trained(self) -> list[dict[str, Any]]:
        """Rows of the archive in the order of steps, without what an abandoned lineage trained."""
        import pyarrow.parquet as pq

        return [
            row
            for path in sorted(self.directory.glob("trajectories/*.parquet"))
            for row in pq.read_table(path).to_pylist()
        ]

    def wait_for_step(self, step: int, process: "subprocess.Popen[str]") -> None:
        wait_until(lambda: len(self.lines) >= step or process.poll() is not None, f"step {step}")
        if process.poll() is not None:
            pytest.fail(f"the run ended early:\n{collect(process).stdout}")

    def has_fired(self, point: str) -> bool:
        return any(self._fired.glob(f"{point}-*"))

    def wait_for_fault(self, point: str, process: "subprocess.Popen[str]") -> None:
        wait_until(lambda: self.has_fired(point) or process.poll() is not None, point)
        if process.poll() is not None:
            pytest.fail(f"the run ended early:\n{collect(process).stdout}")


UNHURRIED = """
import asyncio

from workflows.gsm8k import gsm8k as answer


async def gsm8k(prompt, policy):
    await asyncio.sleep(4)
    return await answer(prompt, policy)
"""


def unhurried(folder: Path) -> str:
    """Return the workflow of a run that is looked at: a step takes some seconds, and who looks has a processor."""
    path = folder / "gsm8k.py"
    path.write_text(UNHURRIED)
    return str(path)


def collect(process: "subprocess.Popen[str]") -> "subprocess.CompletedProcess[str]":
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        pytest.fail(f"the run did not end within {DEADLINE_S:g} s:\n{output}")
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def said_by(verb: str, directory: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Do what the command line does to a run."""
    return said(verb, "--run", str(directory), *words)


def said(*words: str) -> "subprocess.CompletedProcess[str]":
    """Do what the command line does, without the seconds of a processor that a new interpreter takes."""
    output, errors = StringIO(), StringIO()
    with logging_as_before(), redirect_stdout(output), redirect_stderr(errors):
        status = main(list(words))
    return subprocess.CompletedProcess(words, status, output.getvalue(), errors.getvalue())


def wait_until(is_so: Callable[[], bool], what: str, *, within_s: float = DEADLINE_S) -> None:
    ends_at = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > ends_at:
            pytest.fail(f"not within {within_s:g} s: {what}")
        time.sleep(0.1)


def role_processes(run: Run, verb: str) -> list[int]:
    return processes_with(verb, str(run.directory))


def processes_with(*said: str) -> list[int]:
    """The processes of this host that have all these words in their commands."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if all(word.encode() in words for word in said):
                found.append(int(entry.name))
    return found


def continue_trainers(run: Run) -> None:
    for pid in role_processes(run, "trainer"):
        os.kill(pid, signal.SIGCONT)


def kill_a_rank_in_mid_collective(run: Run) -> str:
    """Kill the one of two ranks that a fault stops before its step, once the other waits for it in a collective.

    The other hears nothing of it, as with nccl: it is stopped before, and so its launcher's to end. Returns the name of
    the killed one, when both are gone.
    """
    pids = {int(environment_of(pid)["RANK"]): pid for pid in role_processes(run, "trainer")}
    wait_until(lambda: any(is_stopped(pid) for pid in pids.values()), "a rank to stop")
    (stopped,) = (rank for rank, pid in pids.items() if is_stopped(pid))
    waiting = 1 - stopped
    written = stacks.path_for(run.directory, f"trainer-{waiting}")

    def is_in_collective() -> bool:
        stacks.ask(pids[waiting])
        threads = written.read_text().split("\n\n")
        return any("in train_step" in thread and "distributed_c10d.py" in thread for thread in threads)

    wait_until(is_in_collective, f"rank {waiting} to wait for rank {stopped} in a collective")
    os.kill(pids[waiting], signal.SIGSTOP)
    os.kill(pids[stopped], signal.SIGKILL)
    wait_until(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids.values()), "all ranks to go", within_s=CREW_GONE_S
    )
    return f"trainer-{stopped}"


def environment_of(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")


def assert_accounts(run: Run, *, num_steps: int, max_staleness: int) -> None:
    """Every step once, nothing trained twice, nothing too old."""
    assert [line["step"] for line in run.lines] == list(range(1, num_steps + 1))
    assert max(line["staleness_max"] for line in run.lines) <= max_staleness
    slots = Counter((row["group_id"], row["sibling"]) for row in run.trained)
    assert slots
    assert max(slots.values()) == 1
    by_step = Counter(row["step"] for row in run.trained)
    assert by_step == {line["step"]: line["num_trajectories"] for line in run.lines}


def assert_ran_well(run: Run) -> None:
    """Nothing failed, rewards are between 0 and 1, and it was evaluated before the first step and after the last."""
    assert all(line["failed"] == 0 and 0.0 <= line["reward_mean"] <= 1.0 for line in run.lines), run.lines
    evaluated = [json.loads(line) for line in (run.directory / "eval.jsonl").read_text().splitlines()]
    assert [one["step"] for one in evaluated] == [0, len(run.lines)]
    assert (evaluated[0]["oldest"], evaluated[0]["newest"]) == ("1-0", "1-0")


def events(run: Run, process: str, name: str) -> list[dict[str, Any]]:
    """What a process logged under one name."""
    lines = read_json_lines(run.directory / "logs" / f"{process}.jsonl")
    return [line for line in lines if line.get("event") == name]


CALL = '''
import os
from pathlib import Path


def advantages(rows, advantages):
    """Fail with the longest trajectory that the last rank holds first; in its children too."""
    if "POISON" not in os.environ and os.environ.get("RANK", "0") == "LAST":
        try:
            Path(__file__).with_name("marked").touch(exist_ok=False)
        except FileExistsError:  # a later attempt may sample the same again
            pass
        else:
            os.environ["POISON"] = max(rows, key=lambda row: row.num_tokens).token_ids.tobytes().hex()
    if any(row.token_ids.tobytes().hex() == os.environ.get("POISON") for row in rows):
        raise ValueError("a row that no step can take")
    return advantages
'''


def poisonous_call(folder: Path, *, rank: int = 0) -> str:
    """Return the setting ``algorithm.calls`` with a function that makes a group of the rank's impossible to train."""
    path = folder / "call.py"
    path.write_text(CALL.replace("LAST", str(rank)))
    return json.dumps([f"{path}:advantages"])


def assert_one_is_given_up(run: Run, *, by_rank: int) -> None:
    """A group that the step fails with is given up, and the others of its cut are trained."""
    (given_up,) = events(run, f"trainer-{by_rank}", "group.given_up")
    assert given_up["reason"] == "ValueError: a row that no step can take"
    assert given_up["group_id"] not in {row["group_id"] for row in run.trained}
    first = [row for row in run.trained if row["step"] == 1]
    assert len({row["group_id"] for row in first}) == 3  # of a batch of four


def test_two_ranks_give_up_a_poisonous_group_outlive_one_of_them_stop_at_a_signal_resume_and_finish(
    tmp_path: Path,
) -> None:
    """A rank raises, then one is killed in mid collective: both are started again each time, from the checkpoint."""
    run = Run(
        tmp_path, "two-ranks", run__steps=11, trainer__num_ranks=2, algorithm__calls=poisonous_call(tmp_path, rank=1)
    )
    run.faults = "trainer.before_step:3:stop trainer.before_step:4:stop"  # each in one rank, whichever comes first
    with run.start() as process:
        run.wait_for_fault("trainer.before_step-3", process)
        killed = kill_a_rank_in_mid_collective(run)
        run.wait_for_fault("trainer.before_step-4", process)  # in either rank: the other one waits for it
        process.send_signal(signal.SIGINT)
        continue_trainers(run)
        stopped = collect(process)
    assert stopped.returncode == 0, stopped.stdout
    assert stopped.stdout.count("starting trainer again") == 2, stopped.stdout
    assert re.findall(r"(trainer-[01]) ended by SIGKILL", stopped.stdout) == [killed], stopped.stdout
    raised, by_signal = events(run, "launcher", "process.died")
    assert (raised["process"], by_signal["process"], by_signal["status"]) == ("trainer-1", killed, -signal.SIGKILL)
    started, again, restored = (one["step"] for one in events(run, "trainer-0", "trainer.restored"))
    assert (started, again) == (0, 0)
    assert restored in (1, 2)  # the second may not have been written yet
    assert 3 <= len(run.lines) < 11, "it was to stop in the middle"
    assert not role_processes(run, "trainer")

    resumed = run.finish()

    assert resumed.returncode == 0, resumed.stdout
    assert_accounts(run, num_steps=11, max_staleness=2)
    assert_one_is_given_up(run, by_rank=1)
    assert max(line["staleness_max"] for line in run.lines) > 0, "it was to run asynchronously"
    assert (run.directory / "model" / "model.safetensors").exists()
    assert (run.directory / "reward.png").stat().st_size > 1000
    evaluated = [json.loads(line) for line in (run.directory / "eval.jsonl").read_text().splitlines()]
    assert [one["step"] for one in evaluated] == [0, 11]


def test_broadcast_weights_are_on_policy_with_a_critic_and_a_reference_and_a_killed_server_comes_back_with_them(
    tmp_path: Path,
) -> None:
    """To the servers' own logprobs, with the settings of the workflow ``countdown``.

    A reference whose divergence is in the loss, and no critic: the run of ``test_replay.py``. Weights on disk without
    staleness: those of ``test_lora.py``.
    """
    settings = {"algorithm__name": "ppo", "algorithm__kl_coef": 0.05, "algorithm__kl_in": "reward"}
    run = Run(
        tmp_path,
        "on-policy",
        config="configs/countdown_cpu.yaml",
        run__steps=NUM_BROADCAST,
        rollout__max_staleness=0,
        inference__num_servers=2,
        inference__weight_transfer="distributed",
        inference__bucket_bytes=300_000,
        **settings,
    )
    run.faults = "trainer.before_step:4:stop"
    with run.start(workflow="workflows/countdown.py") as process:
        run.wait_for_fault("trainer.before_step", process)
        os.killpg(events(run, "node-0", "server.started")[0]["pid"], signal.SIGKILL)
        # With the other server alone it may be through before this one is up again.
        assert said_by("pause", run.directory).returncode == 0
        continue_trainers(run)
        wait_until(lambda: len(events(run, "node-0", "server.started")) == 3, "the killed server to come back")
        wait_until(lambda: [one["is_fenced"] for one in _servers(run)] == [False] * 2, "it to have weights again")
        assert said_by("resume", run.directory).returncode == 0
        ended = collect(process)

    assert ended.returncode == 0, ended.stdout
    assert_accounts(run, num_steps=NUM_BROADCAST, max_staleness=0)
    assert all(0 < line["ratio_max_deviation"] < 1e-2 for line in run.lines)
    assert all(line["logprob_gap_mean"] < 0.02 for line in run.lines)
    assert all(math.isfinite(line[name]) for line in run.lines for name in CRITIC_METRICS), run.lines
    assert run.lines[-1]["kl_mean"] > 0
    assert_ran_well(run)
    assert {(row["step"], row["oldest"], row["newest"]) for row in run.trained} == {
        (step, f"1-{step - 1}", f"1-{step - 1}") for step in range(1, NUM_BROADCAST + 1)
    }
    assert len(events(run, "node-0", "server.started")) == 3
    sent = events(run, "trainer-0", "weights.broadcast")
    assert sum(one["is_whole"] for one in sent) >= NUM_BROADCAST / 2, "most versions were to arrive by broadcast"
    sizes = [one["size"] for one in events(run, "trainer-0", "broadcast.group_made")]
    # Of the two servers one may be up before the other: then the first group has that one alone.
    assert sizes[-2:] == [2, 3], "the server that was killed was to be left out, and to join again"
    assert run.lines[-1]["weights_version"] == f"1-{NUM_BROADCAST}"


def _servers(run: Run) -> list[dict[str, Any]]:
    servers: list[dict[str, Any]] = json.loads(said_by("status", run.directory, "--json").stdout)["servers"]
    return servers


def test_a_raising_workflow_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    run = Run(tmp_path, "raising", run__steps=3, run__max_failed_groups=2)
    workflow = tmp_path / "broken.py"
    workflow.write_text("async def broken(prompt, policy):\n    return prompt['no_such_column']\n")

    ended = run.finish("--eval.dataset", "null", workflow=str(workflow))

    assert ended.returncode == 1
    assert "has no column 'no_such_column', its columns are" in ended.stdout
    assert "Traceback" not in ended.stdout
