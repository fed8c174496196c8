"""A child is ended with all that it started, whether it obeys, is stopped or does not listen."""

import os
import signal
import sys
from contextlib import suppress

import anyio
import pytest

from areal_async.process.children import end_session

DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
WITH_CHILD = "import os, subprocess, time\nsubprocess.Popen(['sleep', '600'])\nos.write(1, b'1')\ntime.sleep(600)"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("before", "is_stopped", "grace_s", "status"),
    [("", False, 60, signal.SIGTERM), ("", True, 60, signal.SIGTERM), (DEAF, False, 0, signal.SIGKILL)],
    ids=["obeys", "stopped", "deaf"],
)
async def test_nothing_of_a_child_is_left(before: str, is_stopped: bool, grace_s: float, status: int) -> None:
    child = await anyio.open_process([sys.executable, "-c", before + WITH_CHILD], start_new_session=True)
    try:
        assert child.stdout is not None
        assert await child.stdout.receive() == b"1"
        if is_stopped:
            os.killpg(child.pid, signal.SIGSTOP)
    finally:  # a loop that is closed before all children are waits without end where a warning is an error
        await end_session(child, grace_s=grace_s)

    assert child.returncode == -status
    with suppress(ProcessLookupError):
        while True:  # until init has collected what the child left
            os.killpg(child.pid, 0)
            await anyio.sleep(0.01)
