"""A run of which nobody answers is told from one that nobody runs: by its directory, from elsewhere by its beat."""

import io
from contextlib import ExitStack

import anyio
import pytest
from rich.console import Console

from areal_async.bus import Bus, EmbeddedBroker, Role
from areal_async.config.settings import Settings
from areal_async.launch.heartbeat_lock import own_holder, run_beats
from areal_async.launch.run_directory import RunDirectory
from areal_async.monitor.liveness import BeatsSeen, awaiting_beat
from areal_async.monitor.snapshot import Status, ask_status, read_status
from areal_async.monitor.status_screen import render
from areal_async.protocol.run_state import CrewState, RunState
from areal_async.protocol.subjects import ADMITTED, LAUNCHER, RUN_STATE
from areal_async.protocol.types import Admitted, Cut, CutGroup, CutKind, Outcome, OutcomeKind, WeightsVersion
from tests.brokers import OpenRole, until

pytestmark = pytest.mark.anyio
DEAD = CrewState(name="controller", state="died", reason="controller ended by SIGKILL", num_starts=1)


def _told(status: Status) -> tuple[str, list[str]]:
    return status.state, status.notes


async def test_a_run_whose_processes_are_not_there_yet_or_all_dead_is_live_here(
    settings: Settings, broker: EmbeddedBroker, open_role: OpenRole
) -> None:
    directory, bus = RunDirectory(settings.run_directory), await open_role(Role.OPERATOR)
    directory.write_settings(settings)
    directory.write_bus_url(broker.url)

    with ExitStack() as launcher:
        launcher.enter_context(directory.locked("test"))
        begun = await ask_status(directory)
        await bus.put("crew.controller", DEAD)
        dead = await ask_status(directory)

    assert _told(begun) == ("starting", ["controller 0 does not answer", "trainer 0 does not answer"])
    assert _told(dead) == (
        "running",
        ["controller 0 does not answer: controller ended by SIGKILL", "trainer 0 does not answer"],
    )


async def test_from_elsewhere_the_launchers_beat_tells(
    settings: Settings, open_role: OpenRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.launch.heartbeat_lock.BEAT_S", 0.1)
    bus = await open_role(Role.OPERATOR)
    seen = BeatsSeen(bus)

    async def state() -> str:
        return (await read_status(settings, bus, ask_live=awaiting_beat(bus))).state

    async with anyio.create_task_group() as launcher:
        launcher.start_soon(lambda: run_beats(bus, LAUNCHER, own_holder(), what="run test"))
        assert await state() == "starting"
        await until(seen.is_live)
        launcher.cancel_scope.cancel()

    assert await state() == "not running"
    assert not await BeatsSeen(bus).is_live()


@pytest.mark.parametrize(("state", "told"), [("stopped", "not running"), ("finished", "finished")])
async def test_a_run_that_is_over_is_shown_with_the_books_that_it_has_left(
    settings: Settings, open_role: OpenRole, state: str, told: str
) -> None:
    bus = await open_role(Role.OPERATOR)
    group = CutGroup(group_id="0-1-0", workflow="w", slots=[])
    outcome = Outcome(group_id="0-2-0", kind=OutcomeKind.FILTERED, lineage=1)
    await bus.publish(bus.names.cuts, Cut(kind=CutKind.BEGIN, lineage=1, step=0))
    await bus.publish(bus.names.cuts, Cut(lineage=1, step=1, groups=[group]))
    await bus.publish(bus.names.outcomes, outcome)
    await bus.put(ADMITTED, Admitted(total=5, num_fresh=5))
    await bus.put(bus.names.weights_key(), WeightsVersion(version="1-1", path="x"))
    await bus.put(RUN_STATE, RunState(state=state))

    status = await read_status(settings, bus, ask_live=awaiting_beat(bus))

    console = Console(width=120, record=True, file=io.StringIO())
    console.print(*render(status), sep="\n")
    assert status.state == told
    assert (status.admitted, status.settled, status.in_flight, status.credits) == (5, 2, 3, None)
    assert "groups  5 admitted, 2 settled, 3 in flight when it ended" in console.export_text()


async def test_beats_are_forgotten_when_no_newer_one_comes(
    open_role: OpenRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus: Bus = await open_role(Role.OPERATOR)
    seen = BeatsSeen(bus)
    await bus.put(LAUNCHER, own_holder())
    assert not await seen.is_live()
    await bus.put(LAUNCHER, own_holder())
    assert await seen.is_live()

    monkeypatch.setattr("areal_async.monitor.liveness.BEAT_S", 0.0)
    assert not await seen.is_live()
