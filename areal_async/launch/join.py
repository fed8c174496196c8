"""A node that joins a live run from this host or another: all it needs is the broker's address and a key.

The run's settings come from its bucket; the node's own directory is ``<directory>/<run>/nodes/<node>``. Its publish log
goes to ``<directory>/<run>``, as those of the run's own nodes do: in a folder that all hosts share the doctor finds it.
The node runs under the same supervision as one that the launcher starts, and ends when the run does. A run that is
silent, its launcher or its broker, is not over: the node lets go of what it has and joins again once the run is back.
"""

import functools
import re
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import structlog

from areal_async.bus import Bus, Role, credentials_path, open_bus
from areal_async.config.settings import Settings
from areal_async.errors import BusError, PipelineError, UnreachableError, UserError
from areal_async.launch.backend import Backend
from areal_async.launch.blockages import run_blockages
from areal_async.launch.heartbeat_lock import BEAT_S, NUM_MISSED, held, next_word, run_beats
from areal_async.launch.plan import FIRST_NODE, Place, node_group, share_gpus
from areal_async.launch.rotation import run_rotation
from areal_async.launch.run_directory import RunDirectory
from areal_async.launch.supervisor import Notify, RunEnd, RunSupervisor
from areal_async.process.host import visible_gpus
from areal_async.process.signals import run_until_told
from areal_async.protocol.run_state import Control, CrewState, Holder, RunState, SharedSettings
from areal_async.protocol.subjects import CONTROL, LAUNCHER, RUN_STATE, SETTINGS, TOKEN, Names
from areal_async.rollout.user_code.source_hashes import code_of_tasks, differing, source_hashes
from areal_async.telemetry import log as logging

NODES = "nodes"
SILENT_SHARE = 0.75
"""Share of the time for which bus operations are tried again, after which a silent run is away: the node is stopped
in good order before it gives the broker up by itself."""
MAX_HOST = 32
"""Characters of the host's name in a node's."""
STOPPING = "stopping: the node gives back what it has not finished; once more kills everything now"

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True, slots=True)
class Invitation:
    """What leads to a run."""

    run: str
    url: str
    credentials: Path | None
    """``None`` for the key that a run in ``directory`` left for its nodes, where there is one."""
    ca: Path | None
    directory: Path
    """Directory of this host's runs."""
    allows_other_files: bool = False
    """Take part though workflows or rewards are others here than the run's."""

    @property
    def key(self) -> Path | None:
        """Credentials file that is shown to the broker."""
        local = credentials_path(self.directory / self.run, Role.NODE)
        return self.credentials or (local if local.exists() else None)


Prepare = Callable[[Settings], Settings]
"""Makes of the run's settings those that hold here, and refuses what this host has not."""


def fresh_node_id() -> str:
    """Return an id that no other node has: the host's name and something random."""
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:MAX_HOST] or "node"
    return f"{host}-{secrets.token_hex(3)}"


async def join(invitation: Invitation, *, node_id: str, backend: Backend, prepare: Prepare, notify: Notify) -> RunEnd:
    """Be a node of a live run until that ends, until SIGTERM or SIGINT, or until it fails here.

    A run whose launcher falls silent may be started again: then the node joins it anew.

    Raises:
        UserError: there is no such run, it is over, it has such a node already, or this host lacks something.
        PipelineError: the run has failed, it does not come back, or the node died too often.
    """
    if not TOKEN.fullmatch(node_id):
        raise UserError(f"--node-id: got {node_id!r}, need letters, digits, _ or -")
    guest = _Guest(invitation, node_id=node_id, backend=backend, prepare=prepare, notify=notify)
    end = await guest.stay()
    while end is None:
        end = await guest.wait_for_run() or await guest.stay()
    return end


