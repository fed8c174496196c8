"""Deadlines stand still with their clock, and go on with what was left of them."""

import asyncio

import pytest
from anyio import wait_all_tasks_blocked

from areal_async.process.pausable_clock import PausableClock

pytestmark = pytest.mark.anyio


async def test_time_stands_still_while_the_clock_is_stopped() -> None:
    clock = PausableClock()
    clock.stop()
    clock.stop()
    before = clock.time()
    await asyncio.sleep(0.01)

    assert clock.time() == before
    clock.go()
    await asyncio.sleep(0.01)
    assert clock.time() > before


async def test_what_waits_is_not_late_before_the_clock_goes_on() -> None:
    clock, never = PausableClock(), asyncio.get_running_loop().create_future()
    clock.stop()
    waiting = asyncio.ensure_future(clock.wait([never], 0.0))
    await wait_all_tasks_blocked()
    assert not waiting.done()

    clock.go()
    await waiting
    assert not never.done(), "a wait cancels nothing"


async def test_a_deadline_that_is_entered_keeps_what_is_left_of_it() -> None:
    clock = PausableClock()
    deadline = clock.timeout(0.02)

    async def overrun() -> None:
        async with deadline:
            clock.stop()
            await asyncio.sleep(0.1)  # which takes longer than the deadline is
            assert not deadline.expired()
            clock.go()
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await overrun()
    assert deadline.expired()


async def test_a_deadline_may_be_set_anew_or_be_none() -> None:
    clock = PausableClock()
    async with clock.timeout(0.02) as deadline:
        clock.stop()
        deadline.renew(100.0)
        clock.go()
        await asyncio.sleep(0.05)
        deadline.renew(None)
        clock.stop()
        clock.go()
    assert not deadline.expired()


async def test_who_is_cancelled_from_outside_is_not_late() -> None:
    clock = PausableClock()
    waiting = asyncio.ensure_future(clock.wait([asyncio.get_running_loop().create_future()], 100.0))
    await wait_all_tasks_blocked()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
