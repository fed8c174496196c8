"""A stopped run is looked into by one after the other: nobody is refused who can wait a moment, nor is a launcher."""

import fcntl
import functools
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint

from areal_async.bus import EmbeddedBroker, HeldError, Role, copied_broker, declare, open_bus
from areal_async.cli import doctor
from areal_async.config.settings import Settings
from areal_async.doctor import Diagnosis
from areal_async.errors import UnreachableError, UserError
from areal_async.launch.run import NotLiveError, hold, visit, visit_at, visit_live
from areal_async.launch.run_directory import LiveError, RunDirectory
from areal_async.protocol.run_state import RunState
from areal_async.protocol.subjects import RUN_STATE
from tests.brokers import PATIENCE_S, until

NOBODY = "nats://127.0.0.1:1"
REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.anyio


@pytest.fixture
async def stopped(settings: Settings) -> RunDirectory:
    """A run that was stopped."""
    directory = RunDirectory(settings.run_directory)
    broker = EmbeddedBroker(settings)
    await broker.start()
    try:
        key = broker.credentials(Role.OPERATOR)
        async with open_bus(broker.url, names=settings.names, role=Role.OPERATOR, credentials=key) as bus:
            await declare(bus, settings)
            await bus.put(RUN_STATE, RunState(state="stopped"))
        directory.write_settings(settings)
        directory.write_bus_url(broker.url)
    finally:
        await broker.aclose()
    return directory


async def test_who_looks_into_a_stopped_run_waits_for_one_who_does_already(stopped: RunDirectory) -> None:
    states: list[str] = []

    async def look() -> None:
        async with visit(stopped) as (_, bus):
            state, _ = await bus.get(RUN_STATE, RunState)
            states.append("" if state is None else state.state)

    async with anyio.create_task_group() as tasks:
        with stopped.locked("test", is_visit=True):
            tasks.start_soon(look)
            await anyio.wait_all_tasks_blocked()
            assert states == []

    assert states == ["stopped"]


async def test_who_has_waited_finds_a_run_that_was_resumed_meanwhile(stopped: RunDirectory, settings: Settings) -> None:
    """At its new address, which was not yet written when the wait began."""
    states: list[str] = []

    async def look() -> None:
        async with visit(stopped) as (_, bus):
            state, _ = await bus.get(RUN_STATE, RunState)
            states.append("" if state is None else state.state)

    broker = EmbeddedBroker(settings)
    async with anyio.create_task_group() as tasks:
        with stopped.locked("test", is_visit=True):
            tasks.start_soon(look)
            await anyio.wait_all_tasks_blocked()
            await broker.start()
            stopped.write_bus_url(broker.url)
        with stopped.locked("test"):
            try:
                with anyio.fail_after(30):
                    await until(lambda: bool(states))
            finally:
                tasks.cancel_scope.cancel()
                await broker.aclose()

    assert states == ["stopped"]


async def test_who_comes_before_a_resumed_runs_broker_finds_it(stopped: RunDirectory, settings: Settings) -> None:
    """Its launcher holds the directory from its first moment, and knows the address only once the broker is up."""
    states: list[str] = []

    async def look() -> None:
        async with visit(stopped, connect_deadline_s=1.0) as (_, bus):
            state, _ = await bus.get(RUN_STATE, RunState)
            states.append("" if state is None else state.state)

    broker = EmbeddedBroker(settings)
    with stopped.locked("test"):
        await broker.start()
        try:
            stopped.write_bus_url(NOBODY)  # as it was before
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(look)
                await anyio.wait_all_tasks_blocked()
                stopped.write_bus_url(broker.url)
        finally:
            await broker.aclose()

    assert states == ["stopped"]


async def test_an_order_finds_a_run_whose_broker_is_only_about_to_come_up(
    stopped: RunDirectory, settings: Settings
) -> None:
    """As one that is resumed after its launcher was killed, and one that is started for the first time."""
    states: list[str] = []

    async def order() -> None:
        async with visit_live(stopped) as (_, bus):
            state, _ = await bus.get(RUN_STATE, RunState)
            states.append("" if state is None else state.state)

    broker = EmbeddedBroker(settings)
    before = stopped.path / "bus" / "url"
    with stopped.locked("test"):
        await broker.start()
        try:
            stopped.write_bus_url(NOBODY)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(order)
                await anyio.wait_all_tasks_blocked()
                before.unlink()
                tasks.start_soon(order)
                await anyio.wait_all_tasks_blocked()
                stopped.write_bus_url(broker.url)
        finally:
            await broker.aclose()

    assert states == ["stopped", "stopped"]


async def test_a_run_that_ends_without_its_broker_is_told_to_have_ended_and_looked_into(stopped: RunDirectory) -> None:
    """Its launcher has the directory still when its broker has gone: it exports the best model, and sums up."""
    told: list[str] = []

    async def order() -> None:
        with pytest.raises(NotLiveError) as error:
            async with visit_live(stopped):
                await checkpoint()
        told.append(str(error.value))

    async def look() -> None:
        async with visit(stopped) as (_, bus):
            state, _ = await bus.get(RUN_STATE, RunState)
            told.append("" if state is None else state.state)

    async with anyio.create_task_group() as tasks:
        with stopped.locked("test"):
            for one in (order, look):
                tasks.start_soon(one)
            await anyio.wait_all_tasks_blocked()
            assert told == []

    assert sorted(told) == ["run test: has ended", "stopped"]


