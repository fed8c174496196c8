"""Whatever a run stands still for is found along the waits, and named by its id; whatever is told, the walk ends."""

from typing import Any

import pytest

from areal_async.controller.processes.reports import AwakeClock, ProcessReport, Reports
from areal_async.controller.processes.watch import StallVerdict, explain
from areal_async.launch.stalls import group_of
from areal_async.telemetry.wait_graph import WaitRecord, WaitReport

NOW_S = 1000.0
DUE = [("trainer", "cut 5", "the groups of", 50.0), ("cut 5", "group 0-17-0", "", 50.0)]
LEASED = ("node b", "group 0-17-0", "", 50.0)
SLOT = ("group 0-17-0", "slot 0-17-0.3", "the workflow of", 48.0)


def _heard(*edges: tuple[str, str, str, float], silent_s: float = 0.0, left_out: int = 0, **more: Any) -> ProcessReport:
    records = [WaitRecord(waiter, on, what, quiet_s, quiet_s) for waiter, on, what, quiet_s in edges]
    waits = WaitReport(records=records, num_left_out=left_out)
    return ProcessReport(heard_s=NOW_S - silent_s, read_waits=lambda: waits, **more)


def _explain(**processes: ProcessReport) -> StallVerdict:
    named = {name.replace("_", " "): heard for name, heard in processes.items()}
    return explain({"controller": _heard(), **named}, now_s=NOW_S, silence_s=5.0)


def test_a_stream_without_a_token_is_told_from_the_trainer_to_its_server() -> None:
    verdict = _explain(
        trainer=_heard(*DUE, state="waiting"),
        node_b=_heard(
            LEASED, SLOT, ("slot 0-17-0.3", "server b-1", "a stream on", 48.0), servers={"b-1": {"version": "1-4"}}
        ),
    )

    assert verdict.culprit == "server b-1"
    assert verdict.chain == ["trainer", "cut 5", "group 0-17-0", "slot 0-17-0.3", "server b-1"]
    assert verdict.sentence == (
        "trainer waits for the groups of cut 5, which waits for group 0-17-0, which is leased by node b and waits for "
        "the workflow of slot 0-17-0.3, which waits for a stream on server b-1, where nothing has moved for 48 s"
    )


