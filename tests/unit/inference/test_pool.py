"""Requests go to the server that knows the trajectory, else to the least loaded; never to one in doubt."""

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from areal_async.errors import GenerationError
from areal_async.inference.pool import ServerHandle, ServerPool, SiblingGroup

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]


def pool_of(*outstanding_tokens: int, deadline_s: float = 5.0) -> tuple[ServerPool, list[ServerHandle]]:
    pool = ServerPool([f"s{index}" for index in range(len(outstanding_tokens))], deadline_s=deadline_s)
    servers = list(pool.servers.values())
    for server, tokens in zip(servers, outstanding_tokens, strict=True):
        pool.admit(server, url="http://x", version="1-0")
        server.outstanding_tokens = tokens
    return pool, servers


async def test_least_loaded_server_takes_a_new_trajectory() -> None:
    pool, servers = pool_of(30, 10, 20)

    assert await pool.choose() is servers[1]


async def test_trajectory_stays_with_its_server_while_it_serves() -> None:
    pool, servers = pool_of(11, 10)

    assert await pool.choose(servers[0]) is servers[0]
    pool.fence(servers[0], "broken")
    assert await pool.choose(servers[0]) is servers[1]


async def test_doubted_server_gets_nothing_until_the_doubt_is_cleared() -> None:
    pool, servers = pool_of(10, 20)

    pool.cast_doubt(servers[0], "stream broke")
    assert await pool.choose() is servers[1]
    pool.cast_doubt(servers[0], "no event", is_silent=True)
    assert servers[0].is_silent, "whichever request failed first"
    pool.clear_doubt(servers[0])
    assert await pool.choose() is servers[0]
    assert not servers[0].doubted.is_set()
    assert not servers[0].is_silent


async def test_fenced_server_holds_no_version_until_it_is_admitted_again() -> None:
    pool, (server,) = pool_of(0)

    pool.fence(server, "swap failed")

    assert (server.version, server.is_serviceable) == ("", False)
    pool.admit(server, url="http://x", version="1-4")
    assert (server.version, server.is_serviceable) == ("1-4", True)


async def test_held_server_keeps_what_it_has_and_is_chosen_again_under_its_next_version() -> None:
    pool, (server,) = pool_of(0)
    pool.hold(server)
    chosen: list[ServerHandle] = []

    async def choose() -> None:
        chosen.append(await pool.choose())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(choose)
        await anyio.wait_all_tasks_blocked()
        assert (chosen, server.is_serviceable) == ([], True)
        pool.admit(server, url="http://x", version="1-4")

    assert chosen == [server]


async def test_choice_waits_until_a_server_is_admitted() -> None:
    pool, (server,) = pool_of(0)
    pool.fence(server, "starting")
    chosen: list[ServerHandle] = []

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


async def test_server_takes_no_more_than_its_limit_and_the_next_goes_to_another() -> None:
    pool, servers = pool_of(10, 20)
    pool.set_limit(servers[0], 1)

    assert [await pool.choose(servers[0]) for _ in range(3)] == [servers[0], servers[1], servers[1]]
    assert [server.num_requests for server in servers] == [1, 2]


async def test_places_go_to_those_who_wait_in_the_order_they_came() -> None:
    pool, (server,) = pool_of(0)
    pool.set_limit(server, 1)
    await pool.choose()
    order: list[int] = []

    async def request(number: int) -> None:
        await pool.choose()
        order.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(request, number)
            await wait_all_tasks_blocked()
        assert (order, pool.num_waiting) == ([], 3)
        pool.release(server)
        await wait_all_tasks_blocked()
        assert order == [0]
        pool.set_limit(server, 3)

    assert order == [0, 1, 2]
    assert (pool.num_waiting, server.num_requests) == (0, 3)