@pytest.mark.parametrize("is_met_alive", [False, True], ids=["before it is asked", "while it is asked"])
async def test_a_run_that_ends_is_examined_as_one_that_has(
    stopped: RunDirectory, monkeypatch: pytest.MonkeyPatch, *, is_met_alive: bool
) -> None:
    monkeypatch.setattr("areal_async.doctor.audit.examination.CONNECT_DEADLINE_S", 0.2)
    found: list[Diagnosis] = []
    was_found: list[bool] = []
    held = ExitStack()
    held.enter_context(stopped.locked("test"))

    async def find_broker(directory: RunDirectory) -> str | None:
        """The broker goes right after it was found, and the launcher when it is looked for again."""
        if was_found:
            held.close()
        was_found.append(True)
        return NOBODY if directory.is_live else None

    if is_met_alive:
        monkeypatch.setattr(doctor, "_find_broker", find_broker)

    async def examine() -> None:
        found.append(await doctor.examine_now(stopped))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(examine)
        await anyio.wait_all_tasks_blocked()
        if not is_met_alive:
            held.close()

    assert [one.is_live for one in found] == [False]


async def test_a_live_run_without_a_broker_is_told_in_one_sentence(stopped: RunDirectory) -> None:
    sentence = (
        f"run test: its broker at {NOBODY} does not answer after 0 s; it starts or ends now, or its broker is down"
    )
    stopped.write_bus_url(NOBODY)

    with stopped.locked("test"), pytest.raises(UnreachableError, match=re.escape(sentence)):
        async with visit(stopped, connect_deadline_s=0.0):
            await checkpoint()


async def test_a_run_that_the_broker_does_not_know_is_told_with_those_that_it_has(
    settings: Settings, broker: EmbeddedBroker
) -> None:
    elsewhere = settings.bus.model_copy(update={"url": broker.url, "credentials": broker.credentials(Role.OPERATOR)})
    run = settings.run.model_copy(update={"name": "wrongname"})
    sentence = f"run wrongname: nothing is known of it at {broker.url}, which has test; check --run and --bus.url"

    with pytest.raises(UserError, match=re.escape(sentence)):
        async with visit_at(settings.model_copy(update={"bus": elsewhere, "run": run}), PATIENCE_S):
            await checkpoint()


async def test_one_who_looks_for_too_long_is_named(stopped: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_async.bus.inspection.OTHERS_S", 0.0)

    with stopped.locked("test", is_visit=True), pytest.raises(HeldError, match="looks into it; try again when it has"):
        async with visit(stopped):
            await checkpoint()


@pytest.mark.parametrize("lock", ["run.lock", "launcher.lock"], ids=["one who looks into it", "one who asks of it"])
async def test_a_launcher_waits_for(stopped: RunDirectory, lock: str) -> None:
    """A copy is made of the store, or it is seen whether a launcher is there, under a lock that is shared."""
    with ExitStack() as launcher:
        async with anyio.create_task_group() as tasks:
            with (stopped.path / lock).open("w") as held:
                fcntl.flock(held, fcntl.LOCK_SH)
                tasks.start_soon(functools.partial(hold, launcher, stopped, "test", is_visit=False))
                await anyio.wait_all_tasks_blocked()
                assert not stopped.is_live

        assert stopped.is_live


async def test_a_copy_of_a_stopped_runs_store_is_made_when_one_who_looks_into_it_has_ended(
    stopped: RunDirectory, settings: Settings
) -> None:
    """And not where a launcher has it."""
    copies: list[list[str]] = []

    async def copy() -> None:
        async with copied_broker(settings, stopped.path) as (_, notes):
            copies.append(notes)

    async with anyio.create_task_group() as tasks:
        with stopped.locked("test", is_visit=True):
            tasks.start_soon(copy)
            await anyio.wait_all_tasks_blocked()
            assert copies == []

    assert copies == [[]]
    with stopped.locked("test"), pytest.raises(HeldError, match="run.lock: held by process"):
        await copy()


async def test_a_launcher_waits_for_no_other(stopped: RunDirectory) -> None:
    with stopped.locked("test"), ExitStack() as launcher, pytest.raises(LiveError, match="already running in process"):
        await hold(launcher, stopped, "test", is_visit=False)


async def test_verbs_that_read_may_be_given_at_once(stopped: RunDirectory) -> None:
    told: dict[str, str] = {}

    async def give(verb: str) -> None:
        words = [sys.executable, "-m", "areal_async", verb, "--run", str(stopped.path)]
        ended = await anyio.run_process(words, cwd=REPOSITORY, stderr=subprocess.STDOUT, check=False)
        told[verb] = f"{ended.returncode} {ended.stdout.decode()}"

    async with anyio.create_task_group() as giving:
        for verb in ("status", "trajectories"):
            giving.start_soon(give, verb)

    assert told["status"].startswith("0 run test: not running"), told
    assert told["trajectories"].startswith("0 no trajectories"), told
