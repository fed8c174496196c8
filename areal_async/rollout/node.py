"""A node: its inference servers, its workflows and its loops, in one task group on one event loop.

Whatever raises a ``PipelineError`` ends the node; everything else is a slot's recorded failure.
"""

import itertools
import signal
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import structlog

from areal_async.bus import Bus
from areal_async.config.settings import Settings
from areal_async.errors import ConflictError, StreamFullError
from areal_async.inference.client import InferenceClient
from areal_async.inference.pool import ServerHandle
from areal_async.inference.supervision.fleet import Fleet
from areal_async.process.gc_pauses import spare_pauses
from areal_async.protocol.run_state import LEFT, CardHold, FleetMembers, ServerState
from areal_async.protocol.subjects import CARD
from areal_async.protocol.types import WeightsVersion
from areal_async.protocol.wire import MAX_REASON_CHARACTERS
from areal_async.rollout.arms import NodeArms
from areal_async.rollout.endpoint.server import AgentEndpoint
from areal_async.rollout.frozen import serve_frozen
from areal_async.rollout.leases import MAX_ARM_PROMPTS, MAX_EVALUATIONS, Leases
from areal_async.rollout.metrics import Pace, run_metrics, server_reports
from areal_async.rollout.node_context import NodeContext
from areal_async.rollout.policy.text import load_codec
from areal_async.rollout.recovery import RowKey, recover
from areal_async.rollout.seldom import times_of
from areal_async.rollout.server_events import server_event
from areal_async.rollout.server_services import run_server_services
from areal_async.rollout.user_code.loop_block_report import LoopBlockFile
from areal_async.rollout.user_code.loop_watchdog import LoopWatchdog
from areal_async.rollout.user_code.per_node import given_per_node
from areal_async.rollout.user_code.workflows import check_all_taken, load_workflow, policies_taken
from areal_async.sandbox import set_max_boxes
from areal_async.sandbox.keeper import KEEPERS
from areal_async.telemetry import wait_graph
from areal_async.telemetry.wait_graph import ENDED

DRAIN_GRACE_S = 5.0
"""How long a node that is told to end waits for its running groups before it cancels them."""
POLL_S = 30.0
"""Time between two looks at keys that this node also hears of."""
WEIGHTS_POLL_S = 2.0
"""The newest version is looked at more often, though less so beside many nodes: the trainer may wait for it."""
CLAIM_S = 5.0
"""Time between two looks at the keys of this node's own servers; longer where there are many nodes."""
NUM_CLAIMS = 12
"""Every so many of these, those of all nodes: they are many, and all nodes read them."""
FIRST_CLAIMS = 3
"""So are the first: many nodes that start at once do not know of one another at the very first."""
SPARE_STREAMS = 64
SIGN_OFF_DEADLINE_S = 2.0

log = structlog.get_logger()


async def run_node(
    settings: Settings,
    bus: Bus,
    *,
    node_id: str,
    run_directory: Path,
    draining: anyio.Event | None = None,
    grace_s: float = DRAIN_GRACE_S,
) -> None:
    """Run one node until it has drained.

    Args:
        node_id: a subject token, unique in the run; one that returns under it takes over its servers' keys.
        draining: set from outside, has the node lease nothing more, finish or give back what it runs, and
            return. ``None`` leaves only cancellation.

    Raises:
        PipelineError: something that no rollout can carry; possibly inside an ExceptionGroup.
    """
    node = _Node(settings, bus, node_id=node_id, run_directory=run_directory, draining=draining or anyio.Event())
    await node.run(grace_s)


