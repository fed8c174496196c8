"""A live run's gate: promoted once and told once, whatever dies in between; the broker is the real one."""

from collections.abc import Sequence
from typing import Any

import pytest

from areal_async.bus import Bus, Role
from areal_async.config.settings import Settings
from areal_async.controller import gate as controller_gate
from areal_async.controller.gate import Gate
from areal_async.controller.tag_orders import tell
from areal_async.monitor.snapshot import read_events
from areal_async.process.atomic_folders import LEDGER
from areal_async.protocol.types import Version
from areal_async.versions import evaluations, tags
from areal_async.versions.evaluations import Answer
from areal_async.versions.tags import Tag
from tests.brokers import OpenRole, until

pytestmark = pytest.mark.anyio
RIGHT, WRONG = [1.0] * 20, [0.0] * 20


class Killed(Exception):
    """Stands for the end of the process."""


class World:
    """A run's directory, its broker, and a controller's gate."""

    def __init__(self, controller: Bus, operator: Bus, settings: Settings) -> None:
        self.controller = controller
        self._operator = operator
        self.given = settings

    def gate(self, **gate: Any) -> Gate:
        """Return the gate of a controller that has just started."""
        whole = self.given.model_dump() | {
            "eval": {"every_steps": 10, "dataset": {"path": "held-out"}},
            "tasks": [{"workflow": "w.py", "dataset": {"path": "rows"}}],
            "gate": {"action": "promote", **gate},
        }
        whole["trainer"]["checkpoint_every_steps"] = 10
        return Gate(self.controller, Settings.model_validate(whole))

    def has(self, version: str, rewards: Sequence[float] | None = None, *, is_whole: bool = True) -> Version:
        """Leave a checkpoint, and the evaluation of it."""
        folder = self.given.run_directory / "checkpoints" / version
        if is_whole:
            folder.mkdir(parents=True)
            (folder / LEDGER).touch()
        made = Version.parse(version)
        if rewards is not None:
            answers = [Answer(task="w", row=row, reward=reward) for row, reward in enumerate(rewards)]
            evaluations.write(self.given.run_directory, made, answers)
        return made

    async def told(self, count: int) -> list[tuple[str, str]]:
        """Return kind and version of each event, once the broker has so many: who tells does not wait for that."""
        told: list[tuple[str, str]] = []

        async def is_so() -> bool:
            events = await read_events(self._operator, limit=100)
            told[:] = [(one["event"], one.get("version") or one["weights_version"]) for one in events]
            return len(told) >= count

        await until(is_so)
        return told

    @property
    def champions(self) -> list[str]:
        return [line.version for line in tags.history(self.given.run_directory)]


