"""``servers`` and ``hosts``: orders that change what a live run generates with; each is answered with one sentence."""

import argparse
from collections.abc import Sequence
from typing import Any

import anyio

from areal_async.cli.orders import give, who
from areal_async.controller import fleets, host_orders
from areal_async.errors import UserError
from areal_async.launch.run import visit_live
from areal_async.launch.run_directory import find_run
from areal_async.process.stdio import say
from areal_async.telemetry import log


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Give one order, and say what the controller answers."""
    log.quieten()
    directory = find_run(arguments.run)
    order, body = _of_servers(arguments) if arguments.verb == "servers" else _of_hosts(arguments)

    async def act() -> None:
        async with visit_live(directory) as (settings, bus):
            said = {"by": arguments.by or who(), "reason": arguments.reason or ""}
            answer = await give(directory, bus, order, body | said)
            say(f"run {settings.run.name}: {answer['sentence']}")

    anyio.run(act, backend_options={"use_uvloop": True})
    return 0


def _of_servers(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return the order and its body.

    Raises:
        UserError: a word of one action stands beside the other.
    """
    server, node, count = arguments.server, arguments.node, arguments.count
    if arguments.action == "add":
        if server is not None:
            raise UserError(
                f"servers add: got {server}, need no server; name a node with --node, or a number with --count"
            )
        return fleets.ADD, {"node": node or "", "count": 1 if count is None else count}
    if server is None or node is not None or count is not None:
        raise UserError("servers remove: need the id of one server, and neither --node nor --count")
    return fleets.REMOVE, {"server": server}


def _of_hosts(arguments: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return the order and its body."""
    order = host_orders.ADD if arguments.action == "add" else host_orders.REMOVE
    return order, {"host": arguments.host}
