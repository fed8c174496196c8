"""The event loops of tests: uvloop, which every process of a run has, and asyncio's own in debug mode.

The latter tells what the former lets pass, as a call from another thread, and takes two to eight times as long: tests
that are marked ``both_loops`` run on it too, and with ``--both-loops`` all that do not choose their loop themselves.
"""

from typing import Any

import pytest

UVLOOP = "asyncio", {"use_uvloop": True}
ASYNCIO = "asyncio", {"debug": True}


@pytest.fixture
def loop_options() -> Any:
    """Return the loop of a test that names none: anyio's backend and its options."""
    return UVLOOP


@pytest.fixture
def anyio_backend(loop_options: Any) -> Any:
    return loop_options


def run_on_both(metafunc: pytest.Metafunc) -> None:
    """Make two of each test that is to run on both loops."""
    is_wanted = metafunc.config.getoption("both_loops") or metafunc.definition.get_closest_marker("both_loops")
    chosen = [mark for mark in metafunc.definition.iter_markers("parametrize") if "anyio_backend" in mark.args[0]]
    if is_wanted and not chosen and "loop_options" in metafunc.fixturenames:
        metafunc.parametrize("loop_options", [ASYNCIO, UVLOOP], ids=["asyncio", "uvloop"])