def localised(settings: Settings, invitation: Invitation) -> Settings:
    """Return a run's settings as they hold for a node that reaches its broker by this invitation. Pure."""
    bus = settings.bus.model_copy(
        update={
            "url": invitation.url,
            "credentials": invitation.key and invitation.key.absolute(),
            "ca": invitation.ca and invitation.ca.absolute(),
        }
    )
    run = settings.run.model_copy(update={"directory": invitation.directory.absolute()})
    # The trainer's GPUs are those of the launcher's host.
    inference = settings.inference.model_copy(update={"colocate": None})
    return settings.model_copy(update={"bus": bus, "run": run, "inference": inference})


async def _read_settings(bus: Bus) -> tuple[SharedSettings, Settings]:
    """Return what a run shares, and the settings in it."""
    run = bus.names.run
    shared, _ = await bus.get(SETTINGS, SharedSettings)
    if shared is None:
        raise UserError(f"run {run}: nothing is known of it at this broker; start it first, or mend --run or --join")
    try:
        return shared, Settings.model_validate_json(shared.settings)
    except ValueError as exc:
        raise UserError(
            f"run {run}: its settings, written by areal_async {shared.library}, mean nothing to this one: "
            f"{' '.join(str(exc).split())[:300]}; install the same version here"
        ) from exc


async def _state_of(bus: Bus) -> tuple[RunState | None, Control | None]:
    return (await bus.get(RUN_STATE, RunState))[0], (await bus.get(CONTROL, Control))[0]


def _why_over(state: RunState | None, control: Control | None) -> str | None:
    """Say why no node is wanted any more; None while they are."""
    if state is not None and state.state != "running":
        return f"has {state.state}" + (f": {state.reason}" if state.reason else "")
    if control is not None and control.is_stopping:
        return "was ordered to stop"
    return None


