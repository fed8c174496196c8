"""The trainer has the GPUs once every server is out of its way, says so as long as it has them, and lets go."""

import anyio
import pytest

from areal_async.bus import Bus, Role
from areal_async.config.settings import InferenceSettings
from areal_async.errors import FencedError, PipelineError
from areal_async.process.pausable_clock import PausableClock
from areal_async.protocol.run_state import CardHold, ServerState
from areal_async.protocol.subjects import CARD
from areal_async.telemetry import wait_graph
from areal_async.trainer import card_turns
from areal_async.trainer.batch.lineage import Lineage
from areal_async.trainer.card_turns import CardTurns
from tests.brokers import OpenRole, until

pytestmark = pytest.mark.anyio

INFERENCE = InferenceSettings(start_deadline_s=60.0)


class Scene:
    """A trainer of the first lineage, and a node that writes what its servers do."""

    def __init__(self, trainer: Bus, node: Bus, lineage: Lineage) -> None:
        self.trainer, self.node = trainer, node
        self.clock = PausableClock()
        self.turns = CardTurns(trainer, lineage, INFERENCE, clock=self.clock)

    async def say(self, server_id: str, card: str) -> None:
        state = ServerState(server_id=server_id, node_id="0", url="", version="1-0", card=card)
        await self.node.put(self.node.names.server_key(server_id), state)

    async def told(self) -> CardHold | None:
        return (await self.node.get(CARD, CardHold))[0]


@pytest.fixture
async def scene(open_role: OpenRole) -> Scene:
    trainer = await open_role(Role.TRAINER)
    return Scene(trainer, await open_role(Role.NODE), await Lineage.take(trainer))


async def test_a_turn_begins_when_every_server_that_shares_a_gpu_is_out_of_the_way(scene: Scene) -> None:
    await scene.turns.begin(0)
    assert await scene.told() == CardHold(version="1-0", is_held=False)
    await scene.say("0-0", "used")
    await scene.say("0-1", "0-9")  # out of the way of an earlier turn, which it may have seen the end of
    await scene.say("guest-0", "")
    has_begun, may_end = anyio.Event(), anyio.Event()

    async def train() -> None:
        async with scene.turns.turn(1):
            has_begun.set()
            await may_end.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(train)
        await until(lambda: {one.on for one in wait_graph.report("trainer").records} == {"server 0-0", "server 0-1"})
        assert await scene.told() == CardHold(version="1-1", is_held=True)
        assert scene.clock.is_stopped, "no group is late meanwhile"
        await scene.say("0-0", "1-1")
        await until(lambda: {one.on for one in wait_graph.report("trainer").records} == {"server 0-1"})
        assert not has_begun.is_set()
        await scene.say("0-1", "1-1")
        await has_begun.wait()
        assert scene.turns.hold == "1-1"
        may_end.set()
    assert await scene.told() == CardHold(version="1-1", is_held=False)
    assert (scene.turns.hold, scene.clock.is_stopped) == ("", False)


async def test_whatever_ends_a_turn_it_is_said_to_be_over(scene: Scene) -> None:
    with pytest.raises(ZeroDivisionError):
        async with scene.turns.turn(3):
            raise ZeroDivisionError
    assert await scene.told() == CardHold(version="1-3", is_held=False)
    with anyio.CancelScope() as scope:
        async with scene.turns.turn(4):
            scope.cancel()
            await anyio.sleep_forever()
    assert await scene.told() == CardHold(version="1-4", is_held=False)


async def test_a_turn_that_lasts_is_told_of_again_and_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_turns, "BEAT_S", 0.01)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.turns.run_beats)
        async with scene.turns.turn(1):
            beats: set[int] = set()
            while len(beats) < 3:
                told = await scene.told()
                assert told is not None
                assert (told.version, told.is_held) == ("1-1", True)
                beats.add(told.beat)
        assert await scene.told() == CardHold(version="1-1", is_held=False), "no beat comes after the end"
        tasks.cancel_scope.cancel()


async def test_a_server_that_never_gives_way_ends_the_trainer_by_name(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before the end of the time that it may take to start, with all that it has to say meanwhile."""
    await scene.say("0-0", "used")
    monkeypatch.setattr(card_turns, "SLACK_S", -INFERENCE.start_bound_s)
    turns = CardTurns(scene.trainer, scene.turns._lineage, INFERENCE, clock=scene.clock)
    with pytest.raises(PipelineError, match=r"step 1: servers 0-0 have not given .* within 0 s"):
        await turns.turn(1).__aenter__()
    assert await scene.told() == CardHold(version="1-1", is_held=False)


async def test_a_newer_trainer_ends_an_older_ones_turns(scene: Scene, open_role: OpenRole) -> None:
    await scene.turns.begin(0)
    newer = await open_role(Role.TRAINER, "1")
    await CardTurns(newer, await Lineage.take(newer), INFERENCE, clock=PausableClock()).begin(0)

    with pytest.raises(FencedError):
        await scene.turns.turn(1).__aenter__()
    assert await scene.told() == CardHold(version="2-0", is_held=False)
