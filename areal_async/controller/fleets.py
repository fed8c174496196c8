"""Orders that add inference servers to a node and take them away, while the run runs.

What a node is to have is the key ``fleet.<node>``, which outlives every process: the node follows it, and begins with
it when it starts. Invariant: a node keeps one server, as its workflows would wait for one without end.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import anyio

from areal_async.bus import Bus, Report, Schema, ServiceEndpoint, json_object
from areal_async.controller.audit import note
from areal_async.controller.processes.reports import ProcessReport
from areal_async.controller.steering import TEXT, text_in
from areal_async.errors import ConflictError, UserError
from areal_async.protocol.events import RunOrdered
from areal_async.protocol.run_state import FleetMembers
from areal_async.protocol.subjects import TOKEN
from areal_async.telemetry import wait_graph
from areal_async.telemetry.reports import FleetReport

ADD, REMOVE = "add-servers", "remove-server"
MAX_ADDED = 256
"""Servers of one order."""
ANSWER = json_object(sentence="string", indices={"type": "array", "items": {"type": "integer"}})


class FleetOrders:
    """The endpoints of the controller at which operators change how many servers a node has."""

    def __init__(self, bus: Bus, run_directory: Path, heard: Callable[[], Mapping[str, ProcessReport]]) -> None:
        """``heard`` returns what is known of the processes that speak, by the name that ``wait_graph`` gives each."""
        self._bus = bus
        self._run_directory = run_directory
        self._heard = heard
        self._lock = anyio.Lock()

    @property
    def endpoints(self) -> list[ServiceEndpoint]:
        """An endpoint for each order."""
        said: dict[str, Schema] = {"by": TEXT, "reason": TEXT}
        add = json_object(optional=["node", "count", *said], node=TEXT, count="integer", **said)
        remove = json_object(optional=[*said], server=TEXT, **said)
        make = functools.partial(ServiceEndpoint, response=ANSWER)
        control = self._bus.names.control
        return [
            make(
                name=ADD,
                subject=control(ADD),
                description="start more inference servers on a node",
                request=add,
                answer=self._add,
            ),
            make(
                name=REMOVE,
                subject=control(REMOVE),
                description="send an inference server nothing more, have its streams go on elsewhere, and end it",
                request=remove,
                answer=self._remove,
            ),
        ]

    async def _add(self, body: Report) -> Report:
        """Raise the number of a node's servers.

        Raises:
            UserError: there is no such node, or none with room.
        """
        (by, reason, named), count = (text_in(body, key) for key in ("by", "reason", "node")), body.get("count", 1)
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_ADDED:
            raise UserError(f"count: got {count!r:.100}, need 1 to {MAX_ADDED}")
        async with self._lock:
            there = self._fleets()
            rooms = {
                node: told.most_servers - len((await self._members(node))[0])
                for node, told in there.items()
                if node == named or not named
            }
            if not rooms:
                raise UserError(
                    self._no_node(named) if named else "servers: no node is there now; add them once one is"
                )
            node = max(rooms, key=lambda one: (rooms[one], one == named))
            if rooms[node] < count:
                where = f"node {node}" if named else f"the node with the most room, {node},"
                raise UserError(f"servers: got {count} more, and {where} has GPUs free for {max(0, rooms[node])}")

            def change(members: list[int]) -> list[int]:
                free = (index for index in range(there[node].most_servers) if index not in members)
                return sorted([*members, *(next(free) for _ in range(count))])

            before, after = await self._change(node, change)
            added = [f"{node}-{index}" for index in after if index not in before]
            await self._note(f"{ADD} {' '.join(added)}", by, reason)
        told = f"{', '.join(added)}: started on node {node} now, and in use once there with the newest weights"
        return {"sentence": told, "indices": after}

    async def _remove(self, body: Report) -> Report:
        """Take one server away.

        Raises:
            UserError: there is no such server, or it is the last of its node.
        """
        by, reason, server_id = (text_in(body, key) for key in ("by", "reason", "server"))
        node, _, index = server_id.rpartition("-")
        async with self._lock:
            if not TOKEN.fullmatch(node):
                raise UserError(f"server: got {server_id!r:.100}, need an id like 0-1")
            if node not in self._fleets():
                raise UserError(self._no_node(node))
            members, _ = await self._members(node)
            if not index.isdecimal() or int(index) not in members:
                has = ", ".join(f"{node}-{one}" for one in members)
                raise UserError(f"server {server_id}: there is none that can be removed; node {node} has {has}")
            if len(members) == 1:
                raise UserError(
                    f"server {server_id}: it is the last one of node {node}, whose workflows need one; add another "
                    "first, or take the node's host away"
                )
            _, after = await self._change(node, lambda now: [one for one in now if one != int(index)])
            await self._note(f"{REMOVE} {server_id}", by, reason)
        told = f"{server_id}: gets nothing more; its streams go on at the others, and it ends"
        return {"sentence": told, "indices": after}

    def _fleets(self) -> dict[str, FleetReport]:
        """Return what each node that speaks says of its servers, by node."""
        nodes = {name: told.fleet for name, told in self._heard().items() if wait_graph.kind_of(name) == "node"}
        return {name.partition(" ")[2]: fleet for name, fleet in nodes.items() if fleet is not None}

    def _no_node(self, node: str) -> str:
        there = ", ".join(sorted(self._fleets())) or "none"
        return f"node {node}: is not there now; the run has {there}"

    async def _members(self, node: str) -> tuple[list[int], int]:
        """Return the indices of the servers that a node is to have, and the revision of the key that says so."""
        ordered, revision = await self._bus.get(self._bus.names.fleet_key(node), FleetMembers)
        if ordered is not None:
            return ordered.indices, revision
        return list(range(self._fleets()[node].num_servers)), revision

    async def _change(self, node: str, change: Callable[[list[int]], list[int]]) -> tuple[list[int], list[int]]:
        """Write which servers a node is to have; return those of before and those of now."""
        while True:
            before, revision = await self._members(node)
            after = change(before)
            with suppress(ConflictError):  # whoever writes keys by hand was faster
                await self._bus.compare_and_set(self._bus.names.fleet_key(node), FleetMembers(indices=after), revision)
                return before, after

    async def _note(self, order: str, by: str, reason: str) -> None:
        await note(self._bus, self._run_directory, RunOrdered(order=order, by=by, reason=reason))
