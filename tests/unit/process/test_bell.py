"""Whoever waits for news hears the next, and none that came between its look and its wait is missed."""

import anyio
import pytest

from areal_async.process.bell import Bell

DEADLINE_S = 60.0


@pytest.mark.anyio
@pytest.mark.both_loops
async def test_a_ring_wakes_all_who_wait_and_none_who_comes_later() -> None:
    bell, heard = Bell(), list[int]()

    async def wait(number: int) -> None:
        await bell.wait()
        heard.append(number)

    with anyio.fail_after(DEADLINE_S):
        async with anyio.create_task_group() as waiting:
            for number in range(2):
                waiting.start_soon(wait, number)
            await anyio.wait_all_tasks_blocked()
            bell.ring()
        with anyio.move_on_after(0) as late:
            await bell.wait()

    assert sorted(heard) == [0, 1]
    assert late.cancelled_caught


@pytest.mark.anyio
async def test_a_ring_after_the_look_is_not_waited_for() -> None:
    bell = Bell()
    num_seen = bell.num_rings
    bell.ring()

    with anyio.fail_after(DEADLINE_S):
        await bell.wait(num_seen)
    with anyio.move_on_after(0) as late:
        await bell.wait(bell.num_rings)

    assert late.cancelled_caught