async def test_newcomer_does_not_overtake_one_that_was_called() -> None:
    pool, (server,) = pool_of(0)
    pool.set_limit(server, 1)
    await pool.choose()
    order: list[str] = []

    async def request(name: str) -> None:
        await pool.choose()
        order.append(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(request, "first")
        await wait_all_tasks_blocked()
        pool.release(server)
        tasks.start_soon(request, "newcomer")
        await wait_all_tasks_blocked()
        assert order == ["first"]
        pool.release(server)

    assert order == ["first", "newcomer"]


async def test_a_group_s_turn_is_taken_by_the_group_that_was_admitted_first() -> None:
    pool, (server,) = pool_of(0)
    pool.set_limit(server, 1)
    await pool.choose(group=SiblingGroup(number=5))
    order: list[tuple[int | None, int]] = []
    came = [5, None, 6, 5, None, 2]  # one without a group keeps its own turn

    async def request(nth: int, number: int | None) -> None:
        await pool.choose(group=None if number is None else SiblingGroup(number=number))
        order.append((number, nth))

    async with anyio.create_task_group() as tasks:
        for nth, number in enumerate(came):
            tasks.start_soon(request, nth, number)
            await wait_all_tasks_blocked()
        for _ in came:
            pool.release(server)
            await wait_all_tasks_blocked()

    assert order == [(2, 5), (None, 1), (5, 0), (5, 3), (None, 4), (6, 2)]


async def test_a_cancelled_wait_leaves_no_turn_behind() -> None:
    pool, (server,) = pool_of(0)
    pool.set_limit(server, 1)
    await pool.choose()
    order: list[int | None] = []

    async def request(number: int | None) -> None:
        await pool.choose(group=None if number is None else SiblingGroup(number=number))
        order.append(number)

    async with anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as cancelled:
            for number in (7, None):
                cancelled.start_soon(request, number)
                await wait_all_tasks_blocked()
            tasks.start_soon(request, 9)
            await wait_all_tasks_blocked()
            cancelled.cancel_scope.cancel()
        for number in (None, 8):
            tasks.start_soon(request, number)
            await wait_all_tasks_blocked()
        assert pool.num_waiting == 3
        for _ in range(3):
            pool.release(server)
            await wait_all_tasks_blocked()

    assert (order, pool.num_waiting) == ([8, None, 9], 0)


@pytest.mark.parametrize("is_called_first", [True, False])
async def test_place_of_a_cancelled_wait_goes_to_the_next(is_called_first: bool) -> None:
    pool, (server,) = pool_of(0)
    pool.set_limit(server, 1)
    await pool.choose()
    chosen: list[ServerHandle] = []

    async def cancelled() -> None:
        with scope:
            taken = await pool.choose(cost_tokens=7)
            try:
                await anyio.sleep_forever()
            finally:
                pool.release(taken, cost_tokens=7)

    async def next_one() -> None:
        chosen.append(await pool.choose())

    scope = anyio.CancelScope()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancelled)
        await wait_all_tasks_blocked()
        tasks.start_soon(next_one)
        await wait_all_tasks_blocked()
        if is_called_first:  # it has the place already, and is cancelled before it runs
            pool.release(server)
            scope.cancel()
        else:
            scope.cancel()
            await wait_all_tasks_blocked()
            pool.release(server)

    assert chosen == [server]
    assert (pool.num_waiting, server.num_requests, server.outstanding_tokens) == (0, 1, 0)


@pytest.mark.parametrize("is_other_free", [True, False])
async def test_called_one_whose_server_was_fenced_meanwhile_goes_elsewhere(is_other_free: bool) -> None:
    pool, servers = pool_of(0, 0)
    for server in servers:
        pool.set_limit(server, 1)
        await pool.choose(server)
    chosen: list[ServerHandle] = []

    async def request() -> None:
        chosen.append(await pool.choose(servers[0]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(request)
        await wait_all_tasks_blocked()
        pool.release(servers[0])
        if is_other_free:
            pool.release(servers[1])
        pool.fence(servers[0], "broken")
        await wait_all_tasks_blocked()
        if not is_other_free:
            assert not chosen
            pool.release(servers[1])
            await wait_all_tasks_blocked()
        assert chosen == [servers[1]]
        tasks.cancel_scope.cancel()  # one that missed the place would wait for ever

    assert [server.num_requests for server in servers] == [0, 1]


async def test_wait_for_a_place_on_a_server_that_serves_has_no_deadline() -> None:
    pool, (server,) = pool_of(0, deadline_s=0.001)
    pool.set_limit(server, 1)
    await pool.choose()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.choose)
        await wait_all_tasks_blocked()
        with anyio.move_on_after(0.02):
            await anyio.sleep_forever()
        assert pool.num_waiting == 1
        pool.release(server)


async def test_server_that_leaves_takes_nothing_more_and_its_requests_and_tokens_stay_counted() -> None:
    pool, (first, second) = pool_of(0, 10)
    assert await pool.choose() is first
    first.num_generated_tokens, second.num_generated_tokens = 7, 5
    emptied = anyio.Event()

    async def wait_empty() -> None:
        await pool.wait_empty(first)
        emptied.set()

    async with anyio.create_task_group() as tasks:
        pool.remove(first, "left")
        tasks.start_soon(wait_empty)
        await wait_all_tasks_blocked()
        assert not emptied.is_set()
        assert await pool.choose(first) is second
        pool.release(first)

    assert (first.fence, list(pool.servers), pool.num_generated_tokens) == ("left", ["s1"], 12)
    back = pool.add("s0")
    assert (back is not first, back.is_serviceable, list(pool.servers)) == (True, False, ["s1", "s0"])


async def test_choice_from_no_server_at_all_says_so_and_takes_one_that_joins() -> None:
    pool = ServerPool([], deadline_s=0.01)
    with pytest.raises(GenerationError, match=r"within 0\.01 s: the node has none"):
        await pool.choose()

    pool.admit(pool.add("s0"), url="http://x", version="1-0")
    assert (await pool.choose()).id == "s0"
