"""Servers are added and removed by order: what is asked is done once, or refused with its reason."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from areal_async.bus import Bus, Role, ask_service, serving
from areal_async.controller.fleets import ADD, REMOVE, FleetOrders
from areal_async.controller.processes.reports import Reports
from areal_async.errors import UserError
from areal_async.protocol.run_state import FleetMembers
from tests.brokers import PATIENCE_S, OpenRole

pytestmark = pytest.mark.anyio


class Orders:
    """The controller's endpoints, and who asks there."""

    def __init__(self, operator: Bus) -> None:
        self.operator = operator
        self.reports = Reports()

    def hear(self, node: str, *, num_servers: int = 1, most_servers: int = 4) -> None:
        fleet = {"num_servers": num_servers, "most_servers": most_servers}
        self.reports.take("node", {"node_id": node, "state": "works", "fleet": fleet}, now_s=0.0)

    async def give(self, order: str, **body: Any) -> str:
        subject = self.operator.names.control(order)
        answer = await ask_service(self.operator, subject, {"by": "ann", **body}, deadline_s=PATIENCE_S)
        return str(answer["sentence"])

    async def members(self, node: str) -> list[int] | None:
        found, _ = await self.operator.get(self.operator.names.fleet_key(node), FleetMembers)
        return None if found is None else found.indices


@pytest.fixture
async def orders(open_role: OpenRole, tmp_path: Path) -> AsyncIterator[Orders]:
    made = Orders(await open_role(Role.OPERATOR))
    controller = await open_role(Role.CONTROLLER)
    endpoints = FleetOrders(controller, tmp_path, lambda: made.reports.by_name).endpoints
    async with serving(controller, description="", report=dict, endpoints=endpoints):
        yield made


async def test_servers_are_added_where_there_is_most_room_and_any_but_the_last_is_removed(orders: Orders) -> None:
    orders.hear("0", most_servers=3)
    orders.hear("1", num_servers=2, most_servers=8)

    assert (await orders.give(ADD)).startswith("1-2: started on node 1")
    assert (await orders.give(ADD, node="0", count=2)).startswith("0-1, 0-2: started on node 0")
    assert (await orders.give(REMOVE, server="0-1")).startswith("0-1: gets nothing more")
    assert await orders.members("0") == [0, 2]
    await orders.give(ADD, node="0")
    assert await orders.members("0") == [0, 1, 2], "the GPUs of the one that is gone"
    for server in ("0-0", "0-1"):
        await orders.give(REMOVE, server=server)

    with pytest.raises(UserError, match="server 0-2: it is the last one of node 0, whose workflows need one"):
        await orders.give(REMOVE, server="0-2")
    assert (await orders.members("0"), await orders.members("1")) == ([2], [0, 1, 2])


@pytest.mark.parametrize(
    ("order", "body", "sentence"),
    [
        (ADD, {"node": "7"}, "node 7: is not there now; the run has 0"),
        (ADD, {"count": 4}, "servers: got 4 more, and the node with the most room, 0, has GPUs free for 3"),
        (ADD, {"node": "0", "count": 9}, "servers: got 9 more, and node 0 has GPUs free for 3"),
        (ADD, {"count": 0}, "count: got 0, need 1 to 256"),
        (ADD, {"count": True}, "count: got True, need 1 to 256"),
        (REMOVE, {"server": "0-1"}, "server 0-1: there is none that can be removed; node 0 has 0-0"),
        (REMOVE, {"server": "0-judge_0"}, "server 0-judge_0: there is none that can be removed; node 0 has 0-0"),
        (REMOVE, {"server": "1-0"}, "node 1: is not there now; the run has 0"),
        (REMOVE, {"server": "x*"}, "server: got 'x\\*', need an id like 0-1"),
        (REMOVE, {"server": "0-0", "by": 3}, "by: got 3, need a text of at most 200 characters"),
    ],
)
async def test_what_cannot_be_done_is_refused_and_changes_nothing(
    orders: Orders, order: str, body: dict[str, Any], sentence: str
) -> None:
    orders.hear("0")

    with pytest.raises(UserError, match=sentence):
        await orders.give(order, **body)

    assert await orders.members("0") is None


async def test_orders_that_come_at_once_are_all_obeyed(orders: Orders) -> None:
    orders.hear("0", most_servers=9)

    async with anyio.create_task_group() as asking:
        for _ in range(8):
            asking.start_soon(orders.give, ADD)

    assert await orders.members("0") == list(range(9))


async def test_a_node_that_says_nothing_of_room_gets_none(orders: Orders) -> None:
    orders.reports.take("node", {"node_id": "0", "state": "works", "fleet": {"most_servers": 1 << 40}}, now_s=0.0)

    with pytest.raises(UserError, match="servers: no node is there now"):
        await orders.give(ADD)
