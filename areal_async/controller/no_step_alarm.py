"""Whether groups come to be trained at all: a run that answers prompts on and on and makes no step of them says so.

An alarm, and no end: where a filter keeps few groups many have to end before a batch is full, and only a person knows
whether too many do.
"""

from collections.abc import Mapping

from areal_async.config.settings import Settings
from areal_async.controller.accounts import Accounts
from areal_async.protocol.events import AlarmCleared, AlarmEvent, AlarmRaised

NAME = "no_step"
MAX_REASON = 200
"""Characters of the last group's reason, which may quote what a user's function said."""


class NoStepAlarm:
    """The alarm of one run."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._bound = 0
        self.sentence = ""
        """What is raised now; empty for nothing."""

    def check(self, settings: Settings) -> AlarmEvent | None:
        """Return the event that is due now, which says that the alarm has begun or is over; None for neither."""
        untrained, batches = self._accounts.untrained, settings.health.untrained_batches
        count, was = untrained.total(), self.sentence
        bound = None if batches is None else batches * settings.rollout.batch_groups
        if bound is None or count < bound:
            self.sentence = ""
            return self._event(AlarmCleared, was, count) if was else None
        self._bound = bound
        self.sentence = (
            f"{count} groups in a row ended untrained ({_parts(untrained)}; the last: "
            f"{self._accounts.last_untrained[:MAX_REASON]}): no step comes of them"
        )
        return None if was else self._event(AlarmRaised, self.sentence, count)

    def report(self) -> dict[str, object]:
        """Return what the controller says of it."""
        return {
            "untrained": self._accounts.untrained.total(),
            "alarms": [self.sentence] if self.sentence else [],
            "alarm_names": NAME if self.sentence else "",
        }

    def _event(self, kind: type[AlarmEvent], sentence: str, count: int) -> AlarmEvent:
        journal, held = self._accounts.journal, self._accounts.held
        return kind(
            name=NAME,
            step=journal.last_step,
            weights_version=str(held or ""),
            sentence=sentence,
            value=count,
            bound=self._bound,
        )


def _parts(untrained: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(untrained.items()))
