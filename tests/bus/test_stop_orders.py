"""The launcher follows the order to stop, and tells of a pause only when it is older than this start."""

from collections.abc import AsyncIterator

import anyio
import pytest

from areal_async.bus import Role
from areal_async.launch.orders import run_stop_orders
from areal_async.protocol.run_state import Control
from areal_async.protocol.subjects import CONTROL
from tests.brokers import PATIENCE_S, OpenRole

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("is_paused", [False, True], ids=["fresh", "paused before"])
async def test_a_pause_is_told_of_at_the_start_alone(
    open_role: OpenRole, monkeypatch: pytest.MonkeyPatch, *, is_paused: bool
) -> None:
    bus = await open_role(Role.OPERATOR)
    if is_paused:
        await bus.put(CONTROL, Control(is_paused=True, by="ann"))
    told: list[str] = []
    watching, stopped, watch = anyio.Event(), anyio.Event(), bus.watch_key

    def begin_watching(key: str, kind: type[Control]) -> AsyncIterator[Control]:
        watching.set()
        return watch(key, kind)

    monkeypatch.setattr(bus, "watch_key", begin_watching)
    async with anyio.create_task_group() as following:
        following.start_soon(lambda: run_stop_orders(bus, stop=stopped.set, notify=told.append))
        with anyio.fail_after(PATIENCE_S):
            await watching.wait()
            await bus.put(CONTROL, Control(is_paused=True, by="bob"))
            await bus.put(CONTROL, Control(is_paused=True, is_stopping=True, by="bob"))
            await stopped.wait()
        following.cancel_scope.cancel()

    assert told == (["still paused by ann: nothing is admitted before it is resumed"] if is_paused else [])
