"""Servers get out of the trainer's way and come back, whatever happens meanwhile, and never pass it unseen."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from areal_async.inference.card import USED, SharedCard
from areal_async.inference.pool import ServerHandle
from areal_async.process.bell import Bell
from areal_async.process.pausable_clock import PausableClock
from areal_async.protocol.run_state import CardHold
from areal_async.telemetry import wait_graph
from tests.fakes.fake_sglang import FakeSglang
from tests.unit.inference.test_updates import RESTORED, Scene, on_disk, scene_of

pytestmark = pytest.mark.anyio

AWAY = ["/pause_generation", "/flush_cache", "/release_memory_occupation"]
BACK = ["/resume_memory_occupation", "/continue_generation"]


def held(version: str, *, beat: int = 0) -> CardHold:
    return CardHold(version=version, is_held=True, beat=beat)


def free(version: str) -> CardHold:
    return CardHold(version=version, is_held=False)


@asynccontextmanager
async def serving_scene(version: str = "1-0") -> AsyncIterator[tuple[Scene, SharedCard]]:
    """A server that holds weights and shares its card."""
    async with scene_of(FakeSglang()) as scene:
        scene.server.card = USED
        scene.announce(on_disk(version))
        await scene.until(version)
        assert scene.routes == RESTORED
        yield scene, scene.around.card


async def give_way(scene: Scene, card: SharedCard, version: str) -> None:
    card.hear(held(version))
    await scene.fake.wait_called("/release_memory_occupation")
    while scene.server.card != version:
        await wait_all_tasks_blocked()


async def test_a_server_gives_its_memory_back_for_a_step_and_takes_it_again() -> None:
    async with serving_scene() as (scene, card):
        await give_way(scene, card, "1-1")
        assert scene.routes == AWAY
        assert (scene.fake.is_paused, card._clock.is_stopped) == (True, True)
        assert scene.server.is_serviceable, "its requests stay where they are"
        (wait,) = [one for one in wait_graph.report("server s0").records if one.waiter == "server s0"]
        assert (wait.on, wait.what) == ("step 1", "its GPU, which is with")

        card.hear(free("1-1"))
        await scene.fake.wait_called("/continue_generation")
        assert scene.routes == BACK
        assert (scene.server.card, card._clock.is_stopped) == (USED, False)


async def test_a_server_that_compiles_a_grammar_goes_on_until_that_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_async.inference.supervision.updates.GRAMMAR_RETRY_S", 0.01)
    async with serving_scene() as (scene, card):
        scene.fake.failing["/flush_cache"] = (400, {"message": "there are pending requests"})
        card.hear(held("1-1"))
        await scene.fake.wait_called("/continue_generation")
        del scene.fake.failing["/flush_cache"]
        await scene.fake.wait_called("/release_memory_occupation")

        turns = scene.routes
        assert turns[-len(AWAY) :] == AWAY
        assert set(zip(turns[: -len(AWAY) : 2], turns[1 : -len(AWAY) : 2], strict=True)) == {(AWAY[0], BACK[1])}


async def test_weights_that_are_announced_in_a_step_are_loaded_after_it() -> None:
    async with serving_scene() as (scene, card):
        await give_way(scene, card, "1-1")
        scene.announce(on_disk("1-1"))
        await wait_all_tasks_blocked()
        assert scene.routes == AWAY
        card.hear(free("1-1"))
        await scene.until("1-1")
        assert scene.routes == [*BACK, *RESTORED]


async def test_a_server_that_nobody_can_be_sure_of_stays_paused_after_a_step() -> None:
    async with scene_of(FakeSglang()) as scene:
        card = scene.around.card
        await give_way(scene, card, "1-1")
        card.hear(free("1-1"))
        await scene.fake.wait_called("/resume_memory_occupation")
        scene.announce(on_disk("1-0"))
        await scene.until("1-0")
        away = [route for route in AWAY if route != "/flush_cache"]
        assert scene.routes == [*away, BACK[0], *RESTORED], "no token before the weights are known"


async def test_a_server_that_does_not_give_its_memory_back_is_to_be_started_again() -> None:
    async with serving_scene() as (scene, card):
        scene.fake.failing["/release_memory_occupation"] = (500, {"message": "busy"})
        card.hear(held("1-1"))
        await scene.given_up.wait()
    assert scene.reasons == ["sharing a GPU: /release_memory_occupation: status 500: busy"]
    assert scene.server.card == USED, "the trainer waits until its process is gone"


class Turns:
    """A card alone, one server that is to start, and what was said of it."""

    def __init__(self, *, lease_s: float = 1000.0) -> None:
        self.clock = PausableClock()
        self.card = SharedCard(Bell(), self.clock, lease_s=lease_s)
        self.card.look = self.look
        self.server = ServerHandle("s0")
        self.told: list[str] = []
        self.said: CardHold | None = None

    async def look(self) -> CardHold | None:
        return self.said

    async def publish(self, server: ServerHandle) -> None:
        self.told.append(server.card)


async def test_a_server_is_not_started_in_a_step_and_is_when_that_is_over() -> None:
    turns = Turns()
    turns.card.hear(held("1-1"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(turns.card.start_using, turns.server, turns.publish)
        await wait_all_tasks_blocked()
        assert turns.told == [USED, "1-1"]
        turns.card.hear(held("1-2"))  # the end of the first was not seen
        await wait_all_tasks_blocked()
        assert turns.told == [USED, "1-1", USED, "1-2"]
        turns.card.hear(free("1-2"))
    assert turns.told[-1] == USED


async def test_a_server_that_starts_looks_again_once_it_has_said_so() -> None:
    """Its node has not heard of the turn, in which the trainer has not seen the server."""
    turns = Turns()
    turns.said = held("1-1")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(turns.card.start_using, turns.server, turns.publish)
        await wait_all_tasks_blocked()
        assert turns.told == [USED, "1-1"]
        turns.said = free("1-1")
        turns.card.hear(turns.said)


async def test_where_nothing_is_shared_nothing_is_said() -> None:
    turns = Turns()
    turns.card.look = None
    await turns.card.start_using(turns.server, turns.publish)
    assert (turns.told, turns.server.card) == ([], "")


async def test_the_hold_of_a_trainer_that_is_gone_runs_out_and_its_last_word_does_not_bring_it_back() -> None:
    turns = Turns(lease_s=0.01)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(turns.card.run_lease)
        turns.said = held("1-1")
        turns.card.hear(turns.said)
        assert turns.clock.is_stopped
        with anyio.fail_after(60):
            await turns.card.start_using(turns.server, turns.publish)
        assert (turns.told[-1], turns.clock.is_stopped) == (USED, False)
        turns.card.hear(held("1-1", beat=1))
        assert turns.card.hold == "1-1", "it was only late"
        tasks.cancel_scope.cancel()