async def run_signals(draining: anyio.Event) -> None:
    """Set ``draining`` at SIGTERM or SIGINT; returns at the second, which is not waited for any longer."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            log.info("node.told_to_end", signal=number.name)
            if draining.is_set():
                return
            draining.set()


class _Node:
    def __init__(
        self, settings: Settings, bus: Bus, *, node_id: str, run_directory: Path, draining: anyio.Event
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._node_id = node_id
        self._draining = draining
        self._log_directory = run_directory / "logs"
        self._fleet = Fleet(settings, node_id=node_id, log_directory=self._log_directory, publish=self._publish_state)
        self._told: dict[str, ServerState] = {}
        self._block_file = LoopBlockFile(run_directory, node_id)
        self._watchdog = LoopWatchdog(deadline_s=settings.rollout.loop_deadline_s, file=self._block_file)

    async def run(self, grace_s: float) -> None:
        settings = self._settings
        set_max_boxes(settings.rollout.max_boxes)
        workflows = {
            task.name: load_workflow(task.workflow, policies=settings.policies, env=settings.env_of(task))
            for task in settings.tasks
        }
        taken = {name for one in workflows.values() for name in policies_taken(one, settings.policies)}
        check_all_taken(settings.policies, taken)
        if settings.inference.colocate == "release":
            self._fleet.card.look = self._look_at_card
            self._fleet.card.hear(await self._look_at_card())
        ordered, _ = await self._bus.get(self._bus.names.fleet_key(self._node_id), FleetMembers)
        if ordered is not None:  # before any server is started that was removed
            self._fleet.resize(ordered.indices)
        max_streams = 2 * settings.rollout.max_trajectories_per_node + MAX_EVALUATIONS + SPARE_STREAMS
        arms = NodeArms(
            self._bus,
            settings,
            node_id=self._node_id,
            log_directory=self._log_directory,
            max_streams=MAX_ARM_PROMPTS + SPARE_STREAMS,
            num_gpus_taken=self._num_gpus_taken,
        )
        try:
            async with anyio.create_task_group() as services:
                for service in (self._fleet.run, self._run_members, self._run_weights, self._run_claims):
                    services.start_soon(service)
                if self._fleet.card.look is not None:
                    services.start_soon(self._fleet.card.run_lease)
                    services.start_soon(self._run_card)
                codec = await anyio.to_thread.run_sync(load_codec, settings.model.path, settings.rollout.template)
                spare_pauses()
                async with (
                    InferenceClient(
                        self._fleet.pool,
                        settings.inference,
                        max_streams=max_streams,
                        vocab_size=codec.vocab_size,
                        model=settings.model.path,
                        vision=codec.vision,
                    ) as client,
                    serve_frozen(
                        settings, node_id=self._node_id, log_directory=self._log_directory, max_streams=max_streams
                    ) as frozen,
                    AgentEndpoint(settings.endpoint) as endpoint,
                    aclosing(KEEPERS),  # else their empty control groups outlive this process
                    given_per_node(
                        workflows,
                        deadline_s=settings.rollout.setup_deadline_s,
                        waiter=wait_graph.node(self._node_id),
                        tell=lambda told: log.warning("per_node.left", cause=told),
                    ) as given,
                ):
                    place = NodeContext(
                        settings=settings,
                        bus=self._bus,
                        node_id=self._node_id,
                        generator=client,
                        codec=codec,
                        workflows=given,
                        frozen=frozen,
                        arms=arms,
                        endpoint=endpoint,
                        call_parser=client.call_parser,
                        clock=self._fleet.pool.clock,
                    )
                    pace = Pace()
                    services.start_soon(self._watchdog.run_beats)
                    services.start_soon(run_metrics, place, self._fleet.pool, self._watchdog, pace)
                    services.start_soon(
                        run_server_services,
                        self._bus,
                        self._node_id,
                        partial(server_reports, place, self._fleet.pool, pace),
                    )
                    log.info("node.started", node_id=self._node_id, workflows=sorted(workflows))
                    ended_rows = await recover(place, self._block_file)
                    services.start_soon(arms.run)
                    # Not before: importing the tokenizer's library holds everything up.
                    with self._watchdog.watching():
                        await self._run_leases(place, ended_rows, grace_s)
                services.cancel_scope.cancel()
        finally:
            await self._sign_off()
        log.info("node.ended", node_id=self._node_id)

    async def _run_leases(self, place: NodeContext, ended_rows: set[RowKey], grace_s: float) -> None:
        """Work until drained: groups that do not end within the grace are cancelled and their tickets given back."""
        leases = Leases(place, self._fleet.pool, self._draining, ended_rows=ended_rows)

        async def end_after_grace() -> None:
            await self._draining.wait()
            await anyio.sleep(grace_s)
            work.cancel_scope.cancel()

        async with anyio.create_task_group() as work:
            work.start_soon(end_after_grace)
            await work.start(leases.run_changes)
            async with anyio.create_task_group() as loops:
                loops.start_soon(leases.run_tickets)
                loops.start_soon(leases.run_eval_tickets)
                loops.start_soon(leases.run_arm_tickets)
            work.cancel_scope.cancel()

    def _num_gpus_taken(self) -> int:
        """Return how many GPUs, from the first, servers of policies have; those that were added among them."""
        settings = self._settings
        last = max(self._fleet.wanted, default=0)
        num_added = max(0, last + 1 - settings.inference.num_servers)
        return settings.num_inference_gpus + num_added * settings.inference.tensor_parallel

    async def _run_weights(self) -> None:
        """Follow the announced versions; the supervisors change their servers to the newest."""
        key = self._bus.names.weights_key()
        async for version in self._bus.watch_key(key, WeightsVersion, poll_s=WEIGHTS_POLL_S):
            log.info("weights.announced", version=version.version, kind=version.kind)
            self._fleet.target.announce(version)

    async def _run_card(self) -> None:
        """Follow whether the trainer has the GPUs; the supervisors keep their servers out of its way."""
        async for said in self._bus.watch_key(CARD, CardHold, poll_s=POLL_S):
            self._fleet.card.hear(said)

    async def _look_at_card(self) -> CardHold | None:
        return (await self._bus.get(CARD, CardHold))[0]

    async def _run_members(self) -> None:
        """Follow which servers operators want."""
        key = self._bus.names.fleet_key(self._node_id)
        async for members in self._bus.watch_key(key, FleetMembers, poll_s=POLL_S):
            self._fleet.resize(members.indices)

    async def _run_claims(self) -> None:
        """Keep what is said of this node's servers true: others wait for them.

        What is said otherwise of a server that this node has is put right: the controller has disowned it while this
        node could not be heard, or somebody else has written it. What is said of one that this node does not have, by
        an earlier life of it that had more or by somebody else, is fenced.

        consumes:     the servers' keys
        waits for:    the next look
        produces:     what the servers run now, unless they have just said it themselves
        unblocked by: cancellation alone
        """
        names, bus = self._bus.names, self._bus
        for number in itertools.count():
            if number >= FIRST_CLAIMS and number % NUM_CLAIMS:
                own = [names.server_key(server_id) for server_id in self._fleet.pool.servers]
                found = await bus.entries_of(own, ServerState) if own else {}
            else:
                found = await bus.entries("server.", ServerState)
                self._bus.connection.slow_down(times_of(len({said.node_id for said, _ in found.values()})))
            for key, (said, revision) in found.items():
                server = self._fleet.pool.servers.get(said.server_id)
                is_its_key = key == names.server_key(said.server_id)
                if said.node_id == self._node_id and not (server and is_its_key) and said.is_waited_for:
                    with suppress(ConflictError):
                        await bus.compare_and_set(key, said.gone(LEFT), revision)
                        log.warning("server.unknown", key=key, server_id=said.server_id, version=said.version)
                elif server and is_its_key and said != self._state(server):
                    with suppress(ConflictError):
                        await bus.compare_and_set(key, self._state(server), revision)
                        log.warning("server.claimed", server_id=server.id, version=server.version)
            await anyio.sleep(CLAIM_S * self._bus.connection.times)

    def _state(self, server: ServerHandle) -> ServerState:
        return ServerState(
            server_id=server.id,
            node_id=self._node_id,
            url=server.url,
            version=server.version,
            incarnation=server.incarnation,
            num_ranks=server.num_ranks,
            fenced=bool(server.fence),
            reason=server.fence[:MAX_REASON_CHARACTERS],
            failure=server.failure[:MAX_REASON_CHARACTERS],
            unreadable=server.unreadable[:MAX_REASON_CHARACTERS],
            missed=server.missed[:MAX_REASON_CHARACTERS],
            card=server.card,
            wants_weights=server.wants_weights,
        )

    async def _publish_state(self, server: ServerHandle) -> None:
        """Write what a server runs, after it runs it; the controller's accounts rest on that order.

        A new server's key waits for room among those of all nodes.
        """
        while True:
            state = self._state(server)
            try:
                await self._bus.put(self._bus.names.server_key(server.id), state)
                break
            except StreamFullError as exc:
                log.warning("server.no_room", server_id=server.id, cause=str(exc))
            with wait_graph.on(wait_graph.BROKER, "room for its key, from", waiter=wait_graph.server(server.id)):
                await anyio.sleep(CLAIM_S)
        event = server_event(self._told.get(server.id), state)
        self._told[server.id] = state
        if event is not None:
            await self._bus.publish_event(event, instance=self._node_id)

    async def _sign_off(self) -> None:
        """Say, as well as it can be done quickly, that the servers are gone, so that nobody waits for them."""
        with anyio.move_on_after(SIGN_OFF_DEADLINE_S, shield=True):
            for server in self._fleet.pool.servers.values():
                self._fleet.pool.fence(server, "its node has ended")
                await self._publish_state(server)
            farewell = {"node_id": self._node_id, "state": ENDED}
            await self._bus.emit(self._bus.names.metrics("node", self._node_id), msgspec.json.encode(farewell))
