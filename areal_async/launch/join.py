"""A node that joins a live run from this host or another: all it needs is the broker's address and a key.

The run's settings come from its bucket; the node's own directory is ``<directory>/<run>/nodes/<node>``. Receipts go to
``<directory>/<run>``, as those of the run's own node do: where that is one folder for all hosts, the doctor finds them.
The node runs under the same supervision as one that the launcher starts, and ends when the run does.
"""

import functools
import re
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio
import structlog

from areal_async import log as logging
from areal_async.bus import Bus, Role, credentials_path, open_bus
from areal_async.errors import UserError
from areal_async.host import visible_gpus
from areal_async.launch.backend import Backend
from areal_async.launch.blockages import run_blockages
from areal_async.launch.gpus import share_gpus
from areal_async.launch.plan import FIRST_NODE, node_crew
from areal_async.launch.run_directory import RunDirectory
from areal_async.launch.supervisor import Notify, RunEnd, Supervisor
from areal_async.run_state import Control, CrewState, SharedSettings
from areal_async.settings import Settings
from areal_async.subjects import CONTROL, RUN_STATE, SETTINGS, TOKEN, Names
from areal_async.types import RunState

NODES = "nodes"
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
    """With the runs of this host."""

    @property
    def key(self) -> Path | None:
        """What is shown to the broker."""
        local = credentials_path(self.directory / self.run, Role.NODE)
        return self.credentials or (local if local.exists() else None)


Prepare = Callable[[Settings, RunDirectory], Settings]
"""Makes of the run's settings those that hold here, and refuses what this host has not."""


def fresh_node_id() -> str:
    """Return an id that no other node has: the host's name and something random."""
    host = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:MAX_HOST] or "node"
    return f"{host}-{secrets.token_hex(3)}"


def check_node_id(node_id: str) -> None:
    """Raise UserError unless a node may be called so."""
    if not TOKEN.fullmatch(node_id):
        raise UserError(f"--node-id: got {node_id!r}, need letters, digits, _ or -")


async def join(invitation: Invitation, *, node_id: str, backend: Backend, prepare: Prepare, notify: Notify) -> RunEnd:
    """Be a node of a live run until that ends, until SIGTERM or SIGINT, or until it fails here.

    Raises:
        UserError: there is no such run, it is over, it has such a node already, or this host lacks something.
        PipelineError: the node died too often.
    """
    check_node_id(node_id)
    directory = RunDirectory((invitation.directory / invitation.run / NODES / node_id).absolute())
    async with open_bus(
        invitation.url,
        names=Names(invitation.run),
        role=Role.NODE,
        instance=f"{node_id}-keeper",
        credentials=invitation.key,
        ca=invitation.ca,
    ) as bus:
        settings = localised(await _shared_settings(bus), invitation)
        await _check_open(bus, node_id)
        with directory.locked(f"{invitation.run}, node {node_id}"):
            directory.write_settings(settings)
            directory.write_bus_url(invitation.url)
            settings = prepare(settings, directory)
            directory.write_settings(settings)
            logging.configure("keeper", directory.logs)
            return await _keep(settings, directory, bus, node_id=node_id, backend=backend, notify=notify)


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
    return settings.model_copy(update={"bus": bus, "run": run})


async def _shared_settings(bus: Bus) -> Settings:
    shared, _ = await bus.get(SETTINGS, SharedSettings)
    run = bus.names.run
    if shared is None:
        raise UserError(f"run {run}: nothing is known of it at this broker; start it first, or mend --run or --join")
    try:
        return Settings.model_validate_json(shared.settings)
    except ValueError as exc:
        raise UserError(
            f"run {run}: its settings, written by areal_async {shared.library}, mean nothing to this one: "
            f"{' '.join(str(exc).split())[:300]}; install the same version here"
        ) from exc


async def _check_open(bus: Bus, node_id: str) -> None:
    run = bus.names.run
    state, control = await _state_of(bus)
    if (over := _why_over(state, control)) is not None:
        raise UserError(f"run {run}: it {over}; start it again before nodes join")
    crew, _ = await bus.get(bus.names.crew_key(f"node-{node_id}"), CrewState)
    if node_id == FIRST_NODE or (crew is not None and crew.state == "running"):
        raise UserError(
            f"--node-id: run {run} has a node {node_id} already, need another id; leave it out for a new one"
        )


async def _state_of(bus: Bus) -> tuple[RunState | None, Control | None]:
    return (await bus.get(RUN_STATE, RunState))[0], (await bus.get(CONTROL, Control))[0]


def _why_over(state: RunState | None, control: Control | None) -> str | None:
    """Say why no node is wanted any more; None while they are."""
    if state is not None and state.state != "running":
        return f"has {state.state}"
    if control is not None and control.is_stopping:
        return "was ordered to stop"
    return None


async def _keep(
    settings: Settings, directory: RunDirectory, bus: Bus, *, node_id: str, backend: Backend, notify: Notify
) -> RunEnd:
    """Keep the node alive for as long as the run wants it."""
    frozen = settings.frozen_policies.values()
    num_gpus = settings.inference.num_gpus + sum(one.num_servers * one.tensor_parallel for one in frozen)
    gpus, _ = share_gpus(visible_gpus(), num_inference=num_gpus, num_trainer=0)
    crew = node_crew(settings, directory, node_id=node_id, gpus=gpus)

    async def read_failure() -> str | None:
        state, _ = await bus.get(RUN_STATE, RunState)
        return state.reason if state is not None and state.state == "failed" else None

    supervisor = Supervisor([crew], backend=backend, notify=notify, read_failure=read_failure, stopping=STOPPING)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_blockages, directory.path, notify)
        for key, kind in ((RUN_STATE, RunState), (CONTROL, Control)):
            tasks.start_soon(functools.partial(_heed, bus, key, kind, stop=supervisor.stop, notify=notify))
        log.info("node.joined", run=settings.run.name, node_id=node_id)
        notify(f"node {node_id} joins run {settings.run.name}; its logs are in {directory.logs}")
        end = await supervisor.run()
        tasks.cancel_scope.cancel()
    return end


async def _heed(
    bus: Bus, key: str, kind: type[RunState] | type[Control], *, stop: Callable[[], None], notify: Notify
) -> None:
    """Stop the node when the run is over.

    consumes:     one of the keys that say so
    waits for:    its next change
    produces:     a stop
    unblocked by: cancellation alone
    """
    async for one in bus.watch_key(key, kind):
        state, control = (one, None) if isinstance(one, RunState) else (None, one)
        if (over := _why_over(state, control)) is not None:
            notify(f"the run {over}")
            stop()
