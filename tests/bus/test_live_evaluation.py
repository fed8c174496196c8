"""``eval`` of a live run outlasts its controller and its broker, and does not wait for a run that has ended."""

from collections.abc import Iterator
from contextlib import ExitStack

import anyio
import msgspec
import pytest

from areal_async.bus import EmbeddedBroker, Report, Role, ServiceEndpoint, json_object, serving
from areal_async.cli import evaluate
from areal_async.cli.evaluate import Result, ask_live
from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.launch.run_directory import RunDirectory
from areal_async.protocol.evaluations import EvalRecord
from tests.brokers import OpenRole, kill, until

pytestmark = pytest.mark.anyio


@pytest.fixture
def directory(settings: Settings, broker: EmbeddedBroker) -> RunDirectory:
    directory = RunDirectory(settings.run_directory)
    directory.write_settings(settings)
    directory.write_bus_url(broker.url)
    return directory


@pytest.fixture
def launcher(directory: RunDirectory) -> Iterator[ExitStack]:
    """Holds the run; closed, the run has ended."""
    with ExitStack() as held:
        held.enter_context(directory.locked("test"))
        yield held


@pytest.fixture(autouse=True)
def _asks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "POLL_S", 0.05)


async def test_an_evaluation_is_waited_for_over_restarts_of_the_controller_and_the_broker(
    open_role: OpenRole, broker: EmbeddedBroker, directory: RunDirectory, launcher: ExitStack
) -> None:
    asked: list[str] = []
    records: list[EvalRecord] = []
    bus = await open_role(Role.CONTROLLER)

    async def answer(body: Report) -> Report:
        asked.append(body.get("version", ""))
        return {"version": "1-7", "records": msgspec.to_builtins(records)}

    endpoint = ServiceEndpoint(
        name="eval",
        subject=bus.names.control("eval"),
        description="",
        request=json_object(),
        response=json_object(),
        answer=answer,
    )
    found: list[list[Result]] = []

    async def ask() -> None:
        found.append(await ask_live(directory))

    async with anyio.create_task_group() as asking:
        async with serving(bus, description="", report=dict, endpoints=[endpoint]):
            asking.start_soon(ask)
            await until(lambda: len(asked) > 1)
        kill(broker)
        records.append(
            EvalRecord(
                eval_id="1-8",
                step=8,
                workflow="w",
                accuracy=0.5,
                num_scored=2,
                num_failed=0,
                oldest="1-8",
                newest="1-8",
            )
        )
        async with serving(bus, description="", report=dict, endpoints=[endpoint]):
            await until(lambda: bool(found))

    ((result,),) = found
    assert (result.model, result.accuracy) == ("1-8", 0.5)
    assert asked[0] == ""
    assert set(asked[1:]) == {"1-7"}


async def test_a_run_that_has_ended_is_not_asked_on(directory: RunDirectory, launcher: ExitStack) -> None:
    async def end() -> None:
        await anyio.wait_all_tasks_blocked()
        launcher.close()

    async with anyio.create_task_group() as ending:
        ending.start_soon(end)
        with pytest.raises(UserError, match="run test: has ended before it was evaluated"):
            await ask_live(directory)
    with pytest.raises(UserError, match="run test: it does not run now; start it first"):
        await ask_live(directory)
