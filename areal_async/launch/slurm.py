"""Processes as steps of a Slurm allocation, started by ``srun`` and ended by ``scancel``.

    sbatch --nodes=1 ... --wrap "python -m areal_async run FILE.py --launch.backend slurm"

Every step runs on the launcher's own host of the allocation: the ranks of a trainer meet there on the loopback, and so
does all that uses an embedded broker. Another host takes part by ``srun ... python -m areal_async node --join``. A step
says its id and its process before it becomes the command, in a file beside its output. ``srun`` stands for its step:
it lives as long, has its exit status, and is told by the kernel to end it when the launcher dies.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread

from areal_async import stacks
from areal_async.errors import PipelineError, UserError
from areal_async.launch.backend import ProcessSpec
from areal_async.launch.local import MAX_ASKED, last_line, opened

SIGNALLED = 128
"""``srun`` ends with this and the number of the signal that ended its step."""
CANCEL_DEADLINE_S = 20
NOISE = ("srun: ", "slurmstepd: ")
_SAY = 'echo "$SLURM_JOB_ID.$SLURM_STEP_ID $$" > "$1"; shift; exec "$@"'
"""What the step runs: its identity, then its command."""
_WITH_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG; srun passes it on to its step
if os.getppid() != int(sys.argv[1]):
    sys.exit("the launcher is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


def step_command(spec: ProcessSpec, *, host: str, identity: Path) -> list[str]:
    """Return the command line that runs a process as a step. Pure."""
    srun = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", f"--job-name={spec.name}"]
    # Set inside the step: Slurm overwrites there which GPUs are visible.
    environment = ["env", *(f"{name}={value}" for name, value in spec.environment.items())]
    say = ["/bin/sh", "-c", _SAY, "sh", str(identity)]
    return [*srun, "--unbuffered", "--export=ALL", *say, *environment, *spec.command]


class SlurmProcess:
    """One step, and the ``srun`` that stands for it."""

    def __init__(
        self, spec: ProcessSpec, process: anyio.abc.Process, *, identity: Path, output_start_bytes: int
    ) -> None:
        self.spec = spec
        self._process = process
        self._identity = identity
        self._output_start_bytes = output_start_bytes
        self._num_asked = 0
        self._cancels: list[subprocess.Popen[bytes]] = []

    async def wait(self) -> int:
        status = await self._process.wait()
        for cancel in self._cancels:
            await anyio.to_thread.run_sync(cancel.wait)
        is_signal = SIGNALLED < status <= SIGNALLED + signal.SIGRTMAX
        return SIGNALLED - status if is_signal else status

    def terminate(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def ask_stacks(self) -> None:
        _, pid = self._step
        if pid and self._process.returncode is None and self._num_asked < MAX_ASKED:
            self._num_asked += stacks.ask(pid)

    def last_sentence(self) -> str:
        if self.spec.output is None:
            return ""
        return last_line(self.spec.output, start_bytes=self._output_start_bytes, noise=NOISE)

    @property
    def _step(self) -> tuple[str, int]:
        """Its id and its process; empty and 0 while it has not begun."""
        try:
            step, pid = self._identity.read_text().split()
            return step, int(pid)
        except (OSError, ValueError):
            return "", 0

    def _end(self, number: signal.Signals) -> None:
        if self._process.returncode is not None:
            return
        step, _ = self._step
        if step:
            scancel = ["scancel", f"--signal={number.name.removeprefix('SIG')}", step]
            with suppress(OSError):
                self._cancels.append(subprocess.Popen(["timeout", str(CANCEL_DEADLINE_S), *scancel]))
        else:  # still waits for its place: there is nothing but srun, which takes its request back
            with suppress(ProcessLookupError):
                self._process.kill() if number is signal.SIGKILL else self._process.terminate()


class SlurmBackend:
    """Starts steps of the allocation that this process runs in."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """Find the allocation.

        Raises:
            UserError: this process is in none, or Slurm's programs are not on PATH.
        """
        if "SLURM_JOB_ID" not in environment or "SLURMD_NODENAME" not in environment:
            raise UserError(
                "launch.backend: got slurm on a host outside of the allocation, where salloc runs what it is given; "
                "start it with sbatch, or by srun inside"
            )
        self._host = environment["SLURMD_NODENAME"]
        for program in ("srun", "scancel"):
            if shutil.which(program) is None:
                raise UserError(
                    f"launch.backend: got slurm, and there is no program {program}; mend PATH, or take local"
                )

    async def start(self, spec: ProcessSpec) -> SlurmProcess:
        """Start one step.

        Raises:
            PipelineError: ``srun`` or the output file cannot be opened.
        """
        place = spec.output.parent if spec.output is not None else Path.cwd()
        identity = (place / f".{spec.name}.step").absolute()
        command = step_command(spec, host=self._host, identity=identity)
        try:
            identity.unlink(missing_ok=True)
            with opened(spec.output) as output:
                process = await anyio.open_process(
                    [sys.executable, "-c", _WITH_LAUNCHER, str(os.getpid()), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **spec.environment},
                    start_new_session=True,
                )
                start_bytes = output.tell() if output else 0
                return SlurmProcess(spec, process, identity=identity, output_start_bytes=start_bytes)
        except OSError as exc:
            raise PipelineError(f"{spec.name}: cannot be started: {exc}") from exc
