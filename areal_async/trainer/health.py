"""Alarms about learning: rules over the last lines of ``metrics.jsonl``, and what is said when one begins or ends.

A rule is a pure function of lines, so a trainer that was restarted knows from the file what was going on, and from
the run's events what it has published of that: a step that is trained again publishes nothing twice. An alarm clears
with the first step that no longer shows its cause, or when the run goes back behind the one that showed it.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from areal_async.bus import Bus
from areal_async.config.health import MAX_EQUAL_STEPS, HealthSettings
from areal_async.errors import DeniedError, WireError
from areal_async.protocol.events import AlarmCleared, AlarmEvent, AlarmRaised
from areal_async.protocol.types import Metrics, Version
from areal_async.protocol.wire import decode_json

Line = Mapping[str, Any]

HISTORY_STEPS = MAX_EQUAL_STEPS
"""Lines that the rules look back on."""

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """Something about a step that a person should know."""

    name: str
    sentence: str
    value: float
    """The number that was seen."""
    bound: float
    """The bound that ``value`` is held against."""
    first_version: int
    """Step of the oldest weights that show it: those that the first of the steps in a row that do so was sampled by, or
    began with. The step that made them may be what is wrong."""


def alarms(lines: Sequence[Line], settings: HealthSettings) -> list[Alarm]:
    """Return what the newest of these steps shows; oldest first, none for none."""
    found = (equal_rewards(lines, settings), logprob_gap(lines, settings), skipped_updates(lines))
    return [alarm for alarm in found if alarm is not None]


def equal_rewards(lines: Sequence[Line], settings: HealthSettings) -> Alarm | None:
    """Say that no group's rewards have differed for ``equal_rewards_steps``."""
    bound = settings.equal_rewards_steps
    count = next((count for count, line in enumerate(reversed(lines)) if not _is_flat(line)), len(lines))
    if bound is None or count < bound:
        return None
    reward = lines[-1].get("reward_mean", 0.0)
    sentence = f"all rewards are equal for {count} steps (mean {reward:.3g}): nothing is learned"
    oldest = _start_version(lines[-count]) - int(lines[-count].get("staleness_max", 0))
    return Alarm(name="equal_rewards", sentence=sentence, value=count, bound=bound, first_version=oldest)


def logprob_gap(lines: Sequence[Line], settings: HealthSettings) -> Alarm | None:
    """Say that trainer and server disagree by more than ``logprob_gap``, by the newest step that could tell."""
    bound = settings.logprob_gap
    # A queue that is always full holds older tokens alone, of which nobody expects them to agree.
    line = next((line for line in reversed(lines) if line.get("num_current_tokens", 0)), None)
    if bound is None or line is None or line.get("logprob_gap_mean", 0.0) <= bound:
        return None  # one that is no number is over every bound
    gap = float(line["logprob_gap_mean"])
    sentence = f"trainer and server logprobs are {gap:.3g} apart, of at most {bound:g}: they do not run the same model"
    return Alarm(name="logprob_gap", sentence=sentence, value=gap, bound=bound, first_version=_start_version(line))


def skipped_updates(lines: Sequence[Line]) -> Alarm | None:
    """Say that the newest step left the weights of the policy, or of the critic, as they were."""
    line: Line = lines[-1] if lines else {}
    for whose, prefix in (("", ""), ("critic's ", "value_")):
        skipped = int(line.get(f"{prefix}num_skipped", 0))
        if skipped and not line.get(f"{prefix}num_updates", 0):
            sentence = (
                f"every {whose}update of step {line['step']} was skipped ({skipped}): loss or gradient not finite"
            )
            return Alarm(
                name="skipped_updates", sentence=sentence, value=skipped, bound=0, first_version=_start_version(line)
            )
    return None


def _start_version(line: Line) -> int:
    """Return the step of the weights that a step begins with."""
    return int(line["step"]) - 1


def _is_flat(line: Line) -> bool:
    """Whether no group teaches anything; groups of one, which a critic compares, do where rewards differ at all."""
    num_groups = line.get("num_groups", 0)
    if not num_groups or line.get("groups_all_equal", 0) < num_groups:
        return False
    return bool(line.get("num_trajectories", 0) > num_groups or line.get("reward_std", 0.0) == 0)


