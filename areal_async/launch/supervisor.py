"""Keeping the processes of a run alive, and ending them in the right order. On any backend.

    group     processes that live and die together: the controller, a node, all ranks of the trainer
    a death   the whole group is started again after a pause, until its limit; then the run ends with the cause. Deaths
              long ago, or before work that lasts, no longer count: a run of weeks outlives any number of them. Nor
              does one with an excuse: what caused it is known and will not be run again
    a host    that is gone is waited for, where no other has room for the group
    status 2  the user's mistake: the run ends at once with that process's sentence
    the end   the group that ``ends_run`` exits 0, then the others are stopped

The first SIGINT or SIGTERM stops group by group (the trainer checkpoints first), the second kills everything;
neither loses anything that was stored, so the run can be resumed after both.
"""

import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import anyio
import anyio.abc
import structlog

from areal_async.errors import PipelineError, UserError
from areal_async.launch.backend import Backend, Process, ProcessSpec
from areal_async.launch.process_group import Death, end_all, run_together
from areal_async.protocol.events import now
from areal_async.protocol.run_state import CrewState

FIRST_PAUSE_S = 0.5
"""Before the first restart; twice as many before each further one."""
LONGEST_PAUSE_S = 15.0
MAX_EXCUSED = 100
"""Deaths with an excuse, without any lasting work between them, after which the next ones count."""
OUTDATED_S = 20.0
"""How long a group is outdated before it is asked to end: a host that comes and goes is not worth it."""
HOST_LOOK_S = 1.0
"""From one look whether a host that is gone is back to the next."""
FAILED_STOP_S = 10.0
"""How long processes get to end themselves once the run has failed."""

STOPPING = "stopping: the trainer finishes its step and checkpoints; once more kills everything now"

Notify = Callable[[str], None]
"""Takes one line for the user."""


log = structlog.get_logger()


class RunEnd(Enum):
    """How a run that did not fail came to its end."""

    FINISHED = "finished"
    ALREADY_FINISHED = "already finished"
    STOPPED = "stopped"
    KILLED = "killed"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessGroup:
    """Processes that are started, restarted and stopped together."""

    name: str
    make_specs: Callable[[], Sequence[ProcessSpec]]
    """Called for each start: some of a specification (a port) holds for one start alone."""
    stop_deadline_s: float
    """How long it may take to end itself when asked to."""
    max_restarts: int = 5
    restart_window_s: float | None = 600.0
    """Deaths longer ago than this are forgotten; ``None`` forgets none for its age."""
    work_done: Callable[[], int] | None = None
    """Asked at each death for the amount of lasting work; when it has grown, the deaths before are forgotten."""
    excuse: Callable[[Death], str | None] | None = None
    """Asked at each death for the sentence that excuses it: then it does not count. None where nothing does."""
    is_outdated: Callable[[Sequence[str]], bool] | None = None
    """Asked again and again with the hosts of its processes, whether it is to be started anew with others."""
    ends_run: bool = False
    """Exiting 0 finishes the run; the others are then stopped."""
    may_finish: bool = False
    """Exiting 0 is no death: its work is done."""