def die_at(monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    """Have controllers end there from now on."""

    def die(reached: str) -> None:
        if reached == f"controller.{point}":
            raise Killed

    monkeypatch.setattr(controller_gate, "failpoint", die)


@pytest.fixture
async def world(open_role: OpenRole, settings: Settings) -> World:
    return World(await open_role(Role.CONTROLLER), await open_role(Role.OPERATOR), settings)


async def test_a_better_version_is_promoted_and_a_worse_one_raises_an_alarm_until_one_is_not(world: World) -> None:
    gate = world.gate()
    await gate.resume([])
    await gate.judge(world.has("1-10", WRONG[:10] + RIGHT[:10]))
    await gate.judge(world.has("1-20", RIGHT))
    assert gate.report() == {"alarms": [], "alarm_names": ""}
    await gate.judge(world.has("1-30", WRONG))
    alarms = gate.report()
    await gate.judge(world.has("1-40", RIGHT[:19] + WRONG[:1]))

    assert world.champions == ["1-10", "1-20"]
    assert alarms["alarm_names"] == "gate"
    assert alarms["alarms"][0].startswith(
        "1-30 does worse: accuracy -1.000 against champion 1-20 (95 % interval -1.000"
    )
    assert gate.report() == {"alarms": [], "alarm_names": ""}
    assert await world.told(4) == [
        ("version.tagged", "1-10"), ("version.tagged", "1-20"), ("alarm.raised", "1-30"), ("alarm.cleared", "1-40"),
    ]  # fmt: skip


async def test_where_an_alarm_is_wanted_a_person_promotes(world: World) -> None:
    gate = world.gate(action="alarm")
    await gate.judge(world.has("1-10", WRONG))
    await gate.judge(world.has("1-20", RIGHT))

    assert world.champions == ["1-10"]
    assert gate.sentence.startswith("1-20 does better, and is not promoted: accuracy +1.000 against champion 1-10")
    assert await world.told(2) == [("version.tagged", "1-10"), ("alarm.raised", "1-20")]


async def test_without_a_gate_nothing_is_judged(world: World) -> None:
    gate = world.gate(action=None)
    await gate.resume([world.has("1-10", RIGHT)])
    await gate.judge(Version(1, 10))

    assert (world.champions, await world.told(0)) == ([], [])


async def test_a_version_waits_for_its_checkpoint_and_one_that_gets_none_is_forgotten(world: World) -> None:
    gate = world.gate()
    await gate.judge(world.has("1-10", WRONG))
    await gate.judge(world.has("1-20", RIGHT, is_whole=False))
    await gate.settle()
    assert gate.is_waiting
    assert world.champions == ["1-10"]
    world.has("1-20")
    await gate.judge(world.has("1-30", RIGHT, is_whole=False))
    assert world.champions == ["1-10", "1-20"], "it has its checkpoint before the next is judged"
    assert gate.is_waiting
    await gate.judge(world.has("1-40", RIGHT))

    world.has("1-30")
    await gate.settle()

    assert world.champions == ["1-10", "1-20", "1-40"]


async def test_what_cannot_be_judged_is_said_and_stops_nothing(world: World) -> None:
    gate = world.gate()
    await gate.judge(world.has("1-10", WRONG))
    tags.write(world.given.run_directory, Tag(tag="champion", version="1-5", by="ada"))
    await gate.judge(world.has("1-20", RIGHT))
    assert gate.sentence == (
        "1-20 cannot be judged: 1-5, which is champion, was not evaluated by this run; promote a version that was"
    )
    (world.given.run_directory / "tags.jsonl").write_text("{}\n")
    await gate.judge(world.has("1-30", RIGHT))

    assert "1-30 cannot be judged: " in gate.sentence
    assert "line 1 is no tag" in gate.sentence


@pytest.mark.parametrize("point", ["before_comparison", "after_comparison", "after_tag"])
async def test_a_controller_that_dies_at_any_point_is_followed_by_one_that_promotes_once(
    world: World, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    await world.gate().judge(world.has("1-10", WRONG))
    await world.told(1)
    better = world.has("1-20", RIGHT)

    die_at(monkeypatch, point)
    with pytest.raises(Killed):
        await world.gate().judge(better)
    monkeypatch.undo()
    for _ in range(2):
        await world.gate().resume([Version(1, 10), better])
        await world.told(2)

    assert world.champions == ["1-10", "1-20"]
    assert await world.told(2) == [("version.tagged", "1-10"), ("version.tagged", "1-20")]


async def test_a_promotion_is_told_after_a_crash_though_a_person_has_tagged_that_version_since(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_at(monkeypatch, "after_tag")
    version = world.has("1-10", RIGHT)
    with pytest.raises(Killed):
        await world.gate().judge(version)
    await tell(world.controller, Tag(tag="first", version="1-10", by="ada"))
    await world.told(1)
    for _ in range(2):
        await world.gate().resume([version])
        await world.told(2)

    assert world.champions == ["1-10"]
    assert await world.told(2) == [("version.tagged", "1-10")] * 2


async def test_a_version_that_is_promoted_once_more_is_told_once_more_after_a_crash(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = world.gate()
    for version, rewards in (("1-10", WRONG), ("1-20", RIGHT[:10] + WRONG[:10]), ("1-30", RIGHT)):
        await gate.judge(world.has(version, rewards))
    ordered = tags.write(world.given.run_directory, Tag(tag="champion", version="1-10", by="ada"))
    assert ordered is not None
    await tell(world.controller, ordered)
    later = Version(1, 35)  # speaks of 1-30
    answers = [Answer(task="w", row=row, reward=reward) for row, reward in enumerate(RIGHT)]
    evaluations.write(world.given.run_directory, later, answers)
    die_at(monkeypatch, "after_tag")
    with pytest.raises(Killed):
        await world.gate().judge(later)
    monkeypatch.undo()
    for _ in range(2):
        await world.gate().resume([later])
        await world.told(5)

    assert world.champions == ["1-10", "1-20", "1-30", "1-10", "1-30"]
    assert await world.told(5) == [("version.tagged", version) for version in world.champions]


async def test_what_a_person_has_moved_stays_over_a_restart(world: World) -> None:
    gate = world.gate()
    await gate.judge(world.has("1-10", WRONG))
    await gate.judge(world.has("1-20", RIGHT))
    for version in ("1-10", "1-15", ""):
        tags.write(world.given.run_directory, Tag(tag="champion", version=version, by="ada"))
        await world.gate().resume([Version(1, 10), Version(1, 20)])

    assert world.champions == ["1-10", "1-20", "1-10", "1-15", ""]


async def test_a_version_is_not_judged_anew_because_a_person_has_moved_the_tag_and_the_controller_died(
    world: World,
) -> None:
    gate = world.gate()
    await gate.judge(world.has("1-10", RIGHT))
    await gate.judge(world.has("1-20", RIGHT[:19] + WRONG[:1]))
    world.has("1-5", WRONG)
    tags.write(world.given.run_directory, Tag(tag="champion", version="1-5", by="ada"))

    await world.gate().resume([Version(1, 5), Version(1, 10), Version(1, 20)])

    assert world.champions == ["1-10", "1-5"]


async def test_an_alarm_is_there_again_after_a_restart_and_is_told_once(world: World) -> None:
    await world.gate().judge(world.has("1-10", RIGHT))
    await world.gate().judge(world.has("1-20", WRONG))
    await world.told(2)
    gate = world.gate()

    await gate.resume([Version(1, 10), Version(1, 20)])

    assert gate.sentence.startswith("1-20 does worse")
    assert await world.told(2) == [("version.tagged", "1-10"), ("alarm.raised", "1-20")]
