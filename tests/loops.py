"""The event loops of tests: uvloop, which every process of a run has, and asyncio's own in debug mode.

The latter tells what the former lets pass, as a call from another thread, and takes two to eight times as long.
"""

from typing import Any

import pytest

ASYNCIO = pytest.param(("asyncio", {"debug": True}), id="asyncio")
UVLOOP = pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop")
BOTH = [ASYNCIO, UVLOOP]


@pytest.fixture(params=BOTH)
def on_both_loops(request: pytest.FixtureRequest) -> Any:
    """Run every async test on both: the ``anyio_backend`` of whoever gives it no other."""
    return request.param


@pytest.fixture(params=[UVLOOP])
def on_uvloop(request: pytest.FixtureRequest) -> Any:
    """The ``anyio_backend`` of tests in which the loop is no part of what is tested."""
    return request.param
