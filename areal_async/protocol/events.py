"""What has happened in a run, as records: told on ``areal.<run>.events.<role>.<instance>.<kind>``, kept in its stream.

The kind stands in the record as ``event`` and at the end of the subject, so that a listener can choose. An event is
told after what it tells of is so. It is history, never state: nothing rests on one that was lost on its way.
"""

from datetime import UTC, datetime
from typing import Any

import msgspec


def now() -> str:
    """Return this moment in UTC, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """Something that has happened."""

    at: str = msgspec.field(default_factory=now)

    @property
    def kind(self) -> str:
        """``role.lost``: the thing, and what has become of it."""
        return str(self.__struct_config__.tag)


class CrewEvent(Event, frozen=True, kw_only=True):
    """About processes that live and die together: ``broker``, ``controller``, ``node-0``, all ranks of ``trainer``."""

    crew: str


class RoleStarted(CrewEvent, frozen=True, kw_only=True, tag="role.started"):
    """It was started for the first time."""


class RoleLost(CrewEvent, frozen=True, kw_only=True, tag="role.lost"):
    """It has died, or is not heard any more."""

    reason: str
    num_starts: int


class RoleReturned(CrewEvent, frozen=True, kw_only=True, tag="role.returned"):
    """It works again."""

    num_starts: int
    away_s: float


class RoleLeft(CrewEvent, frozen=True, kw_only=True, tag="role.left"):
    """It has ended in good order."""


class ServerFenced(Event, frozen=True, kw_only=True, tag="server.fenced"):
    """Nothing is sent to this server any more, until it is repaired."""

    server_id: str
    reason: str


class ServerRepaired(Event, frozen=True, kw_only=True, tag="server.repaired"):
    """A server that was fenced serves again."""

    server_id: str
    version: str
    failure: str
    """Why it was fenced."""


class WeightsAnnounced(Event, frozen=True, kw_only=True, tag="weights.announced"):
    version: str


class CheckpointWritten(Event, frozen=True, kw_only=True, tag="checkpoint.written"):
    version: str


class CheckpointDamaged(Event, frozen=True, kw_only=True, tag="checkpoint.damaged"):
    """The newest one is not what was written; it is set aside, and the run goes on from an older one."""

    version: str
    reason: str
    taken: str
    """Version of the one that is taken instead."""


class RunOrdered(Event, frozen=True, kw_only=True, tag="run.ordered"):
    """An operator has started, paused, resumed or stopped the run, or changed what it runs on."""

    order: str
    by: str
    reason: str


class RunRolledBack(Event, frozen=True, kw_only=True, tag="run.rolled_back"):
    """The run goes on from an earlier checkpoint, as was ordered; or does not."""

    version: str
    by: str
    reason: str
    refusal: str
    """Why it does not; empty where it does."""


class SettingChanged(Event, frozen=True, kw_only=True, tag="setting.changed"):
    """An operator has changed a setting of the live run, or resumed it with another value."""

    setting: str
    before: Any
    """Value as a settings file has it; ``None`` where that is what another one says."""
    after: Any
    by: str
    reason: str


class VersionTagged(Event, frozen=True, kw_only=True, tag="version.tagged"):
    """An operator, or the run's gate, has given a tag to another version, or taken it away."""

    tag: str
    version: str
    """Empty where it was taken away."""
    was: str
    """Version that had it; empty for none."""
    by: str
    reason: str
    comparison: str
    """Id of the comparison behind it; empty for none."""


class MessageBuried(Event, frozen=True, kw_only=True, tag="message.buried"):
    """A message could not be read, and is a dead letter now."""

    stream: str
    sequence: int
    reason: str


class GroupDead(Event, frozen=True, kw_only=True, tag="group.dead"):
    """A prompt has failed its last attempt."""

    group_id: str
    reason: str


class EvaluationFinished(Event, frozen=True, kw_only=True, tag="evaluation.finished"):
    version: str
    workflow: str
    accuracy: float | None
    """Mean reward; told under that name where ``is_graded``."""
    num_scored: int
    num_failed: int
    pass_at: dict[str, float] = {}
    reasons: dict[str, int] = {}
    is_graded: bool = False


class ArmDecided(Event, frozen=True, kw_only=True, tag="arm.decided"):
    """An arm is told apart from the weights under training: it is better, or worse."""

    name: str
    arm_id: str
    version: str
    """Of the arm; the folder of its model, where that is no version of the run."""
    difference: float
    """Mean reward of the arm less that of the newest weights."""
    low: float
    high: float
    """Ends of the confidence sequence."""
    alpha: float
    num_pairs: int
    comparison: str
    """Id of the comparison that says so, in the run's ``comparisons/``."""
    sentence: str


class AlarmEvent(Event, frozen=True, kw_only=True):
    """About something in learning that a person should know."""

    name: str
    """``equal_rewards``, ``logprob_gap`` or ``skipped_updates``, of a step; ``no_step``, of the controller."""
    step: int
    """The one that showed it; the last one that was cut, where none follows."""
    weights_version: str
    """Version that the step made; the one that the servers hold, where no step follows."""
    sentence: str
    value: float | None
    """The number that was seen; None for one that is not finite, which JSON cannot say."""
    bound: float
    """The threshold that ``value`` crossed."""


class AlarmRaised(AlarmEvent, frozen=True, kw_only=True, tag="alarm.raised"):
    """It has begun to be wrong."""


class AlarmCleared(AlarmEvent, frozen=True, kw_only=True, tag="alarm.cleared"):
    """It is right again; ``sentence`` is what was wrong."""
