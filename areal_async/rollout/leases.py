"""Leasing tickets: as many as there is room for, only while a server can serve, none once the node drains."""

import time
from collections.abc import Awaitable, Callable, Mapping, Set
from functools import partial

import anyio
import anyio.abc

from areal_async.bus import Delivery
from areal_async.config.live import settings_now
from areal_async.config.settings import Settings
from areal_async.inference.pool import ServerPool
from areal_async.process.bell import Bell
from areal_async.protocol.arms import ArmTicket
from areal_async.protocol.evaluations import EvalTicket
from areal_async.protocol.run_state import Changes
from areal_async.protocol.subjects import CHANGES
from areal_async.protocol.types import Ticket
from areal_async.rollout.arm_answers import run_arm_ticket
from areal_async.rollout.arms import NodeArms, ServedArm
from areal_async.rollout.evaluate import run_eval_ticket
from areal_async.rollout.group import run_ticket
from areal_async.rollout.lease import returned_unless_done
from areal_async.rollout.node_context import NodeContext
from areal_async.rollout.recovery import RowKey, row_key
from areal_async.rollout.settled import SettledGroups
from areal_async.telemetry import wait_graph

FETCH_WAIT_S = 10.0
POLL_S = 30.0
"""Time between two looks at the settings that operators have changed, which are also heard of."""
MAX_LEASES_PER_FETCH = 16
"""Nodes that take a few at a time share a short queue evenly."""
MAX_EVALUATIONS = 128
"""Answered at once, beside the training tickets: an evaluation waits for none of them."""
MAX_ARM_PROMPTS = 32
"""Of arms, answered at once, by two sides each."""
ARM_GATHER_S = 5.0
"""Pause before each look for prompts of arms: those that come meanwhile are answered together, and a server decodes
several nearly for the price of one. Nobody waits for them."""
ELSEWHERE_S = 2.0
"""Pause after which a prompt of an arm that this node does not serve is offered again, to whichever node asks."""

Handler = Callable[[Delivery], Awaitable[None]]
Task = tuple[Delivery, Handler | None]
"""A ticket and what to do with it; None is nothing, as its group is settled or its row has its result."""


