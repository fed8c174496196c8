"""One sandbox for all rewards and tools of a process: they are plain functions, and nobody hands them one."""

import os

import anyio

from areal_async.sandbox.sandbox import Sandbox

_LOCK = anyio.Lock()
_SHARED: list[Sandbox] = []


async def shared_sandbox() -> Sandbox:
    """Return the sandbox of this process, with a place per core; the first call starts it.

    It ends with the thread that started it: nothing has to be closed.

    Raises:
        UserError: programs cannot be isolated here.
    """
    async with _LOCK:
        if not _SHARED:
            _SHARED.append(await Sandbox(size=os.cpu_count() or 1).__aenter__())
        return _SHARED[0]
