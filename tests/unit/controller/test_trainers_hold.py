"""A step for which the trainer holds up generation is no stall, unless it never ends or its trainer is gone."""

from areal_async.config.settings import InferenceSettings, RolloutSettings, Settings
from areal_async.controller.processes.reports import Reports, TrainersHold


def _hold() -> TrainersHold:
    """Return one whose server may take 60 s to start, and whose step 40."""
    settings = Settings(
        inference=InferenceSettings(start_deadline_s=10.0), rollout=RolloutSettings(episode_deadline_s=40.0)
    )
    return TrainersHold(settings, silence_s=10.0)


def _said(reports: Reports, hold: str, *, now_s: float, role: str = "trainer") -> None:
    reports.take(role, {"rank": 0, "node_id": "0", "state": "training step 4", "step": 3, "hold": hold}, now_s=now_s)


def test_nothing_need_move_while_the_trainer_has_the_servers_gpus() -> None:
    reports, hold = Reports(), _hold()
    assert not hold.is_on(reports.by_name.get("trainer"), now_s=0.0)
    _said(reports, "", now_s=0.0)
    assert not hold.is_on(reports.by_name["trainer"], now_s=0.0)
    for now_s in (1.0, 101.0):
        _said(reports, "1-4", now_s=now_s)
        assert hold.is_on(reports.by_name["trainer"], now_s=now_s)


def test_a_hold_that_never_ends_is_a_stall_and_the_next_one_is_not() -> None:
    reports, hold = Reports(), _hold()
    for now_s, version, is_on in ((0.0, "1-4", True), (101.0, "1-4", False), (102.0, "1-5", True)):
        _said(reports, version, now_s=now_s)
        assert hold.is_on(reports.by_name["trainer"], now_s=now_s) is is_on


def test_a_trainer_that_is_gone_holds_up_nothing() -> None:
    reports, hold = Reports(), _hold()
    _said(reports, "1-4", now_s=0.0)
    assert hold.is_on(reports.by_name["trainer"], now_s=10.0)
    assert not hold.is_on(reports.by_name["trainer"], now_s=10.1)


def test_only_the_trainer_holds_up_anything() -> None:
    reports = Reports()
    _said(reports, "1-4", now_s=0.0, role="node")
    assert reports.by_name["node 0"].hold == ""
