"""What a process waits for is told whole, in chains, and in bounds; a wait is forgotten however it ends."""

import anyio
import pytest

from areal_async.telemetry import wait_graph
from areal_async.telemetry.wait_graph import Wait, WaitRecord


def _wait(waiter: str, on: str, *, since_s: float, moved_s: float | None = None) -> Wait:
    wait = Wait(waiter, on, "", None)
    wait.since_s, wait.moved_s = since_s, since_s if moved_s is None else moved_s
    return wait


def _tell(found: list[Wait], *, limit: int = 100) -> wait_graph.WaitReport:
    return wait_graph.report_on(found, of="node 0", now_s=100.0, limit=limit)


def test_a_chain_is_told_down_to_its_end_with_ages_and_the_livelier_ones_are_counted() -> None:
    report = _tell(
        [
            _wait("node 0", "group g", since_s=40.0),
            _wait("group g", "slot g.0", since_s=41.0),
            _wait("group g", "slot g.1", since_s=41.0),
            _wait("slot g.0", "server s", since_s=42.0, moved_s=99.0),
            _wait("slot g.1", "server s", since_s=42.0, moved_s=52.0),
        ]
    )

    assert report.records == [
        WaitRecord("node 0", "group g", "", 60.0, 1.0),
        WaitRecord("group g", "slot g.1", "", 59.0, 48.0, num_more=1),
        WaitRecord("slot g.1", "server s", "", 58.0, 48.0),
    ]
    assert report.num_left_out == 0


def test_what_is_told_is_bounded_oldest_first_and_the_rest_is_counted() -> None:
    report = _tell([_wait("node 0", f"group {number}", since_s=90.0 - number) for number in range(8)], limit=3)

    assert [record.on for record in report.records] == ["group 7", "group 6", "group 5"]
    assert report.num_left_out == 5


def test_waits_in_a_circle_are_told_once() -> None:
    report = _tell([_wait("node 0", "a", since_s=1.0), _wait("a", "b", since_s=2.0), _wait("b", "a", since_s=3.0)])

    assert [(record.waiter, record.on) for record in report.records] == [("node 0", "a"), ("a", "b"), ("b", "a")]


def test_who_is_waited_for_by_nobody_here_has_its_quietest_wait_told() -> None:
    report = _tell(
        [_wait("evaluation 1-0", "row 0", since_s=1.0, moved_s=99.0), _wait("evaluation 1-0", "row 1", since_s=2.0)]
    )

    assert [record.on for record in report.records] == ["row 1"]


@pytest.mark.anyio
async def test_what_runs_inside_and_in_tasks_of_it_waits_in_the_name_of_what_is_done() -> None:
    seen: list[tuple[str, str]] = []

    async def ask() -> None:
        with wait_graph.on("server s", "a stream on"):
            seen.extend((one.waiter, one.on) for one in wait_graph.report("node 0").records)

    with wait_graph.doing("slot g.1", "the workflow of", waiter="node 0"):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)

    assert seen == [("node 0", "slot g.1"), ("slot g.1", "server s")]


@pytest.mark.anyio
async def test_a_wait_that_is_cancelled_is_forgotten() -> None:
    with anyio.move_on_after(0), wait_graph.doing("slot g.1", waiter="node 0"), wait_graph.on("server s"):
        await anyio.sleep_forever()

    assert wait_graph.report("node 0").records == []


def test_what_ended_a_wait_just_now_is_not_quiet() -> None:
    with wait_graph.doing("slot g.1", waiter="node 0") as workflow:
        with wait_graph.on("server s"):
            workflow.moved_s = workflow.since_s = workflow.since_s - 60.0
        quiet_s = wait_graph.report("node 0").records[0].quiet_s

    assert quiet_s < 30.0


def test_what_began_a_wait_just_now_is_not_quiet() -> None:
    with wait_graph.doing("slot g.1", waiter="node 0") as workflow:
        workflow.moved_s = workflow.since_s = workflow.since_s - 60.0
        before_s = wait_graph.report("node 0").records[0].quiet_s
        with wait_graph.on("server s"):
            quiet_s = wait_graph.report("node 0").records[0].quiet_s

    assert before_s >= 60.0
    assert quiet_s < 30.0


def test_what_runs_after_the_block_waits_in_nobodys_name() -> None:
    with wait_graph.doing("slot g.1", waiter="node 0"):
        pass
    with wait_graph.on("server s") as wait:
        assert wait.waiter == ""


def test_standing_waits_are_forgotten_with_their_block() -> None:
    with wait_graph.PollingWaits() as standing:
        standing.replace("cut 5", ["group a"])
        assert [one.on for one in wait_graph.report("cut 5").records] == ["group a"]
    assert wait_graph.report("cut 5").records == []


def test_standing_waits_that_stay_keep_their_age_and_the_others_go(monkeypatch: pytest.MonkeyPatch) -> None:
    standing = wait_graph.PollingWaits()
    told: list[list[tuple[str, float]]] = []
    for now_s, groups in ((100.0, ["group a", "group b"]), (130.0, ["group b"]), (160.0, ["group b"]), (170.0, [])):
        monkeypatch.setattr("areal_async.telemetry.wait_graph.time.monotonic", lambda now_s=now_s: now_s)
        standing.replace("cut 5", groups)
        told.append([(one.on, one.age_s) for one in wait_graph.report("cut 5").records])

    assert sorted(told[0]) == [("group a", 0.0), ("group b", 0.0)]
    assert told[1:] == [[("group b", 30.0)], [("group b", 60.0)], []]


@pytest.mark.anyio
async def test_waits_that_end_are_kept_for_whoever_asks_and_for_nobody_else() -> None:
    async def call(name: str) -> None:
        with wait_graph.on(name):
            await anyio.lowlevel.checkpoint()

    with wait_graph.recording_ended() as ended:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, "tool add")
            tasks.start_soon(call, "reward right")
    await call("tool later")

    assert sorted(one.on for one in ended) == ["reward right", "tool add"]
    assert all(one.since_s <= one.until_s for one in ended)
