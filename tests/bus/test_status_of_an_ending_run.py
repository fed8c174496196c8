"""A run may lose its broker, or end, while it is asked how it is: the answer says which."""

from collections.abc import Iterator
from contextlib import ExitStack

import anyio
import pytest

from areal_async.bus import Bus, EmbeddedBroker, Report, Role, declare, gather_reports, open_bus
from areal_async.config.settings import Settings
from areal_async.launch.run_directory import RunDirectory
from areal_async.monitor.snapshot import Status, ask_status, locked, read_status
from areal_async.protocol.run_state import RunState
from areal_async.protocol.subjects import RUN_STATE
from areal_async.protocol.types import Outcome, OutcomeKind
from tests.brokers import until
from tools.faults_proxy import Proxy

pytestmark = pytest.mark.anyio
OPERATION_S = 2.0


@pytest.fixture
def launcher() -> Iterator[ExitStack]:
    """What a launcher holds until it ends."""
    with ExitStack() as held:
        yield held


@pytest.mark.parametrize(("does_end", "state"), [(True, "not running"), (False, "no broker")])
async def test_a_broker_that_falls_silent_while_it_is_asked_is_told_from_a_run_that_ends(
    settings: Settings, launcher: ExitStack, monkeypatch: pytest.MonkeyPatch, *, does_end: bool, state: str
) -> None:
    monkeypatch.setattr("areal_async.monitor.snapshot.OPERATION_S", OPERATION_S)
    directory = RunDirectory(settings.run_directory)
    launcher.enter_context(directory.locked("test"))
    directory.write_settings(settings)
    broker = EmbeddedBroker(settings)
    await broker.start()
    between = ExitStack()
    found: list[Status] = []

    async def ask() -> None:
        found.append(await ask_status(directory))

    async def gather(bus: Bus, *, within_s: float) -> dict[tuple[str, str], Report]:
        proxy.inject_messages("operator", ".", delay_s=None)  # it takes what is asked from here on, and does not answer
        return await gather_reports(bus, within_s=within_s)

    monkeypatch.setattr("areal_async.monitor.snapshot.gather_reports", gather)
    try:
        key = broker.credentials(Role.OPERATOR)
        async with open_bus(broker.url, names=settings.names, role=Role.OPERATOR, credentials=key) as bus:
            await declare(bus, settings)
            await bus.put(RUN_STATE, RunState(state="stopped"))
        proxy = between.enter_context(Proxy(int(broker.url.rpartition(":")[2])))
        directory.write_bus_url(proxy.url)
        async with anyio.create_task_group() as asking:
            asking.start_soon(ask)
            await until(lambda: proxy.num_frames_hit > 0)
            assert found == []
            if does_end:
                between.close()
                await broker.aclose()
                launcher.close()
    finally:
        between.close()
        await broker.aclose()

    (status,) = found
    assert status.state == state
    assert ("no success within" in status.reason) is not does_end


async def test_what_a_dead_controller_had_not_counted_as_admitted_is_told_as_settled_and_admitted(
    settings: Settings,
) -> None:
    directory = RunDirectory(settings.run_directory)
    directory.write_settings(settings)
    broker = EmbeddedBroker(settings)
    await broker.start()
    try:
        key = broker.credentials(Role.OPERATOR)
        async with open_bus(broker.url, names=settings.names, role=Role.OPERATOR, credentials=key) as bus:
            await declare(bus, settings)
            await bus.put(RUN_STATE, RunState(state="failed"))
        key = broker.credentials(Role.CONTROLLER)
        async with open_bus(broker.url, names=settings.names, role=Role.CONTROLLER, credentials=key) as bus:
            dead = Outcome(group_id="0-1-0", kind=OutcomeKind.DEAD, lineage=0)
            await bus.publish(settings.names.outcomes, dead, msg_id="0-1-0")
        key = broker.credentials(Role.OPERATOR)
        async with open_bus(broker.url, names=settings.names, role=Role.OPERATOR, credentials=key) as bus:
            status = await read_status(settings, bus, ask_live=locked(directory))
    finally:
        await broker.aclose()
    assert (status.admitted, status.settled, status.in_flight) == (1, 1, 0)
