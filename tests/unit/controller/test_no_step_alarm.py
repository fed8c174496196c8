"""A run whose groups all end untrained raises an alarm, once, and clears it with the next batch."""

import pytest

from areal_async.config.health import HealthSettings
from areal_async.config.settings import RolloutSettings, Settings
from areal_async.controller.accounts import Accounts
from areal_async.controller.no_step_alarm import NoStepAlarm
from areal_async.protocol.types import Cut, CutGroup, CutKind, Outcome, OutcomeKind

SETTINGS = Settings(
    rollout=RolloutSettings(batch_groups=2, group_size=2, min_group_size=2),
    health=HealthSettings(untrained_batches=2),
)


class Log:
    """What a controller reads, and what it would tell of that."""

    def __init__(self) -> None:
        self.accounts = Accounts(max_groups_in_flight=4)
        self.alarm = NoStepAlarm(self.accounts)
        self.num_groups = 0

    def end(self, kind: OutcomeKind, reason: str) -> None:
        group = f"0-{self.num_groups}-0"
        self.num_groups += 1
        self.accounts.add_outcome(Outcome(group_id=group, kind=kind, lineage=1, reason=reason))

    def cut(self) -> None:
        group = CutGroup(group_id="0-999-0", workflow="w", slots=[], num_failed_attempts=0)
        cut = Cut(kind=CutKind.CUT, lineage=1, step=1, groups=[group])
        self.accounts.add_cut(cut, sequence=1)

    def told(self, settings: Settings = SETTINGS) -> tuple[str, str] | None:
        event = self.alarm.check(settings)
        return event and (event.kind, event.sentence)


@pytest.fixture
def log() -> Log:
    return Log()


def test_groups_that_end_untrained_one_after_another_raise_it_once(log: Log) -> None:
    for _ in range(3):
        log.end(OutcomeKind.FILTERED, "all rewards are 1")
        assert log.told() is None
    log.end(OutcomeKind.REJECTED, "too easy")

    sentence = "4 groups in a row ended untrained (3 filtered, 1 rejected; the last: too easy): no step comes of them"
    assert log.told() == ("alarm.raised", sentence)
    log.end(OutcomeKind.STALE, "over age")
    assert log.told() is None
    assert log.alarm.report()["alarms"] == [log.alarm.sentence]
    assert log.alarm.sentence.startswith("5 groups in a row ended untrained (3 filtered, 1 rejected, 1 stale; ")
    assert (log.alarm.report()["untrained"], log.alarm.report()["alarm_names"]) == (5, "no_step")


def test_a_batch_clears_it_and_the_count_begins_anew(log: Log) -> None:
    for _ in range(4):
        log.end(OutcomeKind.FILTERED, "all rewards are 1")
    log.told()
    log.cut()

    cleared = log.told()
    assert cleared is not None
    assert cleared[0] == "alarm.cleared"
    assert log.alarm.report() == {"untrained": 0, "alarms": [], "alarm_names": ""}
    log.end(OutcomeKind.FILTERED, "all rewards are 1")
    assert log.told() is None


def test_groups_that_were_only_given_up_do_not_count(log: Log) -> None:
    for _ in range(9):
        log.end(OutcomeKind.ABANDONED, "its node was lost")

    assert log.told() is None


def test_what_the_log_shows_as_a_controller_begins_was_told_by_the_one_before(log: Log) -> None:
    for _ in range(4):
        log.end(OutcomeKind.FILTERED, "all rewards are 1")
    log.alarm.check(SETTINGS)

    log.end(OutcomeKind.FILTERED, "all rewards are 1")
    assert log.told() is None
    assert log.alarm.sentence


def test_its_bound_may_change_and_none_is_none(log: Log) -> None:
    for _ in range(4):
        log.end(OutcomeKind.FILTERED, "all rewards are 1")
    off = SETTINGS.model_copy(update={"health": HealthSettings(untrained_batches=None)})

    assert log.told(off) is None
    assert log.told(SETTINGS) is not None
    cleared = log.told(off)
    assert cleared is not None
    assert cleared[0] == "alarm.cleared"
