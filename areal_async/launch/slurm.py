"""Processes as steps of a Slurm allocation, started by ``srun`` and ended by ``scancel``.

    sbatch --nodes=1 ... --wrap "exec python -m areal_async run FILE.py --launch.backend slurm"

Of a heterogeneous job, all components are the run's hosts, in their order, so the first component trains first.

A step says its id and its process before it becomes the command, in a file beside its output: the hosts share the run
directory. ``srun`` stands for its step: it lives as long, has its exit status, and is told by the kernel to end it when
the launcher dies. ``scancel`` signals all processes of a step, its servers as well. So it kills; who is asked to end,
or where it stands, is signalled alone, and on another host by a step that does just this.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread

from areal_async.errors import PipelineError, UserError
from areal_async.launch.backend import REMOVED, LauncherWorks, ProcessSpec
from areal_async.launch.local import MAX_ASKED, ChildProcess, start_child
from areal_async.process import stacks
from areal_async.process.host import LOOPBACK
from areal_async.process.parent_death import guarded
from areal_async.protocol.run_state import OrderedHosts

PROGRAMS = ("srun", "scancel", "scontrol", "sinfo")
SIGNALLED = 128
"""``srun`` ends with this and the number of the signal that ended its step."""
DEADLINE_S = 120
"""For a step to get its place (there is one at once, unless the allocation is ending), and so for a signal that a step
passes on, and for an answer."""
NOISE = ("srun: ", "slurmstepd")
_SAY = 'echo "$SLURM_JOB_ID.$SLURM_STEP_ID $$" > "$1"; shift; exec "$@"'
"""What the step runs: its identity, then its command."""
LOOK_S = 5.0
"""From one question which hosts are gone to the next."""
GONE = re.compile(r"^(down|fail|failg|boot|pow_dn|poff|unk)|\*")
"""Short states of a host on which nothing starts; a star says that it does not answer."""


def on_host(host: str, name: str, *command: str, component: int = 0) -> list[str]:
    """Return the command line that runs another one as a step of its own. Pure.

    A step shares all that the allocation has on its host with the others: neither CPUs nor memory nor GPUs are divided.

    Args:
        component: of a heterogeneous job, the one that has this host.
    """
    place = ["--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--cpu-bind=none", "--export=ALL"]
    place += [f"--het-group={component}"] if component else []
    return ["srun", *place, f"--immediate={DEADLINE_S}", f"--job-name={name}", *command]


def step_command(spec: ProcessSpec, *, host: str, identity: Path, component: int = 0) -> list[str]:
    """Return the command line that runs a process as a step. Pure."""
    # Set inside the step: Slurm overwrites there which GPUs are visible.
    environment = ["env", *(f"{name}={value}" for name, value in spec.environment.items())]
    say = ["/bin/sh", "-c", _SAY, "sh", str(identity)]
    return on_host(host, spec.name, *say, *environment, *spec.command, component=component)


class SlurmProcess(ChildProcess):
    """One step, and the ``srun`` that stands for it."""

    noise = NOISE

    def __init__(
        self,
        spec: ProcessSpec,
        process: anyio.abc.Process,
        output_start_bytes: int,
        *,
        beside: Callable[..., list[str]],
        is_here: bool,
    ) -> None:
        """Stand for a step.

        Args:
            beside: makes the command line of another one on its host, of a name and a command.
            is_here: that is this host.
        """
        super().__init__(spec, process, output_start_bytes)
        self._beside = beside
        self._is_here = is_here
        self._orders: list[subprocess.Popen[bytes]] = []

    async def wait(self) -> int:
        status = await super().wait()
        for order in self._orders:
            await anyio.to_thread.run_sync(order.wait)
        is_signal = SIGNALLED < status <= SIGNALLED + signal.SIGRTMAX
        return SIGNALLED - status if is_signal else status

    def terminate(self) -> None:
        if self.has_ended:
            return
        _, pid = self._step
        with suppress(ProcessLookupError):
            if not pid:  # still waits for its place: there is nothing but srun, which takes its request back
                self._process.terminate()
            elif self._is_here:
                os.kill(pid, signal.SIGTERM)
            else:
                self._order(self._beside("stop", "kill", "-s", "TERM", str(pid)))

    def kill(self) -> None:
        if self.has_ended:
            return
        step, _ = self._step
        if step:
            self._order(["scancel", "--signal=KILL", step])
        else:
            with suppress(ProcessLookupError):
                self._process.kill()

    def ask_stacks(self) -> None:
        _, pid = self._step
        if not pid or self.has_ended or self._num_asked >= MAX_ASKED:
            return
        if self._is_here:
            self._num_asked += stacks.ask(pid)
        else:
            self._num_asked += 1
            self._order(self._beside("stacks", *stacks.ask_command(pid)))

    def last_sentence(self) -> str:
        """Return its own last line, and where it has said nothing, Slurm's: it may never have begun."""
        return super().last_sentence() or self._last_line()

    @property
    def _step(self) -> tuple[str, int]:
        """The step's id and its process; empty and 0 while it has not begun."""
        try:
            step, pid = identity_of(self.spec).read_text().split()
            return step, int(pid)
        except (OSError, ValueError):
            return "", 0

    def _order(self, command: list[str]) -> None:
        """Have Slurm do something with the step. That it has ended meanwhile is no failure: nothing is said of it."""
        with suppress(OSError):
            self._orders.append(
                subprocess.Popen(
                    ["timeout", str(DEADLINE_S), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )  # fmt: skip
            )


class SlurmBackend(LauncherWorks):
    """Starts steps of the allocation that this process runs in."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        """Find the allocation.

        Raises:
            UserError: this process is in none, or Slurm's programs are not on PATH or do not answer.
        """
        if "SLURM_JOB_ID" not in environment or "SLURMD_NODENAME" not in environment:
            raise UserError(
                "launch.backend: got slurm on a host outside of the allocation, where salloc runs what it is given; "
                "start it with sbatch, or by srun inside"
            )
        for program in PROGRAMS:
            if shutil.which(program) is None:
                raise UserError(
                    f"launch.backend: got slurm, and there is no program {program}; mend PATH, or take local"
                )
        self._host = environment["SLURMD_NODENAME"]
        self._components = {self._host: 0}
        for component, names in enumerate(_lists_of_hosts(environment)):
            for name in _answer(["scontrol", "show", "hostnames", names or self._host]).split():
                self._components.setdefault(name, component)
        self.hosts = tuple(self._components)
        self.absent: dict[str, str] = {}
        self._removed: dict[str, str] = {}

    def set_hosts(self, ordered: OrderedHosts) -> None:
        """Start nothing on those that were removed; there are no others than the job's."""
        for host in self._removed:
            self.absent.pop(host, None)
        self._removed = dict.fromkeys(ordered.removed, REMOVED)
        self.absent.update(self._removed)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Ask Slurm again and again which hosts are gone, where there are others."""
        async with anyio.create_task_group() as looks:
            if self.hosts[1:]:
                looks.start_soon(self._run_looks)
            yield
            looks.cancel_scope.cancel()

    async def _run_looks(self) -> None:
        """Keep up which hosts are gone.

        consumes:     what Slurm says of its hosts
        waits for:    the next look
        produces:     ``absent``
        unblocked by: cancellation alone
        """
        ask = ["sinfo", "--noheader", "--Node", "--format=%N %t", f"--nodes={','.join(self.hosts[1:])}"]
        while True:
            with suppress(UserError):  # the controller does not answer for a while
                gone = absent_in(await anyio.to_thread.run_sync(_answer, ask, abandon_on_cancel=True))
                self.absent.clear()
                self.absent.update(gone | self._removed)
            await anyio.sleep(LOOK_S)

    async def address(self) -> str:
        """Return the address at which Slurm's own step on another host reaches this one; the loopback without others.

        Raises:
            UserError: no step can be started there.
        """
        if not (others := self.hosts[1:]):
            return LOOPBACK
        ask = self._on_host(others[0], "address", "printenv", "SLURM_LAUNCH_NODE_IPADDR")
        return await anyio.to_thread.run_sync(_answer, ask)

    async def cannot_run(self, code: str, *words: str) -> Mapping[str, str]:
        """Run a piece of Python as a step on each other host; return those where it fails, each with its last words."""
        lost: dict[str, str] = {}

        async def run(host: str) -> None:
            ask = ["timeout", str(DEADLINE_S), *self._on_host(host, "question", sys.executable, "-c", code, *words)]
            ended = await anyio.run_process(ask, stdin=subprocess.DEVNULL, check=False)
            if ended.returncode:
                said = ended.stderr.decode(errors="replace").splitlines()
                own = [line for line in said if line.strip() and not line.startswith(NOISE)]
                lost[host] = (own or said or [f"status {ended.returncode}"])[-1]

        async with anyio.create_task_group() as asking:
            for host in self.hosts[1:]:
                asking.start_soon(run, host)
        return lost

    async def start(self, spec: ProcessSpec) -> SlurmProcess:
        """Start one step.

        Raises:
            PipelineError: as ``start_child``, or its file of before cannot be removed.
        """
        host, identity = spec.host or self._host, identity_of(spec)
        step = step_command(spec, host=host, identity=identity, component=self._components.get(host, 0))
        try:
            identity.unlink(missing_ok=True)
        except OSError as exc:
            raise PipelineError(f"{spec.name}: cannot be started: {exc}") from exc
        child = await start_child(spec, guarded(step, by=signal.SIGTERM))  # srun passes it on to its step
        return SlurmProcess(spec, *child, beside=partial(self._on_host, host), is_here=host == self._host)

    def _on_host(self, host: str, name: str, *command: str) -> list[str]:
        return on_host(host, name, *command, component=self._components.get(host, 0))


def _lists_of_hosts(environment: Mapping[str, str]) -> list[str]:
    """Return what names the hosts of each component of the job, which has one if it is not heterogeneous. Pure."""
    if size := environment.get("SLURM_HET_SIZE"):
        return [environment[f"SLURM_JOB_NODELIST_HET_GROUP_{component}"] for component in range(int(size))]
    return [environment.get("SLURM_JOB_NODELIST", "")]


def absent_in(said: str) -> dict[str, str]:
    """Return the hosts that are gone by what ``sinfo`` says, a host and its state a line, each with why. Pure."""
    states = [line.split() for line in said.splitlines() if len(line.split()) == 2]
    return {host: f"Slurm says that it is {state}" for host, state in states if GONE.search(state)}


def identity_of(spec: ProcessSpec) -> Path:
    """Return the file in which a step says its id and its process. Pure."""
    place = spec.output.parent if spec.output is not None else Path.cwd()
    return (place / f".{spec.name}.step").absolute()


def _answer(command: list[str]) -> str:
    try:
        ended = subprocess.run(
            ["timeout", str(DEADLINE_S), *command], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        words, status = ended.stderr, ended.returncode
    except OSError as exc:
        words, status = str(exc), -1
    if status or not ended.stdout.strip():
        raise UserError(f"launch.backend: {' '.join(command)}: got status {status}, {words.strip() or 'no answer'}")
    return ended.stdout.strip()
