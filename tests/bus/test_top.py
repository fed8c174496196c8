"""``top`` outlives the run that it shows, and takes nothing that one which starts again needs."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest

from areal_async.bus import EmbeddedBroker, Role, declare, hearing_reports, open_bus
from areal_async.cli.top import _Top
from areal_async.cli.top_view import TopView
from areal_async.launch.run_directory import RunDirectory
from areal_async.settings import Settings
from tests.brokers import running_broker, until

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def _launched(settings: Settings, directory: RunDirectory) -> AsyncIterator[EmbeddedBroker]:
    """What a launcher holds."""
    with directory.locked("test"):
        async with running_broker(settings) as broker:
            directory.write_bus_url(broker.url)
            yield broker


async def test_a_run_that_ends_is_looked_for_until_it_is_started_again_elsewhere_and_its_lock_is_left_alone(
    settings: Settings,
) -> None:
    directory, view = RunDirectory(settings.run_directory), TopView()
    directory.write_settings(settings)

    async with AsyncExitStack() as visit, anyio.create_task_group() as tasks:
        async with _launched(settings, directory) as broker:
            key = broker.credentials(Role.OPERATOR)
            connecting = open_bus(broker.url, names=settings.names, role=Role.OPERATOR, credentials=key)
            bus = await visit.enter_async_context(connecting)
            await declare(bus, settings)
            top = _Top(settings, bus, view=view, by="me", directory=directory)

            async def ask() -> None:
                async with hearing_reports(bus, top._hear) as ask_all:
                    await top._run_asking(ask_all, lambda: None)

            tasks.start_soon(ask)
            await until(lambda: view.status is not None)
            held = directory.lock.stat().st_mtime_ns
        await until(lambda: view.status is not None and view.status.state == "ended")
        assert directory.lock.stat().st_mtime_ns == held
        assert not top.has_moved
        async with _launched(settings, directory):
            await until(lambda: top.has_moved)
