"""Something that runs to its end, unless a signal tells the process to end before."""

import signal
from collections.abc import Awaitable, Callable

import anyio
import anyio.abc


async def run_until_told(main: Callable[[], Awaitable[None]], *told_by: signal.Signals) -> bool:
    """Run to the end, or until one of these signals, which then cancels it; say whether it was that."""
    is_told = False
    async with anyio.create_task_group() as tasks:

        async def watch(*, task_status: anyio.abc.TaskStatus[None]) -> None:
            nonlocal is_told
            with anyio.open_signal_receiver(*told_by) as signals:
                task_status.started()
                async for _ in signals:
                    is_told = True
                    tasks.cancel_scope.cancel()

        await tasks.start(watch)
        await main()
        tasks.cancel_scope.cancel()
    return is_told