@dataclass(slots=True)
class _SupervisedGroup:
    """A process group at work, as it is supervised."""

    group: ProcessGroup
    processes: list[Process] = field(default_factory=list)
    ended: anyio.Event = field(default_factory=anyio.Event)
    deaths: deque[float] = field(default_factory=deque)
    num_excused: int = 0
    work_done: int = 0
    """Amount of lasting work at the last death."""
    is_asked_to_end: bool = False
    is_running: bool = False
    renewal: str = ""
    """Why it was asked to end, or killed, so that it is started anew: whatever it ends with is no death."""
    stopping: anyio.Event = field(default_factory=anyio.Event)
    """Set once it is not to be started again."""
    num_starts: int = 0
    hosts: list[str] = field(default_factory=list)
    """Of each of its processes."""
    last_death: str = ""

    def on_start(self, process: Process) -> None:
        self.processes.append(process)
        if self.is_asked_to_end:  # while it was being started
            process.terminate()

    def excuse(self, death: Death) -> str | None:
        """Return why a death does not count; None when it does."""
        self._note_work()
        excuse = self.group.excuse(death) if self.group.excuse is not None else None
        if excuse is None or self.num_excused == MAX_EXCUSED:
            return None
        self.num_excused += 1
        return excuse

    def note_death(self) -> None:
        """Count one more, and forget those that no longer tell against a restart."""
        group, now = self.group, time.monotonic()
        self._note_work()
        self.deaths.append(now)
        while group.restart_window_s is not None and self.deaths[0] < now - group.restart_window_s:
            self.deaths.popleft()

    def _note_work(self) -> None:
        work_done = self.group.work_done() if self.group.work_done is not None else 0
        if work_done > self.work_done:
            self.deaths.clear()
            self.num_excused = 0
        self.work_done = work_done  # less, where the run has gone back

    def ask_to_end(self) -> None:
        """Ask the first process, which takes the others along."""
        self.is_asked_to_end = True
        if self.processes:
            self.processes[0].terminate()


