"""The launcher's side of the orders of operators: it ends the run when one says so, and has nodes on other hosts."""

from collections.abc import Callable, Sequence

import msgspec

from areal_async.bus import Bus
from areal_async.launch.backend import Backend
from areal_async.launch.supervisor import Notify, ProcessGroup, RunSupervisor
from areal_async.process.plain_text import escaped
from areal_async.protocol.run_state import Control, OrderedHosts, Rollback
from areal_async.protocol.subjects import CONTROL, HOSTS, ROLLBACK


async def take_back_stop(bus: Bus) -> None:
    """Forget an order to stop: a new start wants the run to go on. A pause stays."""
    control, revision = await bus.get(CONTROL, Control)
    if control is not None and control.is_stopping:
        await bus.compare_and_set(CONTROL, msgspec.structs.replace(control, is_stopping=False), revision)


async def run_stop_orders(bus: Bus, *, stop: Callable[[], None], notify: Notify) -> None:
    """Stop the run when it is ordered. Orders are told as events; only a pause from before this start is told here.

    consumes:     the key ``control``
    waits for:    its next change
    produces:     a stop
    unblocked by: cancellation alone
    """
    before, _ = await bus.get(CONTROL, Control)
    if before is not None and before.is_paused:
        notify(f"still paused by {before.by or 'an operator'}: nothing is admitted before it is resumed")
    async for control in bus.watch_key(CONTROL, Control):
        if control.is_stopping:
            stop()


async def run_rollback_orders(bus: Bus, *, before: Rollback, renew: Callable[[str, str], None], notify: Notify) -> None:
    """Have the trainer start anew when it is ordered that the run goes back: the one that begins carries that out.

    Its step is not awaited: what it makes is given up.

    consumes:     the key ``rollback``
    waits for:    its next change
    produces:     the end of the trainer's processes
    unblocked by: cancellation alone

    Args:
        before: the order as it was before the trainer was started.
        renew: kills a process group, of a name and why, so that it is started again.
    """
    async for order in bus.watch_key(ROLLBACK, Rollback):
        if order.refusal and order != before:
            notify(f"run {bus.names.run} does not go back to {order.version}: {order.refusal}")
        if order.is_due and order.number > before.number:
            notify(f"run {bus.names.run} {goes_back(order)}")
            renew("trainer", f"started anew to go back to {order.version}")
        before = order


def goes_back(order: Rollback) -> str:
    """Say what an order has a run do."""
    why = f": {order.reason}" if order.reason else ""
    return f"goes back to {order.version}, as {order.by or 'an operator'} has ordered{why}"


def pending_rollback(order: Rollback | None, run: str, *, is_live: bool) -> str:
    """Say that an order to go back is not carried out yet, and what does so; empty where none is due."""
    if order is None or not order.is_due:
        return ""
    does = "the trainer that begins next does it" if is_live else f"the run's next start does it, run {run}"
    who = escaped(", ".join(filter(None, (order.by, order.at, order.reason.replace("\n", " ")))))
    return f"rollback to {order.version} is ordered ({who}) and not carried out: {does}; a newer order replaces it"


class NodesOfHosts:
    """Which host has which node. Invariant: a host that comes back has the node that it had, with its id."""

    def __init__(
        self, groups: Sequence[ProcessGroup], *, backend: Backend, make_node: Callable[[str, str], ProcessGroup]
    ) -> None:
        """Take all groups of a run, nodes after the first and before the last.

        Args:
            make_node: makes the group of one more node, of an id and a host.
        """
        self._first, *planned, self._last = groups
        self._backend = backend
        self._make_node = make_node
        self._num_planned = len(planned)
        self._by_host = {spec.host or backend.hosts[0]: node for node in planned for spec in node.make_specs()}
        self._running: list[str] = []
        """Names of the nodes that there are."""

    async def begin(self, bus: Bus) -> list[ProcessGroup]:
        """Return all groups of a run that starts, with what was ordered before."""
        ordered = (await bus.get(HOSTS, OrderedHosts))[0] or OrderedHosts()
        return [self._first, *self._follow(ordered), self._last]

    async def run(self, bus: Bus, supervisor: RunSupervisor) -> None:
        """Have a node on each host that is wanted, and none on the others.

        consumes:     the key ``hosts``
        waits for:    its next change, and the end of what was removed
        produces:     nodes, and their ends
        unblocked by: cancellation; a node that does not end is killed
        """
        async for ordered in bus.watch_key(HOSTS, OrderedHosts):
            before = self._running
            wanted = self._wanted(ordered)
            for name in before:
                if name not in {group.name for group in wanted}:
                    await supervisor.remove(name)
            for group in self._follow(ordered):
                supervisor.add(group)

    def _follow(self, ordered: OrderedHosts) -> list[ProcessGroup]:
        wanted = self._wanted(ordered)
        self._backend.set_hosts(ordered)
        self._running = [group.name for group in wanted]
        return wanted

    def _wanted(self, ordered: OrderedHosts) -> list[ProcessGroup]:
        added = [host for host in ordered.added if host not in self._backend.hosts]
        for number, host in enumerate(added, self._num_planned):
            if host not in self._by_host:
                self._by_host[host] = self._make_node(str(number), host)
        return [group for host, group in self._by_host.items() if host not in ordered.removed]
