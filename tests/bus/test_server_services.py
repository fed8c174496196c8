"""Inference servers are found by name like all others, as long as their node has them; the broker is the real one."""

import json
from typing import Any

import anyio
import nats
import pytest
from nats.aio.client import Client

from areal_async.bus import EmbeddedBroker, Report, Role, gather_reports
from areal_async.bus.permissions import SERVICES_INBOX
from areal_async.rollout.server_services import run_server_services
from tests.brokers import PATIENCE_S, OpenRole, until

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The client library that stands for any other is asyncio's."""
    return str(request.param)


async def test_a_plain_client_finds_each_server_and_one_that_has_left_no_more(
    broker: EmbeddedBroker, open_role: OpenRole
) -> None:
    node, operator = await open_role(Role.NODE, "7"), await open_role(Role.OPERATOR)
    servers: dict[str, Report] = {"7-0": {"version": "1-3", "num_requests": 4}, "7-1": {"version": "1-2"}}
    client = await nats.connect(
        broker.url, nkeys_seed=str(broker.credentials(Role.OPERATOR)), inbox_prefix=SERVICES_INBOX
    )

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_server_services, node, "7", lambda: servers)
        await until(lambda: _are_there(client, {"7-0", "7-1"}))
        answer = await client.request("areal.test.status.server.7-0", b"", timeout=PATIENCE_S)
        of_processes = await gather_reports(operator, within_s=0.5)
        servers["7-2"] = {"version": "1-3"}
        del servers["7-0"]
        await until(lambda: _are_there(client, {"7-1", "7-2"}))
        tasks.cancel_scope.cancel()
    await until(lambda: _are_there(client, set()))
    await client.close()

    told = json.loads(answer.data)
    assert told.items() >= {"node_id": "7", "version": "1-3", "num_requests": 4}.items()
    assert of_processes == {}, "a server is no process that is missed when it is silent"


async def _are_there(client: Client, expected: set[str]) -> bool:
    """Whether these servers answer, and no others."""
    inbox, found = client.new_inbox(), []
    heard = await client.subscribe(inbox)
    await client.publish("$SRV.STATS.areal-server", b"", reply=inbox)
    try:
        while True:
            message = await heard.next_msg(timeout=0.3)
            if message.data:
                found.append(json.loads(message.data))
    except nats.errors.TimeoutError:
        await heard.unsubscribe()
    return {_instance(one) for one in found} == expected


def _instance(stats: dict[str, Any]) -> str:
    assert stats["endpoints"][0]["data"]["node_id"] == "7"
    return str(stats["metadata"]["instance"])
