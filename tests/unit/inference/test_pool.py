"""Requests go to the server that knows the trajectory, else to the least loaded; never to one in doubt."""

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from areal_async.errors import GenerationError
from areal_async.inference.pool import Pool, Server

pytestmark = pytest.mark.anyio


def pool_of(*outstanding_tokens: int, deadline_s: float = 5.0) -> tuple[Pool, list[Server]]:
    pool = Pool([f"s{index}" for index in range(len(outstanding_tokens))], deadline_s=deadline_s)
    servers = list(pool.servers.values())
    for server, tokens in zip(servers, outstanding_tokens, strict=True):
        pool.admit(server, url="http://x", version="1-0")
        server.outstanding_tokens = tokens
    return pool, servers


async def test_least_loaded_server_takes_a_new_trajectory() -> None:
    pool, servers = pool_of(30, 10, 20)

    assert await pool.choose() is servers[1]


async def test_trajectory_stays_with_its_server_while_it_serves() -> None:
    pool, servers = pool_of(30, 10)

    assert await pool.choose(servers[0]) is servers[0]
    pool.fence(servers[0], "broken")
    assert await pool.choose(servers[0]) is servers[1]


async def test_doubted_server_gets_nothing_until_the_doubt_is_cleared() -> None:
    pool, servers = pool_of(10, 20)

    pool.cast_doubt(servers[0], "stream broke")
    assert await pool.choose() is servers[1]
    pool.clear_doubt(servers[0])
    assert await pool.choose() is servers[0]
    assert not servers[0].doubted.is_set()


async def test_fenced_server_holds_no_version_until_it_is_admitted_again() -> None:
    pool, (server,) = pool_of(0)

    pool.fence(server, "swap failed")

    assert (server.version, server.is_serviceable) == ("", False)
    pool.admit(server, url="http://x", version="1-4")
    assert (server.version, server.is_serviceable) == ("1-4", True)


async def test_choice_waits_until_a_server_is_admitted() -> None:
    pool, (server,) = pool_of(0)
    pool.fence(server, "starting")
    chosen: list[Server] = []

    async def choose() -> None:
        chosen.append(await pool.choose())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(choose)
        tasks.start_soon(pool.wait_serviceable)
        await wait_all_tasks_blocked()
        assert not chosen
        pool.admit(server, url="http://x", version="1-0")

    assert chosen == [server]


async def test_choice_that_waits_too_long_says_what_is_wrong_with_every_server() -> None:
    pool, servers = pool_of(0, 0, deadline_s=0.01)
    pool.fence(servers[0], "starting")
    pool.cast_doubt(servers[1], "stream broke")

    with pytest.raises(GenerationError, match=r"within 0\.01 s: s0 \(starting\), s1 \(stream broke\)"):
        await pool.choose()