def _event(kind: type[AlarmEvent], alarm: Alarm | AlarmEvent, line: Line) -> AlarmEvent:
    return kind(
        name=alarm.name,
        step=int(line["step"]),
        weights_version=str(line["weights_version"]),
        sentence=alarm.sentence,
        value=alarm.value,
        bound=alarm.bound,
    )


async def newest_alarm_events(bus: Bus) -> dict[str, AlarmEvent]:
    """Return the newest event of each alarm, by its name."""
    found: list[tuple[int, AlarmEvent]] = []
    for kind in (AlarmRaised, AlarmCleared):
        subject = bus.names.event(str(kind.__struct_config__.tag), bus.role)
        for message in await bus.read_log(bus.names.events_stream, subject):
            with suppress(WireError):
                found.append((message.sequence, decode_json(message.data, kind, what=message.subject)))
    return {event.name: event for _, event in sorted(found, key=lambda one: one[0])}


class Health:
    """The alarms of one run, step by step."""

    def __init__(
        self, settings: HealthSettings, bus: Bus, *, go_back: Callable[[Alarm], Awaitable[None]] | None = None
    ) -> None:
        """``go_back`` has the run go back where an alarm begins, if that is asked for."""
        self.settings = settings
        self._bus = bus
        self._go_back = go_back
        self._lines: deque[Line] = deque(maxlen=HISTORY_STEPS)
        self._raised: dict[str, Alarm] = {}
        self._published: dict[str, AlarmEvent] = {}

    @property
    def sentences(self) -> list[str]:
        """Sentences of the alarms that are raised now."""
        return [alarm.sentence for alarm in self._raised.values()]

    async def restore(self, lines: Iterable[Line], *, survives: Callable[[Version], bool] = lambda _: True) -> None:
        """Take in the steps before the next one, and what was published of them and of those that are trained again.

        Args:
            survives: whether the run still stands on a version: an alarm of one that it does not is over.
        """
        self._lines.extend(lines)
        self._raised = self._judged()
        try:
            self._published = await newest_alarm_events(self._bus)
        except DeniedError as exc:  # an external broker whose permissions are older than this
            log.warning("alarms.not_read", reason=str(exc))
        for name, event in list(self._published.items()):
            if not survives(Version.parse(event.weights_version)):
                if isinstance(event, AlarmRaised):
                    await self._publish(_event(AlarmCleared, event, msgspec.structs.asdict(event)))
                del self._published[name]
        # An event may be gone, or unread; a step's line is written after the events of what it shows.
        last = self._lines[-1] if self._lines else {}
        for name in self._raised.keys() & str(last.get("alarm_names", "")).split():
            if name not in self._published:
                self._published[name] = _event(AlarmRaised, self._raised[name], last)

    async def judge(self, line: Metrics) -> Metrics:
        """Take in a step and return its line with how many alarms are raised (``alarms``), and which.

        One that begins or ends goes to the log and is an event.
        """
        self._lines.append(line)
        before, self._raised = self._raised, self._judged()
        step = int(line["step"])
        for name in sorted(self._published.keys() | self._raised.keys()):
            last = self._published.get(name)
            if last is not None and step <= last.step:
                continue  # it is trained again
            if isinstance(last, AlarmRaised) and name not in self._raised:
                await self._publish(_event(AlarmCleared, before.get(name, last), line))
            elif name in self._raised and not isinstance(last, AlarmRaised):
                if self.settings.rollback and self._go_back is not None:  # first: once it is told, nobody does it again
                    await self._go_back(self._raised[name])
                await self._publish(_event(AlarmRaised, self._raised[name], line))
        names = {"alarm_names": " ".join(self._raised)} if self._raised else {}
        return {**line, "alarms": len(self._raised), **names}

    def _judged(self) -> dict[str, Alarm]:
        return {alarm.name: alarm for alarm in alarms(list(self._lines), self.settings)}

    async def _publish(self, event: AlarmEvent) -> None:
        write = log.warning if isinstance(event, AlarmRaised) else log.info
        write(event.kind, step=event.step, name=event.name, sentence=event.sentence)
        self._published[event.name] = event
        await self._bus.publish_event(event)
