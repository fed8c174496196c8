"""A stall is taken to whoever can be started again, once they have begun to work; what is told to end does so."""

from collections import Counter

import anyio
import pytest

from areal_async.bus import Bus, Role
from areal_async.config.settings import Settings
from areal_async.errors import PipelineError, leaves_of
from areal_async.launch.stalls import StallWatch, group_of
from areal_async.protocol.run_state import RunState
from areal_async.protocol.subjects import RUN_STATE
from areal_async.telemetry.wait_graph import Stall
from tests.brokers import OpenRole, until


class _Groups:
    """A node, and what was asked of it."""

    def __init__(self) -> None:
        self.starts = Counter({"node-0": 1})
        self.asked: list[str] = []

    def ask_stacks(self) -> None:
        self.asked.append("stacks")

    def num_starts(self, name: str) -> int:
        return self.starts[name]

    def restart(self, name: str) -> None:
        self.asked.append(name)


class _Scene:
    """A launcher that watches, and the roles that it hears."""

    def __init__(self, launcher: Bus, controller: Bus, node: Bus, settings: Settings, *, on_stall: str) -> None:
        self.groups = _Groups()
        self.told: list[str] = []
        self._controller, self._node = controller, node
        run = settings.run.model_copy(update={"on_stall": on_stall})
        self.watch = StallWatch(launcher, run, groups=self.groups, notify=self.told.append)

    async def stall(self, culprit: str, *, is_starting: bool = False) -> list[str]:
        """Have a stall heard; return what was asked of the groups for it."""
        before = len(self.groups.asked)
        stall = Stall(quiet_s=9, sentence="so it is", culprit=culprit, chain=[], is_starting=is_starting, waits_for={})

        async def is_heard() -> bool:
            if len(self.groups.asked) == before:  # the first ones may come before anybody listens
                await self._controller.publish_event(stall)
                await anyio.sleep(0.05)
            return len(self.groups.asked) > before

        await until(is_heard)
        return self.groups.asked[before:]

    async def node_speaks(self) -> None:
        await self._node.emit(self._node.names.metrics("node", "0"), b"{}")
        await until(lambda: "node-0" in self.watch.spoken_in)


@pytest.fixture
async def buses(open_role: OpenRole) -> tuple[Bus, Bus, Bus]:
    return await open_role(Role.OPERATOR), await open_role(Role.CONTROLLER), await open_role(Role.NODE)


@pytest.mark.parametrize(
    ("culprit", "group"),
    [
        ("trainer", "trainer"),
        ("rank 1", "trainer"),
        ("controller", "controller"),
        ("node 0", "node-0"),
        ("server gpu-7-1", "node-gpu-7"),
        ("server gpu-7-judge_1", "node-gpu-7"),
        ("slot 0-17-0.3", None),
        ("reward equal", None),
        ("the broker", None),
        ("trainer, cut 5, admission", None),
    ],
)
def test_the_process_group_of_a_culprit_is_that_of_its_process(culprit: str, group: str | None) -> None:
    assert group_of(culprit) == group


@pytest.mark.anyio
async def test_only_a_process_that_has_spoken_since_its_start_is_started_again(
    buses: tuple[Bus, Bus, Bus], settings: Settings
) -> None:
    scene = _Scene(*buses, settings, on_stall="restart")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scene.watch.run)

        assert await scene.stall("node 0") == ["stacks"]
        await scene.node_speaks()
        assert await scene.stall("server 0-1", is_starting=True) == ["stacks"]
        assert await scene.stall("server 0-1") == ["stacks", "node-0"]
        scene.groups.starts["node-0"] += 1
        assert await scene.stall("node 0") == ["stacks"]
        assert await scene.stall("slot 0-17-0.3") == ["stacks"]
        tasks.cancel_scope.cancel()

    assert scene.told == [
        "server 0-1 holds up the run: killing node-0, to start it again",
        "slot 0-17-0.3 holds up the run, and is no process to be started again",
    ]


@pytest.mark.anyio
async def test_a_run_that_is_to_end_ends_with_the_sentence_as_its_cause(
    buses: tuple[Bus, Bus, Bus], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.launch.stalls.LAST_WORDS_S", 1.0)
    scene = _Scene(*buses, settings, on_stall="end")
    causes: list[str] = []

    async def watch() -> None:
        try:
            await scene.watch.run()
        except* PipelineError as group:
            causes.extend(str(leaf) for leaf in leaves_of(group))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        await scene.stall("slot 0-17-0.3")

    assert causes == ["run test: stood still: so it is"]
    state, _ = await buses[0].get(RUN_STATE, RunState)
    assert state == RunState(state="failed", reason=causes[0])