@pytest.mark.parametrize(
    ("processes", "culprit", "told"),
    [
        pytest.param(
            {"trainer": _heard(*DUE), "node_b": _heard(LEASED, SLOT)},
            "slot 0-17-0.3", "own code has waited for nothing known for 48 s", id="a workflow that hangs",
        ),
        pytest.param(
            {
                "trainer": _heard(*DUE),
                "node_b": _heard(LEASED, SLOT, ("slot 0-17-0.3", "reward equal", "", 47.0)),
            },
            "reward equal", "where nothing has moved for 47 s", id="a reward that hangs",
        ),
        pytest.param(
            {"trainer": _heard(silent_s=30.0), "node_b": _heard()},
            "trainer", "trainer, which has not been heard for 30 s", id="a trainer that is stopped",
        ),
        pytest.param({"node_b": _heard()}, "trainer", "not been heard yet", id="a trainer that never spoke"),
        pytest.param(
            {"trainer": _heard(*DUE), "node_b": _heard(LEASED, SLOT, silent_s=30.0)},
            "node b", "as node b said last, which has not been heard for 30 s", id="a node that is stopped",
        ),
        pytest.param(
            {"trainer": _heard(*DUE), "node_a": _heard(), "node_b": _heard(silent_s=30.0)},
            "node b", "not been heard for 30 s", id="a group that may be on a node that is stopped",
        ),
        pytest.param(
            {"trainer": _heard(("trainer", "server b-1", "a broadcast to", 9.0)),
             "node_b": _heard(silent_s=30.0, servers={"b-1": {}})},
            "node b", "is kept by node b, which has not been heard", id="a server whose node is stopped",
        ),
        pytest.param(
            {"trainer": _heard(*DUE), "node_b": _heard(("node b", "controller", "tickets of", 40.0))},
            "group 0-17-0", "nobody has leased, though node b would", id="a lost ticket",
        ),
        pytest.param(
            {"trainer": _heard(*DUE), "node_b": _heard(left_out=7)},
            "group 0-17-0", "one of 7 that node b has left out", id="a truncated report",
        ),
        pytest.param(
            {"trainer": _heard(*DUE), "node_b": _heard(("group 0-17-0", "room on node x", "", 40.0))},
            "room on node x", "room on node x, a node that has not been heard", id="room on no node",
        ),
        pytest.param({"trainer": _heard(*DUE)}, "group 0-17-0", "there is no node to lease it", id="no node at all"),
        pytest.param(
            {"trainer": _heard(*DUE), "node_b": _heard(LEASED)},
            "group 0-17-0", "node b has leased and neither begun nor acknowledged", id="a lease that is not begun",
        ),
        pytest.param(
            {
                "trainer": _heard(*DUE),
                "node_b": _heard(
                    ("node b", "server b-0", "room on", 40.0), servers={"b-0": {"version": "", "fence": "starting"}}
                ),
            },
            "server b-0", "as node b waits for room on server b-0, where nothing has moved for 40 s, starting",
            id="a server that does not start",
        ),
        pytest.param(
            {
                "trainer": _heard(*DUE),
                "node_b": _heard(
                    ("node b", "room on node b", "", 40.0), ("node b", "group 0-2-0", "", 30.0),
                    ("group 0-2-0", "slot 0-2-0.0", "the workflow of", 30.0),
                ),
            },
            "slot 0-2-0.0", "own code", id="a node full of groups that hang",
        ),
        pytest.param(
            {"trainer": _heard(("trainer", "step 5", "the engine in", 70.0), state="training step 5")},
            "trainer", "step 5, at which trainer has been for 70 s", id="a step that hangs",
        ),
        pytest.param(
            {
                "trainer": _heard(("trainer", "step 5", "the engine in", 70.0), state="training step 5"),
                "rank_1": _heard(silent_s=60.0),
            },
            "rank 1", "waits for rank 1, which has not been heard for 60 s", id="a rank that is stopped",
        ),
        pytest.param(
            {
                "trainer": _heard(("trainer", "weights 1-5", "all servers to hold", 70.0)),
                "node_b": _heard(
                    ("weights 1-5", "server b-1", "an update of", 60.0),
                    servers={"b-0": {"version": "1-5"}, "b-1": {"version": "1-4"}},
                ),
            },
            "server b-1", "waits for an update of server b-1", id="a server that does not swap",
        ),
        pytest.param(
            {
                "trainer": _heard(("trainer", "weights 1-5", "all servers to hold", 70.0)),
                "node_b": _heard(
                    servers={"b-judge_0": {"version": "0-0", "frozen": "judge"}, "b-1": {"version": "1-4"}}
                ),
            },
            "server b-1", "waits for server b-1 to hold it", id="a frozen server holds no version up",
        ),
        pytest.param(
            {"trainer": _heard(state="finished"), "controller": _heard(("controller", "evaluation 1-9", "", 30.0)),
             "node_b": _heard(("evaluation 1-9", "row 1-9.4", "the workflow of", 30.0))},
            "row 1-9.4", "controller waits for evaluation 1-9", id="an evaluation that hangs",
        ),
        pytest.param(
            {"trainer": _heard(*DUE), "controller": _heard(silent_s=20.0)},
            "the broker", "own reports have not come back for 20 s", id="a broker that is frozen",
        ),
    ],
)  # fmt: skip
def test_the_culprit_is_named(processes: dict[str, ProcessReport], culprit: str, told: str) -> None:
    verdict = _explain(**processes)

    assert verdict.culprit == culprit
    assert told in verdict.sentence
    assert culprit in verdict.chain[-2:]


def test_what_is_still_starting_is_told_as_that() -> None:
    starting = _heard(servers={"b-0": {"version": "", "fence": "starting"}})
    held = _heard(("trainer", "weights 1-0", "all servers to hold", 9.0))

    assert _explain(node_b=starting).is_starting
    assert _explain(trainer=held, node_b=starting).is_starting
    assert _explain(trainer=held).is_starting
    assert _explain(trainer=_heard(*DUE)).is_starting
    assert not _explain(trainer=held, node_b=_heard(servers={"b-0": {"fence": "failed"}})).is_starting


