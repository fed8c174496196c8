"""The nodes of ``bench_scale``, simulated: all that a node says to the broker, without servers and without a model.

A workflow is a pause and ready-made tokens. Leases, heartbeats, outbox, metrics, services and polls are a node's own.
"""

import sys
import time
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import anyio
import msgspec
import numpy as np
import structlog

from areal_async import Policy, Prompt
from areal_async.bus import Role, open_run_bus
from areal_async.config.settings import Settings
from areal_async.process.gc_pauses import spare_pauses
from areal_async.protocol.types import Sequence as TokenSequence
from areal_async.protocol.types import Slot, SlotStatus, Trajectory, Version
from areal_async.rollout import group
from areal_async.rollout.group import GroupRun
from areal_async.rollout.metrics import Pace, run_metrics, server_reports
from areal_async.rollout.node import _Node
from areal_async.rollout.node_context import NodeContext
from areal_async.rollout.server_services import run_server_services

WORKFLOW = "scale"
LOOK_S = 0.01
CONNECT_DEADLINE_S = 120.0
"""Many start at once here, on a few processors."""


class Job(msgspec.Struct, kw_only=True):
    """What a process is told."""

    settings: dict[str, Any]
    url: str
    file: str
    """Where it writes its lines."""
    first: int = 0
    count: int = 0
    """Nodes."""
    num_tokens: int = 0
    """Of a trajectory."""
    answer_s: float = 0.0
    """How long a group takes."""
    step_s: float = 0.0
    """How long a step takes, its wait for data included."""


class Line(msgspec.Struct):
    """Where a process stands."""

    at_s: float
    """By the clock that all processes have (``time.monotonic``)."""
    step: int
    tick_s: float
    """Most processor time of its loop between two looks, since the last line."""
    note: dict[str, float] = {}


class Lines:
    """A process's own file."""

    def __init__(self, job: Job) -> None:
        self._path = Path(job.file)
        self.step = 0
        self.note: dict[str, float] = {}

    async def run(self) -> None:
        """Look at the loop until cancelled."""
        with self._path.open("wb", buffering=0) as file:
            while True:
                ends_at_s, tick_s, worked_s = time.monotonic() + 1.0, 0.0, time.thread_time()
                while time.monotonic() < ends_at_s:
                    await anyio.sleep(LOOK_S)
                    now_s = time.thread_time()
                    tick_s, worked_s = max(tick_s, now_s - worked_s), now_s
                file.write(msgspec.json.encode(Line(time.monotonic(), self.step, tick_s, self.note)) + b"\n")


async def scale(prompt: Prompt, policy: Policy) -> float:
    """Be a workflow's name; nobody calls it."""
    raise NotImplementedError


class ReadyMadeGroup(GroupRun):
    """A group whose workflow is a pause, and whose tokens were there before."""

    num_tokens = 0
    answer_s = 0.0

    async def _run_calls(self) -> None:
        await anyio.sleep(self.answer_s)
        for sibling in self._siblings:
            trajectory = self._trajectory(sibling)
            self._node.counts.add(trajectory.slot)
            self._outbox.put(trajectory)

    def _trajectory(self, sibling: int) -> Trajectory:
        version, num_tokens = self._ticket.version, self.num_tokens
        slot = Slot(
            sibling=sibling,
            sample_uid=f"{self._ticket.group_id}.{sibling}.{self._producer}",
            status=SlotStatus.SCORED,
            reward=float(sibling % 2),
            num_tokens=num_tokens,
            num_output_tokens=num_tokens - num_tokens // 4,
            oldest=version,
            newest=version,
        )
        return Trajectory(slot=slot, sequences=[_tokens(version, num_tokens)])


@lru_cache(maxsize=8)
def _tokens(version: str, num_tokens: int) -> TokenSequence:
    rng = np.random.default_rng(1)
    mask = np.arange(num_tokens) >= num_tokens // 4
    return TokenSequence(
        token_ids=rng.integers(0, 50_000, num_tokens, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -rng.random(num_tokens, dtype=np.float32), 0).astype(np.float32),
        versions=np.where(mask, Version.parse(version).pack(), -1).astype(np.int64),
    )


async def run_nodes(job: Job, settings: Settings) -> None:
    """Be some nodes, each with a connection and a server of its own."""
    ReadyMadeGroup.num_tokens, ReadyMadeGroup.answer_s = job.num_tokens, job.answer_s
    group.GroupRun = ReadyMadeGroup  # type: ignore[misc]
    spare_pauses()
    async with anyio.create_task_group() as nodes:
        nodes.start_soon(Lines(job).run)
        for number in range(job.first, job.first + job.count):
            nodes.start_soon(_run_node, settings, job.url, f"n{number}")
            await anyio.sleep(0.02)


async def _run_node(settings: Settings, url: str, node_id: str) -> None:
    """Be a node: all of its loops but the supervision of a server that there is not."""
    async with (
        open_run_bus(
            settings,
            settings.run_directory,
            url,
            Role.NODE,
            instance=node_id,
            connect_deadline_s=CONNECT_DEADLINE_S,
        ) as bus,
        anyio.create_task_group() as services,
    ):
        node = _Node(settings, bus, node_id=node_id, run_directory=settings.run_directory, draining=anyio.Event())
        pool, pace = node._fleet.pool, Pace()
        place = NodeContext(
            settings=settings,
            bus=bus,
            node_id=node_id,
            generator=cast(Any, None),
            codec=cast(Any, None),
            workflows={WORKFLOW: scale},
        )
        services.start_soon(_run_server, node)
        for service in (node._run_members, node._run_weights, node._run_claims, node._watchdog.run_beats):
            services.start_soon(service)
        services.start_soon(run_metrics, place, pool, node._watchdog, pace)
        services.start_soon(run_server_services, bus, node_id, partial(server_reports, place, pool, pace))
        await node._run_leases(place, set(), 0.0)


async def _run_server(node: _Node) -> None:
    """Be the node's server: hold what is announced, at once."""
    server, target = node._fleet.pool.add(f"{node._node_id}-0"), node._fleet.target
    while True:
        num_seen, newest = target.changed.num_rings, target.newest
        if newest is not None and newest.version != server.version:
            node._fleet.pool.admit(server, url="http://127.0.0.1:9", version=newest.version)
            await node._publish_state(server)
        await target.changed.wait(num_seen)


def read_job(text: str) -> tuple[Job, Settings]:
    """Return what a process is told, and the settings in it."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(30),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    job = msgspec.json.decode(text, type=Job)
    return job, Settings.model_validate(job.settings)


if __name__ == "__main__":
    anyio.run(run_nodes, *read_job(sys.argv[1]), backend_options={"use_uvloop": True})
