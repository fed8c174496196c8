"""A small real run to inject faults into: started as by a user, found in /proc, signalled, stopped, measured.

Every process of the run inherits ``AREAL_FAULTS_FIRED``, the run's own folder for fault points; by that it is known.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from areal_async.config.settings import MIN_IMAGE_STREAM_BYTES, Settings
from areal_async.launch.run_directory import RunDirectory
from areal_async.process.failpoints import FIRED, SPECIFICATION
from areal_async.telemetry.wait_graph import STALLED

REPOSITORY = Path(__file__).resolve().parents[1]
LOOK_S = 0.1
MEASURE_S = 1.0
END_DEADLINE_S = 180.0
STOP_DEADLINE_S = 60.0
OUTPUT_LINES = 12
SMALL = {
    "eval.dataset": "null",
    "rollout.batch_groups": 4,
    "trainer.checkpoint_every_steps": 3,
    "run.watchdog_s": 60,
    "bus.operation_deadline_s": 60,
}
SMALL_DISK = {"rollout__max_stream_bytes": 128 << 20, "rollout__max_image_stream_bytes": MIN_IMAGE_STREAM_BYTES}
"""Settings of a run whose broker has a disk of some hundred megabytes."""
ENDLESS = 100_000
"""Steps of a run that is stopped."""
HELD = "trainer.before_step"
"""Where the trainer of a run that must not end yet is stopped."""


class FaultFailed(Exception):
    """The run did not behave; the row fails with this sentence."""


class FaultRun:
    """A run, over any number of starts."""

    def __init__(
        self,
        parent: Path,
        *,
        name: str = "run",
        workflow: str = "workflows/gsm8k.py",
        faults: str = "",
        environment: Mapping[str, str] | None = None,
        output: Path | None = None,
        **settings: Any,
    ) -> None:
        """Prepare it.

        Args:
            faults: as ``areal_async.process.failpoints`` reads.
            output: file for what it prints; ``None`` for one in ``parent``.
            settings: ``run__steps=12`` for ``--run.steps 12``.
        """
        self.directory = (parent / name).absolute()
        self.workflow = workflow
        self._output = (output or parent / f"{name}.out").absolute()
        self._fired = self._output.with_name(f"{name}.fired")  # a power cut to the run's disk must not undo it
        self.environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **(environment or {})}
        self.environment |= {FIRED: str(self._fired), SPECIFICATION: faults}
        chosen = {"run.directory": parent.absolute(), "run.name": name, **SMALL}
        chosen |= {key.replace("__", "."): value for key, value in settings.items()}
        self._arguments = [word for key, value in chosen.items() for word in (f"--{key}", str(value))]
        self._process: subprocess.Popen[bytes] | None = None
        self.peak_rss_bytes = 0
        """Peak resident size of all its processes together."""
        self._cpu_ticks: dict[tuple[int, str], int] = {}
        """(process, start) -> clock ticks of processor time at the last look."""
        self._closing = threading.Event()
        self._measuring = threading.Thread(target=self._measure, daemon=True)
        self._measuring.start()

    # starting and ending

    @property
    def command(self) -> list[str]:
        """The command line that a user would type."""
        command = [sys.executable, "-m", "areal_async", "run", self.workflow, "--config", "configs/gsm8k_cpu.yaml"]
        return [*command, "--no-display", *self._arguments]

    def start(self) -> None:
        """Start or resume the run in the background."""
        with open(self._output, "ab") as output:
            self._process = subprocess.Popen(
                self.command,
                cwd=REPOSITORY,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def order(self, verb: str, *words: str) -> None:
        """Give the live run an order, as a user would: ``pause`` and ``resume`` were obeyed when this returns.

        Raises:
            FaultFailed: the verb did not end, or with another status than 0.
        """
        command = [sys.executable, "-m", "areal_async", verb, "--run", str(self.directory), *words]
        try:
            done = subprocess.run(
                command,
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=STOP_DEADLINE_S,
            )
        except subprocess.TimeoutExpired:
            raise FaultFailed(f"{verb} did not end within {STOP_DEADLINE_S:g} s") from None
        if done.returncode != 0:
            raise FaultFailed(f"{verb} ended with status {done.returncode}: {done.stderr.strip()}")

    def start_role(self, *words: str, environment: Mapping[str, str] | None = None) -> "subprocess.Popen[bytes]":
        """Start one more process of a role, as a second launcher would."""
        with open(self._output, "ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "areal_async", *words, "--run-directory", str(self.directory)],
                cwd=REPOSITORY,
                env={**self.environment, "OMP_NUM_THREADS": "1", SPECIFICATION: "", **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def finish(self, *, deadline_s: float = END_DEADLINE_S) -> None:
        """Wait for the end by itself.

        Raises:
            FaultFailed: it did not come, or with another status than 0.
        """
        status = self.wait_end(deadline_s=deadline_s)
        if status != 0:
            raise FaultFailed(f"the run ended with status {status}: {self.last_words()}")

    def wait_end(self, *, deadline_s: float = END_DEADLINE_S) -> int:
        """Wait for the launcher's end; return its status."""
        assert self._process is not None
        try:
            return self._process.wait(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            raise FaultFailed(f"the run did not end within {deadline_s:g} s: {self.last_words()}") from None

    def stop(self) -> None:
        """Stop it as Ctrl-C does, and wait."""
        self.signal_launcher(signal.SIGINT)
        self.finish(deadline_s=STOP_DEADLINE_S)

    def kill_everything(self) -> None:
        """SIGKILL to all processes of the run, the broker first, before any of them can react."""
        pids = self.pids("nats-server")
        for pid in [*pids, *(pid for pid, _ in self._processes() if pid not in pids)]:
            send_signal(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        self.wait_until(lambda: not list(self._processes()), "all processes to be gone", deadline_s=20)

    def signal_launcher(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    # what it consists of

    def pids(self, *words: str) -> list[int]:
        """Return the processes of the run with all these words in their command line, guards excepted."""
        return [pid for pid, command in self._processes() if all(any(w in c for c in command) for w in words)]

    def role_pid(self, verb: str) -> int:
        """Return the one process of a role.

        Raises:
            FaultFailed: there is none.
        """
        found = self.role_pids(verb)
        if not found:
            raise FaultFailed(f"no process of the role {verb}: {self.last_words()}")
        return found[0]

    def role_pids(self, verb: str) -> list[int]:
        """Return the processes of a role."""
        return [pid for pid, command in self._processes() if command[1:4] == ["-m", "areal_async", verb]]

    def all_pids(self) -> list[int]:
        return [pid for pid, _ in self._processes()]

    def _processes(self) -> Iterator[tuple[int, list[str]]]:
        mark = f"{FIRED}={self._fired}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                        if any(command):
                            yield int(entry.name), command
                except OSError:
                    continue

    def _measure(self) -> None:
        while not self._closing.wait(MEASURE_S):
            pids = self.all_pids()
            pages = sum(_resident_pages(pid) for pid in pids)
            self.peak_rss_bytes = max(self.peak_rss_bytes, pages * os.sysconf("SC_PAGE_SIZE"))
            for pid in pids:
                since, ticks = _cpu_ticks(pid)
                self._cpu_ticks[pid, since] = ticks

    def close(self) -> None:
        """Measure no more."""
        self._closing.set()
        self._measuring.join()

    @property
    def cpu_s(self) -> float:
        """Processor seconds of all its processes; short of what each did since it was last seen, a second at most."""
        return sum(list(self._cpu_ticks.values())) / os.sysconf("SC_CLK_TCK")

    # what it has done

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Lines of ``metrics.jsonl``."""
        path = self.directory / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    @property
    def num_acknowledged(self) -> int:
        """Messages that producers noted as stored."""
        return sum(path.read_bytes().count(b"\n") for path in self.directory.glob("produced/*.jsonl"))

    def events(self, role: str, name: str) -> list[dict[str, Any]]:
        """Return the log lines of this event name, of all processes of a role."""
        found = []
        for path in sorted(self.directory.glob(f"logs/{role}*.jsonl")):
            for line in path.read_text(errors="replace").splitlines():
                if f'"{name}"' in line:
                    found.append(json.loads(line))
        return [one for one in found if one.get("event") == name]

    def culprits(self, *, since: datetime) -> list[str]:
        """Return whom the watchdog has named since then, in the controller and the launcher, as ``wait_graph`` does."""
        stalls = [*self.events("controller", STALLED), *self.events("launcher", STALLED)]
        return [one["culprit"] for one in stalls if datetime.fromisoformat(one["timestamp"]) > since]

    def has_fired(self, point: str) -> bool:
        """Say whether a fault point was reached and its fault carried out."""
        return any(self._fired.glob(f"{point}-*"))

    def wait_held(self) -> int:
        """Wait until the trainer stands still by a fault ``HELD:N:stop``: no run is over before it is struck.

        Returns:
            the process, which SIGCONT lets go on.
        """
        self.wait_until(lambda: self.has_fired(HELD) or not self.is_alive, "the trainer to stop")
        return self.role_pid("trainer")

    @property
    def run_directory(self) -> RunDirectory:
        return RunDirectory(self.directory)

    def settings(self) -> Settings:
        """Return the resolved settings."""
        return self.run_directory.read_settings()

    @property
    def output(self) -> str:
        """Output of its processes, over all starts."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def last_words(self) -> str:
        """Return the end of what the launcher said."""
        lines = self.output.splitlines()
        return " | ".join(line for line in lines[-OUTPUT_LINES:] if line.strip() and not line.startswith("step "))

    # waiting

    def wait_until(self, is_so: Callable[[], bool], what: str, *, deadline_s: float = END_DEADLINE_S) -> float:
        """Wait; return the seconds it took.

        Raises:
            FaultFailed: not within the deadline.
        """
        started = time.monotonic()
        while not is_so():
            if time.monotonic() - started > deadline_s:
                raise FaultFailed(f"waited {deadline_s:g} s for {what}: {self.last_words()}")
            time.sleep(LOOK_S)
        return time.monotonic() - started

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is trained.

        Raises:
            FaultFailed: the run ended before, or it took too long.
        """
        self.wait_until(lambda: len(self.steps) >= step or not self.is_alive, f"step {step}")
        if len(self.steps) < step:
            raise FaultFailed(f"the run ended before step {step}: {self.last_words()}")

    def wait_for_progress(self, *, deadline_s: float = 90.0) -> float:
        """Wait until something more is acknowledged or trained than now; return the seconds it took."""
        before = (self.num_acknowledged, len(self.steps))
        return self.wait_until(
            lambda: (self.num_acknowledged, len(self.steps)) > before or not self.is_alive,
            "progress",
            deadline_s=deadline_s,
        )


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _resident_pages(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0


def _cpu_ticks(pid: int) -> tuple[str, int]:
    """Return when a process was started, and its clock ticks on a processor."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[19], int(fields[11]) + int(fields[12])
    except (OSError, IndexError):
        return "", 0