class RunSupervisor:
    """Runs the process groups of one run until that ends. One use each."""

    def __init__(
        self,
        groups: Sequence[ProcessGroup],
        *,
        backend: Backend,
        notify: Notify,
        read_failure: Callable[[], Awaitable[str | None]],
        on_change: Callable[[CrewState], None] = lambda _: None,
        stopping: str = STOPPING,
    ) -> None:
        """Take the groups in the order in which they are to be stopped.

        Args:
            stopping: what the user is told when a stop begins.
            read_failure: asked after each death: why the run as a whole has failed, ``None`` when it has not.
            on_change: told of every start, death and end. It must not block.
        """
        self._members = [_SupervisedGroup(group) for group in groups]
        self._backend = backend
        self._notify = notify
        self._read_failure = read_failure
        self._on_change = on_change
        self._stopping_sentence = stopping
        self._stopping = anyio.Event()
        self._is_asked_to_stop = anyio.Event()
        self._over = anyio.Event()
        self._tasks: anyio.abc.TaskGroup | None = None
        self._end: RunEnd | None = None

    async def run(self) -> RunEnd:
        """Start all groups and return when the run has ended and no process is left.

        consumes:     exits of processes, SIGINT and SIGTERM
        waits for:    the end of the run
        produces:     restarts, and one line for the user about each
        unblocked by: a group that ends the run, a signal, or a failure

        Raises:
            UserError: a process exited with status 2.
            PipelineError: a group died too often, or the run was declared failed.
        """
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._stop_at_signals)
                tasks.start_soon(self._stop_when_asked)
                self._tasks = tasks
                for member in self._members:
                    tasks.start_soon(self._run_member, member)
                await self._over.wait()
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                # When the run failed, each process saves what it can first.
                await end_all(self._processes, grace_s=FAILED_STOP_S if self._end is None else 0)
        assert self._end is not None
        return self._end

    # What may be asked of it while it runs

    def ask_stacks(self) -> None:
        """Have every process write where it stands."""
        for process in self._processes:
            process.ask_stacks()

    def num_starts(self, name: str) -> int:
        """Return how often a process group was started; 0 when there is none of that name."""
        return sum(member.num_starts for member in self._members if member.group.name == name)

    def restart(self, name: str) -> None:
        """Kill a process group, frozen or not, so that it is started again as one that died."""
        for member in self._members:
            if member.group.name == name and not self._stopping.is_set():
                for process in member.processes:
                    process.kill()

    def renew(self, name: str, reason: str) -> None:
        """Kill a process group that runs, so that it is started anew: this is no death. One that does not, will be."""
        for member in self._members:
            if member.group.name == name and member.is_running and not self._stopping.is_set():
                member.renewal = reason
                for process in member.processes:
                    process.kill()

    def add(self, group: ProcessGroup) -> None:
        """Keep one more group alive, which is stopped just before the last one; one that is there already stays."""
        if self._stopping.is_set() or any(member.group.name == group.name for member in self._members):
            return
        member = _SupervisedGroup(group)
        self._members.insert(len(self._members) - 1, member)
        if self._tasks is not None:
            self._tasks.start_soon(self._run_member, member)

    async def remove(self, name: str) -> None:
        """Stop a group as at the end of the run, and forget it; one that is not there is no error."""
        for member in [one for one in self._members if one.group.name == name]:
            await self._stop_member(member)
            if member in self._members:
                self._members.remove(member)

    def stop(self) -> None:
        """Stop the run as the first signal does."""
        self._is_asked_to_stop.set()

    @property
    def _processes(self) -> list[Process]:
        return [process for member in self._members for process in member.processes]

    # Process groups

    async def _run_member(self, member: _SupervisedGroup) -> None:
        """Keep one group alive until it is done, is stopped or dies too often.

        consumes:     exits of its processes
        waits for:    the first death, or all of them exiting 0
        produces:     restarts
        unblocked by: the processes themselves; the pause between restarts also by a stop
        """
        group = member.group
        while not member.stopping.is_set():
            death = await self._run_once(member)
            if member.stopping.is_set():
                if death is not None and death.status > 0:
                    self._notify(f"while stopping, {death}")
                break
            if member.renewal:
                self._note_change(member, "died", member.renewal)
                member.renewal = ""
                continue
            if death is None and (group.ends_run or group.may_finish):
                self._note_change(member, "finished")
                if group.ends_run:
                    self._notify(f"{group.name} has finished the run")
                    await self._stop_others(member)
                    self._finish(RunEnd.FINISHED)
                break
            await self._judge(member, death or Death(group.name, 0, "nobody asked it to end"))
        if member.stopping.is_set():
            self._note_change(member, "stopped")
        member.ended.set()

    async def _judge(self, member: _SupervisedGroup, death: Death) -> None:
        """End the run because of a death, or wait until the group may be started again."""
        log.info("process.died", process=death.name, status=death.status, sentence=death.sentence)
        self._note_change(member, "died", str(death))
        if death.status == UserError.exit_code:
            raise UserError(death.sentence or f"{death}; see {self._output_of(member, death)}")
        if (reason := await self._read_failure()) is not None:
            raise PipelineError(reason)
        group = member.group
        if (excuse := member.excuse(death)) is not None:
            self._notify(f"{excuse}; starting {group.name} again")
            return
        member.note_death()
        if len(member.deaths) > group.max_restarts:
            window = f" in {group.restart_window_s / 60:g} minutes" if group.restart_window_s else ""
            progress = " without getting any further" if group.work_done else ""
            raise PipelineError(
                f"{group.name}: died {len(member.deaths)} times{window}{progress}, need at most {group.max_restarts}; "
                f"last, {death}; see {self._output_of(member, death)}"
            )
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (len(member.deaths) - 1))
        self._notify(f"{death}; starting {group.name} again (restart {len(member.deaths)} of {group.max_restarts})")
        with anyio.move_on_after(pause_s):
            await member.stopping.wait()

    async def _run_once(self, member: _SupervisedGroup) -> Death | None:
        member.processes = []
        member.num_starts += 1
        specs = await self._specs_where_there_are_hosts(member)
        if member.stopping.is_set():
            return None
        member.hosts = [spec.host or self._backend.hosts[0] for spec in specs]
        self._note_change(member, "running", member.last_death)
        member.is_running = True
        async with anyio.create_task_group() as watching:
            if member.group.is_outdated is not None:
                watching.start_soon(self._renew_when_outdated, member, member.group.is_outdated)
            death = await run_together(specs, self._backend, on_start=member.on_start)
            watching.cancel_scope.cancel()
        member.is_running = False
        return death

    async def _renew_when_outdated(
        self, member: _SupervisedGroup, is_outdated: Callable[[Sequence[str]], bool]
    ) -> None:
        """Have a group end in good order once it has been outdated for long, to be started anew.

        consumes:     which hosts are there
        waits for:    the next look
        produces:     the end of its processes
        unblocked by: cancellation, when they have ended
        """
        group = member.group
        num_looks = 0
        while num_looks * HOST_LOOK_S < OUTDATED_S:
            await anyio.sleep(HOST_LOOK_S)
            num_looks = num_looks + 1 if is_outdated(member.hosts) else 0
        self._notify(f"{group.name} ends in good order, to go on with other hosts")
        member.renewal = "started anew on other hosts"
        member.processes[0].terminate()
        await anyio.sleep(group.stop_deadline_s)
        for process in member.processes:
            process.kill()

    async def _specs_where_there_are_hosts(self, member: _SupervisedGroup) -> Sequence[ProcessSpec]:
        """Return what is to be started, once no host of it is gone; or when a stop begins."""
        said: str | None = None
        while True:
            specs = member.group.make_specs()
            gone = [spec.host for spec in specs if spec.host is not None and spec.host in self._backend.absent]
            if not gone or member.stopping.is_set():
                return specs
            host = gone[0]
            sentence = f"{member.group.name} waits for host {host}: {self._backend.absent[host]}"
            if said != host:
                said = host
                self._notify(sentence)
                self._note_change(member, "waiting", sentence)
            with anyio.move_on_after(HOST_LOOK_S):
                await member.stopping.wait()

    def _note_change(self, member: _SupervisedGroup, state: str, reason: str = "") -> None:
        if state == "died":
            member.last_death = reason
        name, num_starts, hosts = member.group.name, member.num_starts, member.hosts
        self._on_change(CrewState(name=name, state=state, num_starts=num_starts, hosts=hosts, reason=reason, at=now()))

    # The end

    async def _stop_when_asked(self) -> None:
        """Stop group by group when asked to, each by its own deadline.

        consumes:     an order
        waits for:    it
        produces:     the end of the run
        unblocked by: cancellation when the run is over
        """
        await self._is_asked_to_stop.wait()
        if not self._stopping.is_set():
            self._notify(self._stopping_sentence)
            await self._stop_others(None)
            self._finish(RunEnd.STOPPED)

    async def _stop_at_signals(self) -> None:
        """Stop at the first signal, kill at the second.

        consumes:     SIGINT and SIGTERM
        waits for:    the next one
        produces:     the end of the run
        unblocked by: cancellation when the run is over
        """
        is_second = False
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                if is_second:
                    self._notify("killing everything")
                    self._finish(RunEnd.KILLED)
                self.stop()
                is_second = True

    async def _stop_others(self, spared: _SupervisedGroup | None) -> None:
        self._stopping.set()
        for member in self._members:  # none is started again while those before it end
            member.stopping.set()
        for member in list(self._members):
            if member is not spared:
                await self._stop_member(member)

    async def _stop_member(self, member: _SupervisedGroup) -> None:
        """Ask a group to end, and kill it when it does not."""
        member.stopping.set()
        member.ask_to_end()
        with anyio.move_on_after(member.group.stop_deadline_s):
            await member.ended.wait()
            return
        self._notify(f"{member.group.name} did not end within {member.group.stop_deadline_s:g} s; killing it")
        for process in member.processes:
            process.kill()
        await member.ended.wait()

    def _finish(self, end: RunEnd) -> None:
        self._end = self._end or end
        self._over.set()

    def _output_of(self, member: _SupervisedGroup, death: Death) -> str:
        return next((str(p.spec.output) for p in member.processes if p.spec.name == death.name), "logs")