class Leases:
    """A node's loops that take tickets."""

    def __init__(
        self,
        node: NodeContext,
        pool: ServerPool,
        draining: anyio.Event,
        *,
        ended_rows: Set[RowKey] = frozenset(),
    ) -> None:
        """``ended_rows``: of evaluations and arms, which have their result already."""
        self._node = node
        self._pools = (pool, *(model.pool for model in node.frozen.values()))
        """A workflow without one of its policies would only wait, while its deadline runs."""
        self._draining = draining
        self._ended_rows = ended_rows
        self._settled = SettledGroups(node.bus)
        self._name = wait_graph.node(node.node_id)
        self._capacity = _capacity(node.settings)

    async def run_tickets(self) -> None:
        """Run training groups.

        consumes:     tickets, shared with all other nodes
        waits for:    a serviceable server, room on this node, a ticket
        produces:     stored trajectories
        unblocked by: the supervisor, finished groups, the controller; ends when the node drains
        """
        names = self._node.bus.names
        await self._run(names.tickets_stream, names.nodes_consumer, lambda: self._capacity, self._take_tickets)

    async def run_changes(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Begin groups as operators have changed the settings, for ever; those that run just finish.

        Ready when what they had changed before is known.
        """
        known, _ = await self._node.bus.get(CHANGES, Changes)
        self._change(known or Changes())
        task_status.started()
        async for changes in self._node.bus.watch_key(CHANGES, Changes, poll_s=POLL_S):
            self._change(changes)

    def _change(self, changes: Changes) -> None:
        self._node.now = settings_now(self._node.settings, changes)
        self._capacity = _capacity(self._node.now)

    async def run_eval_tickets(self) -> None:
        """Run evaluations: as ``run_tickets``, with room of their own."""
        names = self._node.bus.names
        await self._run(names.eval_stream, names.eval_nodes_consumer, lambda: MAX_EVALUATIONS, self._take_eval_tickets)

    async def run_arm_tickets(self) -> None:
        """Run prompts of arms: as ``run_tickets``, with room of their own, while this node serves an arm."""
        stream, consumer = self._node.bus.names.eval_stream, self._node.bus.names.arm_nodes_consumer
        if (arms := self._node.arms) is not None:
            take = partial(self._take_arm_tickets, arms.served)
            await self._run(stream, consumer, lambda: MAX_ARM_PROMPTS, take, ready=partial(_gather, arms))

    async def _take_tickets(self, deliveries: list[Delivery]) -> list[Task]:
        tickets = [(delivery, await self._node.bus.decode(delivery, Ticket)) for delivery in deliveries]
        readable = [(delivery, ticket) for delivery, ticket in tickets if ticket is not None]
        doubtful = [ticket for delivery, ticket in readable if self._may_be_settled(delivery, ticket)]
        settled = await self._settled.among(doubtful) if doubtful else set()
        return [
            (delivery, None if ticket.group_id in settled else partial(run_ticket, self._node, ticket))
            for delivery, ticket in readable
        ]

    def _may_be_settled(self, delivery: Delivery, ticket: Ticket) -> bool:
        """Say whether the group may have ended before this: the log is read for such tickets alone.

        Each node would read all that becomes of every group else. A group of which nobody has had the ticket ends when
        the trainer has waited for it so long. Where it ended otherwise, its slots are late: work in vain, and no more.
        """
        waited_s = time.time() - delivery.stored_ns / 1e9
        return delivery.num_delivered > 1 or waited_s > self._node.now.rollout_of(ticket.workflow).group_deadline_s

    async def _take_eval_tickets(self, deliveries: list[Delivery]) -> list[Task]:
        tickets = [(delivery, await self._node.bus.decode(delivery, EvalTicket)) for delivery in deliveries]
        return [
            (delivery, None if row_key(ticket) in self._ended_rows else partial(run_eval_ticket, self._node, ticket))
            for delivery, ticket in tickets
            if ticket is not None
        ]

    async def _take_arm_tickets(self, arms: Mapping[str, ServedArm], deliveries: list[Delivery]) -> list[Task]:
        tasks: list[Task] = []
        for delivery in deliveries:
            ticket = await self._node.bus.decode(delivery, ArmTicket)
            if ticket is None:
                continue
            served = arms.get(ticket.arm_id)
            if row_key(ticket) in self._ended_rows:
                tasks.append((delivery, None))
            elif served is None or not served.is_ready:
                await delivery.nak(ELSEWHERE_S)
            else:
                tasks.append((delivery, partial(run_arm_ticket, self._node, served, ticket)))
        return tasks

    async def _run(
        self,
        stream: str,
        consumer: str,
        capacity: Callable[[], int],
        take: Callable[[list[Delivery]], Awaitable[list[Task]]],
        *,
        ready: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Lease up to ``capacity``, which may change; ``take`` says what to do with each ticket that is one.

        Args:
            ready: waits for what the tickets need beside the node's own servers.
        """
        num_running = 0
        finished = Bell()

        async def run_one(handler: Handler, delivery: Delivery) -> None:
            nonlocal num_running
            try:
                await handler(delivery)
            finally:
                num_running -= 1
                finished.ring()

        async def lease() -> None:
            nonlocal num_running
            while True:
                if ready is not None:
                    await ready()
                await self._wait_serviceable()
                while num_running >= capacity():
                    with wait_graph.on(wait_graph.room(self._node.node_id), waiter=self._name):
                        await finished.wait()
                deliveries = await inbox.fetch(min(MAX_LEASES_PER_FETCH, capacity() - num_running), wait_s=self._wait_s)
                if not deliveries:
                    continue
                async with returned_unless_done(*deliveries):
                    taken = await take(deliveries)
                for delivery, handler in taken:
                    if handler is not None:
                        num_running += 1
                        running.start_soon(run_one, handler, delivery)
                for delivery, handler in taken:
                    if handler is None:
                        await delivery.ack()

        async with anyio.create_task_group() as running:
            # Closed before the tickets that still run are given back: those are for other nodes.
            async with self._node.bus.consume(stream, consumer) as inbox:
                await self._until_draining(lease)

    @property
    def _wait_s(self) -> float:
        return FETCH_WAIT_S * self._node.bus.connection.times

    async def _wait_serviceable(self) -> None:
        for pool in self._pools:
            server = pool.hindrance
            if server is None:
                await pool.wait_serviceable()
            else:
                with wait_graph.on(wait_graph.server(server.id), "service by", waiter=self._name):
                    await pool.wait_serviceable()

    async def _until_draining(self, loop: Callable[[], Awaitable[None]]) -> None:
        async def stop() -> None:
            await self._draining.wait()
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop)
            await loop()


async def _gather(arms: NodeArms) -> None:
    """Let prompts of arms come together, and wait until one can be answered."""
    await anyio.sleep(ARM_GATHER_S)
    await arms.wait_served()


def _capacity(settings: Settings) -> int:
    """Return how many groups a node runs at once: one at least."""
    return max(1, settings.rollout.max_trajectories_per_node // settings.max_group_size)