class _Guest:
    """A node of a run that lives elsewhere, also while that run is away."""

    def __init__(
        self, invitation: Invitation, *, node_id: str, backend: Backend, prepare: Prepare, notify: Notify
    ) -> None:
        self._invitation = invitation
        self._run = invitation.run
        self._node_id = node_id
        self._backend = backend
        self._prepare = prepare
        self._notify = notify
        self._wait_s = 0.0
        self._met: Holder | None = None
        """The launcher whose run was joined the last time."""
        self._is_away = False
        self._state: RunState | None = None
        """Once the run is over, how it ended."""

    async def stay(self) -> RunEnd | None:
        """Join the run and take part in it; None when it is away, and may come back.

        Raises:
            PipelineError: as ``join``.
        """
        async with self._open() as bus:
            shared, settings = await _read_settings(bus)
            settings = localised(settings, self._invitation)
            await self._check_open(bus)
            self._check_files(settings, shared)
            settings = self._prepare(settings)  # before the id is taken: nobody is to wait for a host that is refused
            self._wait_s = settings.launch.join_wait_s
            self._met, _ = await bus.get(LAUNCHER, Holder)
            if await next_word(bus, LAUNCHER, within_s=NUM_MISSED * BEAT_S) is None:
                return None
            key, what = bus.names.node_key(self._node_id), f"--node-id: node {self._node_id} of run {self._run}"
            async with held(bus, key, what=what, notify=self._notify) as holder:
                return await self._stay_as(holder, settings, bus)

    async def wait_for_run(self) -> RunEnd | None:
        """Wait until the run is back, and return None; or say how it, or the wait, came to its end.

        consumes:     the launcher's key, SIGINT and SIGTERM
        waits for:    a launcher that was not met before, or the one that was, if it speaks again
        produces:     the end of the wait
        unblocked by: ``launch.join_wait_s``

        Raises:
            PipelineError: the run has failed, or does not come back in time.
        """
        ends: list[RunEnd | None] = []

        async def look() -> None:
            ends.append(await self._look_for_run())

        with anyio.move_on_after(self._wait_s):
            if await run_until_told(look, signal.SIGINT, signal.SIGTERM):
                ends.append(RunEnd.STOPPED)
        if not ends:
            raise PipelineError(
                f"run {self._run}: was away for {self._wait_s:g} s, need it back within launch.join_wait_s; start it "
                "again, then join it"
            )
        return ends[0]

    # Taking part

    async def _stay_as(self, holder: Holder, settings: Settings, bus: Bus) -> RunEnd | None:
        directory = RunDirectory((self._invitation.directory / self._run / NODES / self._node_id).absolute())
        with directory.locked(f"{self._run}, node {self._node_id}"):
            directory.write_settings(settings)
            directory.write_bus_url(self._invitation.url)
            logging.configure("keeper", directory.logs)
            return await self._keep(settings, directory, bus, holder)

    async def _keep(self, settings: Settings, directory: RunDirectory, bus: Bus, holder: Holder) -> RunEnd | None:
        """Keep the node alive for as long as the run is there and wants it; None when the run is away."""
        self._is_away, self._state = False, None
        supervisor = self._supervisor(settings, directory, bus)
        what = f"node {self._node_id} of run {self._run}"
        silent_s = SILENT_SHARE * settings.bus.operation_deadline_s
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_blockages, directory.path, self._notify)
            tasks.start_soon(run_rotation, directory.logs)
            for key, kind in ((RUN_STATE, RunState), (CONTROL, Control)):
                tasks.start_soon(self._stop_when_over, bus, key, kind, supervisor.stop)
            tasks.start_soon(self._follow_launcher, bus, silent_s, supervisor.stop)
            tasks.start_soon(functools.partial(_keep_lock, bus, bus.names.node_key(self._node_id), holder, what=what))
            log.info("node.joined", run=self._run, node_id=self._node_id)
            self._notify(f"node {self._node_id} joins run {self._run}; its logs are in {directory.logs}")
            try:
                end = await supervisor.run()
            except (PipelineError, ExceptionGroup):
                if not self._is_away:
                    raise
                end = RunEnd.STOPPED  # it did not get over the broker's absence
            tasks.cancel_scope.cancel()
        if self._is_away and end is RunEnd.STOPPED:
            return None
        return self._end_of_run(end)

    def _supervisor(self, settings: Settings, directory: RunDirectory, bus: Bus) -> RunSupervisor:
        gpus = visible_gpus()
        share_gpus(gpus, num_inference=settings.num_inference_gpus, num_trainer=0)  # refuses too few
        group = node_group(settings, directory, node_id=self._node_id, place=Place(None, gpus))

        async def read_failure() -> str | None:
            state, _ = await bus.get(RUN_STATE, RunState)
            return self._failure_in(state)

        return RunSupervisor(
            [group], backend=self._backend, notify=self._notify, read_failure=read_failure, stopping=STOPPING
        )

    async def _stop_when_over(
        self, bus: Bus, key: str, kind: type[RunState] | type[Control], stop: Callable[[], None]
    ) -> None:
        """Stop the node when the run is over.

        consumes:     one of the keys that say so
        waits for:    its next change
        produces:     a stop
        unblocked by: cancellation; where the broker is away for too long, ``_follow_launcher`` does the rest
        """
        with suppress(BusError):
            async for one in bus.watch_key(key, kind):
                state, control = (one, None) if isinstance(one, RunState) else (None, one)
                if (over := _why_over(state, control)) is not None:
                    self._state = state or self._state
                    self._notify(f"the run {over}")
                    stop()

    async def _follow_launcher(self, bus: Bus, silent_s: float, stop: Callable[[], None]) -> None:
        """Stop the node when the run is away: its launcher is silent, or another has taken its place.

        consumes:     the launcher's key
        waits for:    its next beat
        produces:     a stop
        unblocked by: ``silent_s`` without a beat
        """
        beats = bus.watch_key(LAUNCHER, Holder)
        while True:
            launcher = await _next_of(beats, within_s=silent_s) or await _next_of(beats, within_s=2 * BEAT_S)
            if launcher is None or launcher != self._met:
                break
        self._is_away = True
        self._notify(
            f"run {self._run}: its launcher has not been heard for {silent_s:g} s"
            if launcher is None
            else f"run {self._run} was started again; joining it anew"
        )
        stop()

    # Being without the run

    async def _look_for_run(self) -> RunEnd | None:
        revision: int | None = None
        is_told = False
        while True:
            with suppress(BusError, UnreachableError):
                async with self._open() as bus:
                    while True:
                        launcher, seen = await bus.get(LAUNCHER, Holder)
                        if launcher is not None and (launcher != self._met or revision not in (None, seen)):
                            log.info("run.returned", run=self._run, launcher=launcher.place)
                            return None
                        self._state, control = await _state_of(bus)
                        if (over := _why_over(self._state, control)) is not None:
                            self._notify(f"the run {over}")
                            return self._end_of_run(RunEnd.STOPPED)
                        revision, is_told = seen, is_told or self._notify_away()
                        await anyio.sleep(BEAT_S / 2)
            is_told = is_told or self._notify_away()
            await anyio.sleep(BEAT_S)

    def _notify_away(self) -> bool:
        self._notify(f"run {self._run} is away; waiting up to {self._wait_s:g} s for it to come back")
        log.warning("run.away", run=self._run, wait_s=self._wait_s)
        return True

    # Both

    def _end_of_run(self, end: RunEnd) -> RunEnd:
        """Return how the node has ended.

        Raises:
            PipelineError: the run has failed.
        """
        if (failure := self._failure_in(self._state)) is not None:
            raise PipelineError(failure)
        return end

    def _failure_in(self, state: RunState | None) -> str | None:
        return f"run {self._run} has failed: {state.reason}" if state and state.state == "failed" else None

    def _open(self) -> AbstractAsyncContextManager[Bus]:
        invitation = self._invitation
        return open_bus(
            invitation.url,
            names=Names(self._run),
            role=Role.NODE,
            instance=f"{self._node_id}-keeper",
            credentials=invitation.key,
            ca=invitation.ca,
        )

    def _check_files(self, settings: Settings, shared: SharedSettings) -> None:
        """Refuse rewards that are not the run's, or warn of them.

        Raises:
            UserError: they are others; or the run is of a library that tells neither its files nor of its launcher.
        """
        here = source_hashes(code_of_tasks(settings))
        if here and not shared.files:
            raise UserError(
                f"run {self._run}: was started by areal_async {shared.library}, which does not say what nodes that "
                "join need to know; start the run again with this version"
            )
        if not (others := differing(here, shared.files)):
            return
        sentence = f"run {self._run}: got other files here than the run has: {', '.join(others)}"
        if not self._invitation.allows_other_files:
            raise UserError(
                f"{sentence}; need the same, or this node's rewards mean something else: bring the run's here, or "
                "give --allow-other-files"
            )
        self._notify(f"WARNING: {sentence}; taking part all the same, by --allow-other-files")

    async def _check_open(self, bus: Bus) -> None:
        run, node_id = self._run, self._node_id
        if (over := _why_over(*await _state_of(bus))) is not None:
            raise UserError(f"run {run}: it {over}; start it again before nodes join")
        group, _ = await bus.get(bus.names.crew_key(f"node-{node_id}"), CrewState)
        holder, _ = await bus.get(bus.names.node_key(node_id), Holder)
        # The launcher tells of nodes that have joined, too: whether those live, their own keys say.
        if node_id == FIRST_NODE or (holder is None and group is not None and group.state == "running"):
            raise UserError(
                f"--node-id: run {run} has a node {node_id} already, need another id; leave it out for a new one"
            )


async def _keep_lock(bus: Bus, key: str, holder: Holder, *, what: str) -> None:
    """Keep the node's id for as long as the broker is there; that it is not, ``_follow_launcher`` notices."""
    try:
        await run_beats(bus, key, holder, what=what)
    except BusError as exc:
        log.warning("node.claim_lost", reason=str(exc))


async def _next_of(beats: AsyncIterator[Holder], *, within_s: float) -> Holder | None:
    with anyio.move_on_after(within_s), suppress(BusError):
        return await anext(beats)
    return None
