"""An alarm about learning is an event, once when it begins and once when it ends, and a number in its step's line."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from areal_async.bus import Bus, Role
from areal_async.config.health import HealthSettings
from areal_async.process.atomic_folders import LEDGER
from areal_async.process.json_lines import read_json_lines
from areal_async.protocol.events import AlarmCleared, AlarmRaised
from areal_async.protocol.journal import Journal
from areal_async.protocol.run_state import Rollback
from areal_async.protocol.subjects import ROLLBACK
from areal_async.trainer.going_back import go_back_before
from areal_async.trainer.health import Health, newest_alarm_events
from tests.brokers import PATIENCE_S, OpenRole, until

pytestmark = pytest.mark.anyio


def line(step: int, *, num_equal: int) -> dict[str, Any]:
    return {
        "step": step, "weights_version": f"1-{step}", "reward_mean": 1.0, "reward_std": 0.0, "num_groups": 2,
        "num_trajectories": 8, "groups_all_equal": num_equal,
    }  # fmt: skip


async def _has_told(trainer: Bus, newest: tuple[str, int]) -> bool:
    told = (await newest_alarm_events(trainer)).get("equal_rewards")
    return told is not None and (told.kind, told.step) == newest


async def test_an_alarm_is_told_when_it_begins_and_when_it_ends_through_a_restart(open_role: OpenRole) -> None:
    trainer, operator = await open_role(Role.TRAINER), await open_role(Role.OPERATOR)
    settings = HealthSettings(equal_rewards_steps=2)

    async with operator.subscribe(f"areal.{operator.names.run}.events.trainer.0.alarm.*") as messages:
        health = Health(settings, trainer)
        counts = [(await health.judge(line(step, num_equal=2)))["alarms"] for step in (1, 2, 3)]
        await until(lambda: _has_told(trainer, ("alarm.raised", 2)))
        restarted = Health(settings, trainer)
        await restarted.restore([line(step, num_equal=2) for step in (1, 2, 3)])
        assert restarted.sentences == ["all rewards are equal for 3 steps (mean 1): nothing is learned"]
        still = await restarted.judge(line(4, num_equal=2))
        healed = await restarted.judge(line(5, num_equal=1))
        with anyio.fail_after(PATIENCE_S):
            told = [await anext(messages) for _ in range(2)]

    heard = [msgspec.json.decode(data, type=AlarmRaised | AlarmCleared) for _, data in told]
    assert counts == [0, 1, 1]
    assert (still["alarms"], still["alarm_names"], healed["alarms"]) == (1, "equal_rewards", 0)
    assert "alarm_names" not in healed
    assert [(one.kind, one.name, one.step, one.weights_version) for one in heard] == [
        ("alarm.raised", "equal_rewards", 2, "1-2"),
        ("alarm.cleared", "equal_rewards", 5, "1-5"),
    ]


async def test_an_alarm_whose_event_is_gone_is_told_no_second_time_and_its_end_is_told(open_role: OpenRole) -> None:
    trainer, operator = await open_role(Role.TRAINER), await open_role(Role.OPERATOR)
    lines = [line(1, num_equal=2), {**line(2, num_equal=2), "alarm_names": "equal_rewards"}]

    health = Health(HealthSettings(equal_rewards_steps=2), trainer)
    await health.restore(lines)
    still = await health.judge(line(3, num_equal=2))
    await health.judge(line(4, num_equal=1))

    await until(lambda: _has_told(trainer, ("alarm.cleared", 4)))
    assert still["alarm_names"] == "equal_rewards"
    assert not await operator.read_log(operator.names.events_stream, operator.names.event("alarm.raised", "trainer"))


async def test_an_alarm_that_only_a_newer_bound_sees_is_told_with_the_next_step(open_role: OpenRole) -> None:
    trainer = await open_role(Role.TRAINER)

    health = Health(HealthSettings(equal_rewards_steps=2), trainer)
    await health.restore([line(1, num_equal=2), line(2, num_equal=2)])
    await health.judge(line(3, num_equal=2))

    await until(lambda: _has_told(trainer, ("alarm.raised", 3)))


async def test_steps_that_are_trained_again_tell_no_alarm_twice_whatever_they_show(open_role: OpenRole) -> None:
    trainer, operator = await open_role(Role.TRAINER), await open_role(Role.OPERATOR)
    settings = HealthSettings(equal_rewards_steps=2)
    flat = {step: line(step, num_equal=2) for step in range(1, 8)}
    wild = {step: {**flat[step], "num_skipped": 1, "num_updates": 0} for step in flat}

    async def told() -> list[tuple[str, str, int]]:
        found = []
        for kind in ("alarm.raised", "alarm.cleared"):
            subject = operator.names.event(kind, "trainer")
            found += await operator.read_log(operator.names.events_stream, subject)
        bodies = [msgspec.json.decode(one.data) for one in sorted(found, key=lambda one: one.sequence)]
        return [(one["event"], one["name"], one["step"]) for one in bodies]

    async def trained(lines: list[dict[str, Any]], *, after: list[dict[str, Any]]) -> list[int]:
        """A trainer that is restored to the end of ``after`` and killed later on; how many alarms each step shows."""
        health = Health(settings, trainer)
        await health.restore(after)
        return [(await health.judge(one))["alarms"] for one in lines]

    async def is_told(expected: list[tuple[str, str, int]]) -> bool:
        return await told() == expected

    assert await trained([flat[1], flat[2], wild[3], flat[4]], after=[]) == [0, 1, 2, 1]
    once = [
        ("alarm.raised", "equal_rewards", 2),
        ("alarm.raised", "skipped_updates", 3),
        ("alarm.cleared", "skipped_updates", 4),
    ]
    await until(lambda: is_told(once))
    assert await trained([flat[2], wild[3]], after=[flat[1]]) == [1, 2]
    assert await trained([flat[2], wild[3], flat[4], line(5, num_equal=1)], after=[flat[1]]) == [1, 2, 1, 0]
    await until(lambda: is_told([*once, ("alarm.cleared", "equal_rewards", 5)]))


def make_checkpoint(directory: Path, version: str) -> None:
    folder = directory / "checkpoints" / version
    folder.mkdir(parents=True)
    (folder / LEDGER).write_text(json.dumps({"version": version, "trained": {}}))


async def test_an_alarm_has_the_run_go_back_before_what_it_shows_twice_at_the_most(
    open_role: OpenRole, tmp_path: Path
) -> None:
    trainer = await open_role(Role.TRAINER)
    for version in ("1-1", "1-2", "1-3"):
        make_checkpoint(tmp_path, version)
    go_back = partial(go_back_before, trainer, tmp_path, Journal)
    settings = HealthSettings(equal_rewards_steps=2, rollback=True)
    orders = []
    for _ in range(3):
        health = Health(settings, trainer, go_back=go_back)
        for step, num_equal in ((2, 1), (3, 2), (4, 2), (5, 1)):
            health._published.clear()  # as where it went back behind what was told
            await health.judge(line(step, num_equal=num_equal))
        held, revision = await trainer.get(ROLLBACK, Rollback)
        assert held is not None
        orders.append((held.number, held.version, held.by))
        await trainer.compare_and_set(ROLLBACK, msgspec.structs.replace(held, lineage=2), revision)

    # Step 3, which shows it first, began with version 2.
    assert orders == [(1, "1-1", "alarm equal_rewards"), (2, "1-1", "alarm equal_rewards")] + [orders[1]]
    lines = read_json_lines(tmp_path / "orders.jsonl")
    assert [one["order"] for one in lines] == ["rollback to 1-1"] * 2


@pytest.mark.parametrize("rollback", [False, True])
async def test_an_alarm_orders_nothing_unless_asked_or_where_no_checkpoint_is_before_it(
    open_role: OpenRole, tmp_path: Path, rollback: bool
) -> None:
    trainer = await open_role(Role.TRAINER)
    make_checkpoint(tmp_path, "1-2" if rollback else "1-1")
    settings = HealthSettings(equal_rewards_steps=2, rollback=rollback)
    health = Health(settings, trainer, go_back=partial(go_back_before, trainer, tmp_path, Journal))

    judged = [await health.judge(line(step, num_equal=2)) for step in (3, 4)]

    assert judged[-1]["alarms"] == 1
    assert (await trainer.get(ROLLBACK, Rollback))[0] is None


async def test_an_alarm_of_steps_that_were_given_up_is_over_and_begins_anew(open_role: OpenRole) -> None:
    trainer = await open_role(Role.TRAINER)
    settings = HealthSettings(equal_rewards_steps=2)
    health = Health(settings, trainer)
    for step in (1, 2, 3):
        await health.judge(line(step, num_equal=2))
    await until(lambda: _has_told(trainer, ("alarm.raised", 2)))

    anew = Health(settings, trainer)
    await anew.restore([line(1, num_equal=2)], survives=lambda version: version.step <= 1)

    assert anew.sentences == []
    await until(lambda: _has_told(trainer, ("alarm.cleared", 2)))
    await anew.judge({**line(2, num_equal=2), "weights_version": "2-2"})
    await until(lambda: _has_told(trainer, ("alarm.raised", 2)))
