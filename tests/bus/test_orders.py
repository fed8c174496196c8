"""An order that nobody answers is told from one to a run that has ended: neither is said to have been obeyed."""

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager

import anyio
import pytest

from areal_async.bus import Bus, Report, Role, ServiceEndpoint, json_object, serving
from areal_async.cli import orders
from areal_async.cli.orders import give
from areal_async.config.settings import Settings
from areal_async.errors import UnansweredError, UserError
from areal_async.launch.run import NotLiveError
from areal_async.launch.run_directory import RunDirectory
from areal_async.protocol.run_state import RunState
from areal_async.protocol.subjects import RUN_STATE
from tests.brokers import OpenRole

pytestmark = pytest.mark.anyio
ENDED = "run test: has ended, and takes no orders; status --run test tells how"


@pytest.fixture
def directory(settings: Settings) -> RunDirectory:
    return RunDirectory(settings.run_directory)


@pytest.fixture
def launcher(directory: RunDirectory) -> Iterator[ExitStack]:
    """Holds the run; closed, the run has ended."""
    with ExitStack() as held:
        held.enter_context(directory.locked("test"))
        yield held


@pytest.fixture
async def bus(open_role: OpenRole) -> Bus:
    return await open_role(Role.OPERATOR)


@asynccontextmanager
async def _stopped_controller(bus: Bus, launcher: ExitStack, *, is_end: bool) -> AsyncIterator[None]:
    """One that hears the order, and answers no more; perhaps its launcher ends meanwhile."""

    async def answer(_: Report) -> Report:
        if is_end:
            launcher.close()
        await anyio.sleep_forever()
        return {}

    endpoint = ServiceEndpoint(
        name="pause",
        subject=bus.names.control("pause"),
        description="",
        request=json_object(),
        response=json_object(),
        answer=answer,
    )
    async with serving(bus, description="", report=dict, endpoints=[endpoint]):
        yield


@pytest.mark.parametrize("is_end", [False, True], ids=["goes on", "ends"])
async def test_an_order_that_is_not_answered_may_still_be_obeyed_unless_the_run_has_ended(
    directory: RunDirectory,
    bus: Bus,
    open_role: OpenRole,
    launcher: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_end: bool,
) -> None:
    monkeypatch.setattr(orders, "ANSWER_DEADLINE_S", 0.5)
    sentence = (
        ENDED if is_end else r"no answer at areal\.test\.control\.pause within 0\.5 s, and it may still be obeyed"
    )

    async with _stopped_controller(await open_role(Role.CONTROLLER), launcher, is_end=is_end):
        with pytest.raises(UserError, match=sentence):
            await give(directory, bus, "pause", {})


async def test_a_live_run_without_its_controller_has_not_ended_but_a_finished_one_has(
    directory: RunDirectory, bus: Bus, launcher: ExitStack
) -> None:
    """Its launcher goes on for a while, and exports the best model."""
    await bus.put(RUN_STATE, RunState())
    with pytest.raises(UnansweredError, match="nobody takes orders there; start the run, or wait for its controller"):
        await give(directory, bus, "pause", {})

    await bus.put(RUN_STATE, RunState(state="finished"))
    with pytest.raises(NotLiveError, match=ENDED):
        await give(directory, bus, "pause", {})