def test_a_circle_is_told_as_one() -> None:
    verdict = _explain(
        trainer=_heard(("trainer", "cut 5", "the groups of", 50.0), ("cut 5", "admission", "tickets of", 50.0)),
        controller=_heard(("admission", "trainer", "credits of", 50.0)),
    )

    assert verdict.culprit == "trainer, cut 5, admission"
    assert verdict.sentence.endswith("wait for each other: trainer -> cut 5 -> admission -> trainer")


def test_the_quietest_of_several_waits_is_followed() -> None:
    verdict = _explain(
        trainer=_heard(DUE[0], ("cut 5", "group 0-1-0", "", 3.0), DUE[1]),
        node_b=_heard(("node b", "group 0-1-0", "", 3.0), LEASED, SLOT),
    )

    assert verdict.culprit == "slot 0-17-0.3"


def test_reports_tell_progress_from_repetition() -> None:
    reports = Reports()
    node = {"node_id": "b", "state": "runs", "num_generated_tokens": 5, "num_scored": 0}

    assert reports.take("node", node, now_s=0.0)
    assert not reports.take("node", {**node, "state": "runs more"}, now_s=1.0)
    assert reports.take("node", {**node, "num_generated_tokens": 6}, now_s=2.0)
    reports.take("controller", {"state": "admitting"}, now_s=3.0)
    assert not reports.take("controller", {"state": "evaluating"}, now_s=4.0)


def test_a_node_that_left_is_not_waited_for_and_nonsense_is_not_taken() -> None:
    reports = Reports()
    reports.take("node", {"node_id": "b", "waits": {"records": "none"}, "servers": 5}, now_s=0.0)

    assert reports.by_name["node b"].waits == WaitReport()
    reports.take("node", {"node_id": "b", "state": "ended"}, now_s=1.0)
    reports.take("trainer", {"reward_mean": 0.5}, now_s=1.0)
    assert reports.by_name == {}


@pytest.mark.parametrize("told", [("group 0-17-0", "rank 0"), ("group 0-17-0", "controller"), ("cut 5", "rank 1")])
def test_no_node_has_a_process_that_it_names_killed_for_a_stall(told: tuple[str, str]) -> None:
    """It may hold all tickets, so that the run stands still, and then tell that these wait for somebody else."""
    reports = Reports()
    reports.take("controller", {"state": "admitting"}, now_s=0.0)
    for role, who, *records in (
        ("trainer", {"state": "waiting"}, ("trainer", "cut 5"), ("cut 5", "group 0-17-0")),
        ("node", {"node_id": "b", "state": "runs 1 groups"}, ("node b", "group 0-17-0"), told),
    ):
        lines = [[waiter, on, "", 50.0, 50.0 if role == "trainer" else 1e9] for waiter, on in records]
        reports.take(role, {**who, "waits": {"records": lines}}, now_s=0.0)

    verdict = explain(reports.by_name, now_s=0.0, silence_s=5.0)

    assert verdict.culprit == "group 0-17-0"
    assert group_of(verdict.culprit) is None


def test_time_for_which_the_watching_process_was_stopped_does_not_pass() -> None:
    clock = AwakeClock(100.0, interval_s=1.0)

    assert [clock.tick(at_s) for at_s in (101.0, 102.5, 143.5, 144.5)] == [101.0, 102.5, 103.5, 104.5]


def test_ranks_of_before_are_not_missed_where_their_successors_are_fewer() -> None:
    reports = Reports()
    for rank in range(3):
        reports.take("trainer", {"rank": rank, "lineage": 1, "state": "training"}, now_s=0.0)
    assert sorted(reports.by_name) == ["rank 1", "rank 2", "trainer"]

    reports.take("trainer", {"rank": 1, "lineage": 2, "state": "training"}, now_s=1.0)

    assert sorted(reports.by_name) == ["rank 1", "trainer"]


def test_a_rank_that_has_a_successor_makes_no_progress_and_waits_for_nothing() -> None:
    reports = Reports()

    def said(lineage: int, step: int) -> dict[str, object]:
        return {"rank": 0, "lineage": lineage, "state": f"training step {step}", "step": step}

    assert reports.take("trainer", said(1, 7), now_s=0.0)
    assert reports.take("trainer", said(2, 5), now_s=1.0)
    assert not reports.take("trainer", said(1, 8), now_s=2.0)
    assert reports.summary() == {"trainer": "training step 5"}
    assert reports.take("trainer", said(2, 6), now_s=3.0)
