"""A lease is kept while a ticket is worked on, and not a moment longer."""

import gc
import time
from typing import cast

import anyio
import anyio.lowlevel
import pytest

from areal_async.bus import Delivery
from areal_async.process.bell import Bell
from areal_async.rollout.lease import KeptLease

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]


class Lease:
    """Counts how often it is kept; each time takes so long."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.takes_s = takes_s
        self.num_begun = 0
        self.num_done = 0
        self.bell = Bell()

    async def in_progress(self) -> None:
        self.num_begun += 1
        self.bell.ring()
        await anyio.sleep(self.takes_s)
        self.num_done += 1
        self.bell.ring()

    @property
    def delivery(self) -> Delivery:
        return cast(Delivery, self)


async def test_it_is_kept_again_and_again_until_the_block_ends() -> None:
    lease = Lease()
    with anyio.fail_after(10):
        async with KeptLease(lease.delivery, 0.01):
            while lease.num_done < 3:
                await lease.bell.wait()
    num_begun = lease.num_begun
    await anyio.sleep(0.05)
    assert lease.num_begun == num_begun


async def test_a_broker_that_does_not_answer_is_told_once_and_holds_nobody() -> None:
    lease = Lease(takes_s=60.0)
    with anyio.fail_after(10):
        async with KeptLease(lease.delivery, 0.01):
            await anyio.sleep(0.1)
    assert (lease.num_begun, lease.num_done) == (1, 0)


async def test_a_timer_that_came_as_the_block_ended_tells_nobody() -> None:
    lease = Lease(takes_s=60.0)
    with anyio.fail_after(10):
        async with KeptLease(lease.delivery, 0.01):
            time.sleep(0.05)  # noqa: ASYNC251  # the timer is due, and its task begins in the turn in which the block ends
            await anyio.lowlevel.checkpoint()
    assert lease.num_begun == 0


async def test_what_fails_in_keeping_it_ends_the_block() -> None:
    class Broken(Lease):
        async def in_progress(self) -> None:
            raise OSError("gone")

    with anyio.fail_after(10), pytest.raises(ExceptionGroup) as failed:
        async with KeptLease(Broken().delivery, 0.01):
            await anyio.sleep_forever()
    assert [str(one) for one in failed.value.exceptions] == ["gone"]


@pytest.mark.parametrize("takes_s", [0.0, 60.0])
async def test_it_is_not_kept_after_an_error_of_the_block(takes_s: float) -> None:
    lease = Lease(takes_s=takes_s)

    async def work() -> None:
        async with KeptLease(lease.delivery, 0.01):
            await lease.bell.wait()
            raise ValueError

    with anyio.fail_after(10), pytest.raises(ExceptionGroup):
        await work()
    num_begun = lease.num_begun
    await anyio.sleep(0.05)
    assert lease.num_begun == num_begun


async def test_a_ticket_that_is_done_soon_leaves_nothing_to_the_garbage_collector() -> None:
    lease = Lease()

    async def work() -> None:
        async with KeptLease(lease.delivery, 60.0):
            await anyio.lowlevel.checkpoint()

    await work()
    gc.collect()
    gc.disable()
    try:
        for _ in range(8):
            await work()
        assert gc.collect() == 0
    finally:
        gc.enable()
