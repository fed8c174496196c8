"""The gate of a live run: what becomes of each version that was evaluated, and what is told of it.

It is asked by the one loop that evaluates, and waits for nothing: a version whose checkpoint is being written gets its
tag when that is there. After a crash the newest evaluation is judged again, unless that was done, and told again,
unless the run's events have it.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import anyio.to_thread
import structlog

from areal_async.bus import Bus
from areal_async.config.settings import Settings
from areal_async.controller.tag_orders import tell
from areal_async.errors import DeniedError, UserError
from areal_async.process.failpoints import failpoint
from areal_async.process.json_lines import decode_object
from areal_async.protocol.events import AlarmCleared, AlarmRaised, VersionTagged
from areal_async.protocol.types import Version
from areal_async.versions import gate, tags
from areal_async.versions.gate import GATE, Verdict

log = structlog.get_logger()


class Gate:
    """The gate of one run."""

    def __init__(self, bus: Bus, settings: Settings) -> None:
        self._bus = bus
        self.settings = settings
        """The run's, with what operators have changed."""
        self.sentence = ""
        """What is alarming now; empty for nothing."""
        self._awaited: Verdict | None = None
        """What is to be promoted once its checkpoint is there."""
        self._told: set[tuple[str, ...]] = set()
        """Kind of each event that an earlier controller has told, and which one it is of that kind."""

    @property
    def is_waiting(self) -> bool:
        """Whether a version waits for its checkpoint."""
        return self._awaited is not None

    async def resume(self, made: Collection[Version]) -> None:
        """Go on from where an earlier controller was, given the evaluations that are whole."""
        newest = max(made, default=None)
        if self.settings.gate.action is None or newest is None:
            return
        self._told = await self._read_told()
        directory, settings = self.settings.run_directory, self.settings
        try:
            await self._tell_again()
            if await anyio.to_thread.run_sync(gate.is_judged, directory, settings, newest):
                return
        except UserError as exc:
            log.warning("gate.not_resumed", cause=str(exc))
            return
        await self.judge(newest)

    async def judge(self, evaluated: Version) -> None:
        """Hold a version that was evaluated against the one that has the tag."""
        action, directory = self.settings.gate.action, self.settings.run_directory
        if action is None:
            return
        failpoint("controller.before_comparison")
        await self.settle()
        self._awaited = None  # what has not got its checkpoint by now gets none
        try:
            verdict = await anyio.to_thread.run_sync(gate.judge, directory, self.settings, evaluated)
        except (UserError, OSError) as exc:
            await self._raise(evaluated, f"{evaluated} cannot be judged: {exc}", None)
            return
        if verdict is not None and verdict.comparison_id:
            failpoint("controller.after_comparison")
        log.info("gate.judged", evaluated=str(evaluated), verdict=verdict.sentence if verdict is not None else "")
        if verdict is not None and verdict.is_worse:
            await self._raise(evaluated, f"{verdict.version} does worse: {verdict.sentence}", verdict.difference)
        elif verdict is not None and verdict.is_better and action == "alarm" and verdict.against:
            sentence = f"{verdict.version} does better, and is not promoted: {verdict.sentence}"
            await self._raise(evaluated, sentence, verdict.difference)
        else:
            await self._clear(evaluated)
        if verdict is not None and verdict.is_better and (action == "promote" or not verdict.against):
            self._awaited = verdict
            await self.settle()

    async def settle(self) -> None:
        """Promote what is to be, if its checkpoint is there now."""
        verdict, directory = self._awaited, self.settings.run_directory
        if verdict is None or not gate.has_checkpoint(directory, verdict.version):
            return
        self._awaited = None
        try:
            tag = await anyio.to_thread.run_sync(partial(gate.promote, directory, self.settings.gate, verdict))
        except UserError as exc:
            await self._raise(verdict.version, f"{verdict.version} cannot be promoted: {exc}", None)
            return
        failpoint("controller.after_tag")
        if tag is not None:
            await tell(self._bus, tag)

    def report(self) -> dict[str, Any]:
        """Return what the controller says of it."""
        return {"alarms": [self.sentence] if self.sentence else [], "alarm_names": GATE if self.sentence else ""}

    async def _tell_again(self) -> None:
        """Tell of the promotion that the run's events do not have: a controller died before.

        Not of one over which a person has moved the tag since: whoever goes by the newest event would be misled.
        """
        held = (await anyio.to_thread.run_sync(tags.read, self.settings.run_directory)).get(self.settings.gate.against)
        if held is None or held.by != GATE:
            return
        if (VersionTagged.__name__, held.version, held.was, held.comparison) not in self._told:
            await tell(self._bus, held)

    async def _raise(self, version: Version, sentence: str, value: float | None) -> None:
        self.sentence = sentence
        await self._publish(AlarmRaised, version, sentence, value)

    async def _clear(self, version: Version) -> None:
        was, self.sentence = self.sentence, ""
        if was:
            await self._publish(AlarmCleared, version, was, None)

    async def _publish(
        self, kind: type[AlarmRaised | AlarmCleared], version: Version, sentence: str, value: float | None
    ) -> None:
        if (kind.__name__, str(version)) in self._told:
            return
        self._told.add((kind.__name__, str(version)))
        bound = self.settings.gate.at_least
        event = kind(
            name=GATE, step=version.step, weights_version=str(version), sentence=sentence, value=value, bound=bound
        )
        log.warning(event.kind, name=GATE, sentence=sentence)
        await self._bus.publish_event(event)

    async def _read_told(self) -> set[tuple[str, ...]]:
        """Return which events of its own the run has: people tag versions too, and other alarms are raised."""
        told: set[tuple[str, ...]] = set()
        for kind, keys, own in (
            (VersionTagged, ("version", "was", "comparison"), {"tag": self.settings.gate.against, "by": GATE}),
            (AlarmRaised, ("weights_version",), {"name": GATE}),
        ):
            subject = self._bus.names.event(str(kind.__struct_config__.tag), self._bus.role)
            try:
                messages = await self._bus.read_log(self._bus.names.events_stream, subject)
            except DeniedError as exc:  # an external broker whose permissions are older than this
                log.warning("gate.events_not_read", cause=str(exc))
                continue
            events = (decode_object(message.data) or {} for message in messages)
            own_events = (event for event in events if own.items() <= event.items())
            told |= {(kind.__name__, *(str(event.get(key, "")) for key in keys)) for event in own_events}
        return told
