"""The arms of a node, and the sides of comparisons: a fleet of frozen servers for each.

What goes wrong with an arm is the arm's: its servers are started again after a while, its tickets are others' until
then, and the node goes on without it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import structlog

from areal_async.bus import Bus
from areal_async.config.settings import PolicySettings, Settings
from areal_async.errors import PipelineError, leaves_of
from areal_async.process.bell import Bell
from areal_async.process.host import visible_gpus
from areal_async.protocol.arms import Arms, Pinned
from areal_async.protocol.subjects import ARMS
from areal_async.rollout.frozen import FrozenPlace, serve_model
from areal_async.rollout.named_policies import FrozenModel
from areal_async.telemetry import wait_graph

POLL_S = 30.0
"""Time between two looks at which arms are wanted, of which the node also hears."""
ROOM_POLL_S = 5.0
READY_POLL_S = 0.5
RETRY_S = 30.0
"""Pause after the servers of an arm could not be started or were given up."""

log = structlog.get_logger()


@dataclass(frozen=True, eq=False)
class ServedArm:
    """An arm whose servers run here."""

    arm: Pinned
    model: FrozenModel
    has_ended: anyio.Event = field(default_factory=anyio.Event)

    @property
    def is_ready(self) -> bool:
        """One of its servers may be sent a request."""
        return any(server.is_serviceable for server in self.model.pool.servers.values())


class NodeArms:
    """The arms that one node serves: those that are wanted and for which it has room."""

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        *,
        node_id: str,
        log_directory: Path,
        max_streams: int,
        num_gpus_taken: Callable[[], int],
    ) -> None:
        """``num_gpus_taken`` says how many of the node's GPUs, from the first, are its other servers'."""
        self._bus = bus
        self._settings = settings
        self._node_id = node_id
        self._log_directory = log_directory
        self._max_streams = max_streams
        self._num_gpus_taken = num_gpus_taken
        self._kept: dict[str, anyio.CancelScope] = {}
        self._places: dict[str, int] = {}
        """First GPU of each arm that has some."""
        self._changed = Bell()
        self.served: dict[str, ServedArm] = {}
        """By the arm's id."""
        self.hindrances: dict[str, str] = {}
        """Why an arm is not served here, by its name."""

    @property
    def num_gpus(self) -> int:
        """GPUs that arms have."""
        return len(self._places) * self._settings.inference.tensor_parallel if visible_gpus() else 0

    async def run(self) -> None:
        """Serve what is wanted, until cancelled.

        consumes:     the key ``arms``
        waits for:    a change of it
        produces:     servers of each arm, as long as it is wanted
        unblocked by: cancellation; then the servers are stopped
        """
        async with anyio.create_task_group() as keeping:
            async for wanted in self._bus.watch_key(ARMS, Arms, poll_s=POLL_S):
                arms = wanted.served
                for gone in self._kept.keys() - arms.keys():
                    self._kept.pop(gone).cancel()
                for new in arms.keys() - self._kept.keys():
                    self._kept[new] = anyio.CancelScope()
                    keeping.start_soon(self._keep, arms[new], self._kept[new])

    async def wait_served(self) -> None:
        """Wait until an arm can answer."""
        while not any(one.is_ready for one in self.served.values()):
            if self.served:
                await anyio.sleep(READY_POLL_S)
            else:
                await self._changed.wait(self._changed.num_rings)

    async def _keep(self, arm: Pinned, until: anyio.CancelScope) -> None:
        """Have an arm served, again and again, until it is not wanted any more."""
        with until:
            while True:
                self._places[arm.arm_id] = await self._wait_for_room(arm)
                try:
                    why = await self._serve(arm, self._places[arm.arm_id])
                finally:
                    del self._places[arm.arm_id]
                self.hindrances[arm.name] = why
                log.warning("arm.not_served", name=arm.name, reason=why)
                await anyio.sleep(RETRY_S)
        self.hindrances.pop(arm.name, None)

    async def _serve(self, arm: Pinned, first_gpu: int) -> str:
        """Serve an arm until that comes to nothing; return why."""
        inference = self._settings.inference
        policy = PolicySettings(
            path=arm.path,
            tensor_parallel=inference.tensor_parallel,
            context_length=inference.context_length,
            template=self._settings.rollout.template,
        )
        place = FrozenPlace(
            node_id=self._node_id,
            log_directory=self._log_directory,
            name=f"arm_{arm.name}",
            first_gpu=first_gpu,
            setting=f"arms.{arm.name}",
        )
        why = ""
        try:
            async with serve_model(policy, self._settings, place, self._max_streams) as model:
                assert isinstance(model, FrozenModel)
                served = self.served[arm.arm_id] = ServedArm(arm, model)
                self.hindrances.pop(arm.name, None)
                self._changed.ring()
                try:
                    await anyio.sleep_forever()
                finally:
                    del self.served[arm.arm_id]
                    served.has_ended.set()
        except* PipelineError as group:
            why = str(leaves_of(group)[0])
        return why

    async def _wait_for_room(self, arm: Pinned) -> int:
        """Return the first GPU for an arm's server: from the last one down, as added servers come from below."""
        while (place := self._room()) is None:
            self.hindrances[arm.name] = "no GPU of this node is free"
            with wait_graph.on(wait_graph.node(self._node_id), "a free GPU of", waiter=wait_graph.arm(arm.name)):
                await anyio.sleep(ROOM_POLL_S)
        return place

    def _room(self) -> int | None:
        num_gpus, size = len(visible_gpus()), self._settings.inference.tensor_parallel
        if not num_gpus:
            return 0
        places = range(num_gpus - size, self._num_gpus_taken() - 1, -size)
        return next((place for place in places if place not in self._places.values()), None)
