"""Orders to a live run: pause, resume, stop. Anyone who may ask the controller can give them, with any NATS client.

An order is one compare-and-set of the key ``control``, so two operators never undo each other unseen, and it outlives
the controller. Each is told as an event with who gave it and why: the audit record.
"""

import functools
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec
import structlog

from areal_async.bus import Bus, Report, Schema, ServiceEndpoint, json_object
from areal_async.config.live import check_change, full_name, held_changes, live_names, value_of
from areal_async.config.settings import Settings
from areal_async.controller.audit import note
from areal_async.errors import ConflictError, UserError
from areal_async.protocol.events import RunOrdered, SettingChanged
from areal_async.protocol.run_state import Change, Changes, Control
from areal_async.protocol.subjects import CHANGES, CONTROL

MAX_TEXT = 200
TEXT: Schema = {"type": "string", "maxLength": MAX_TEXT}
ORDER = json_object(optional=["by", "reason"], by=TEXT, reason=TEXT)
CONTROLLED = json_object(is_paused="boolean", is_stopping="boolean", by="string", reason="string", at="string")
VERSION = json_object(optional=["version"], version="string")
EVALUATED = json_object(version="string", records="array")
ALL_CHANGES: Schema = {"type": "object", "additionalProperties": {"type": "number"}}
"""Setting -> value, of all that are changed."""

ORDERS = {"pause": {"is_paused": True}, "resume": {"is_paused": False}, "stop": {"is_stopping": True}}
"""What each order changes of the run's ``Control``."""
DESCRIPTIONS = {
    "pause": "admit nothing more; what was admitted is finished",
    "resume": "admit again",
    "stop": "finish the step, checkpoint and end; the same command as before goes on from there",
    "set": "change a setting of the live run",
    "eval": "evaluate what the servers hold; ask again with the version of the answer until it has records",
}
Answer = Callable[[Report], Awaitable[Report]]

log = structlog.get_logger()


class RunSteering:
    """The endpoints of the controller at which operators give orders."""

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        *,
        evaluate: Answer,
        check: Callable[[str], None] = lambda setting: None,
        follow: Callable[[Changes], None] = lambda changes: None,
    ) -> None:
        """``check`` raises ``UserError`` for a setting that cannot change in this very run.

        ``follow`` is called with all changes before one is answered: what is admitted after the answer goes by it.
        """
        self._bus = bus
        self._settings = settings
        self._evaluate = evaluate
        self._check = check
        self._follow = follow
        self.control = Control()
        """The orders in force, as they were seen last."""

    def see(self, control: Control) -> None:
        """Take note of the orders in force."""
        if control.is_paused != self.control.is_paused:
            log.info("run.paused" if control.is_paused else "run.resumed", by=control.by)
        self.control = control

    @property
    def endpoints(self) -> list[ServiceEndpoint]:
        """An endpoint for each order."""
        names: Schema = {"enum": live_names(self._settings)}
        change = json_object(optional=["by", "reason"], setting=names, value={"type": "number"}, by=TEXT, reason=TEXT)
        answers: dict[str, tuple[Schema, Schema, Answer]] = {
            name: (ORDER, CONTROLLED, functools.partial(self._order, name)) for name in ORDERS
        }
        answers |= {"set": (change, ALL_CHANGES, self._set), "eval": (VERSION, EVALUATED, self._evaluate)}
        return [
            ServiceEndpoint(
                name=name,
                subject=self._bus.names.control(name),
                description=DESCRIPTIONS[name],
                request=request,
                response=response,
                answer=answer,
            )
            for name, (request, response, answer) in answers.items()
        ]

    async def _order(self, name: str, body: Report) -> Report:
        """Carry out one order; one that changes nothing is no mistake.

        Raises:
            UserError: ``by`` or ``reason`` is no text.
        """
        by, reason = (text_in(body, key) for key in ("by", "reason"))
        while True:
            found, revision = await self._bus.get(CONTROL, Control)
            event = RunOrdered(order=name, by=by, reason=reason)
            wanted = msgspec.structs.replace(found or Control(), by=by, reason=reason, at=event.at, **ORDERS[name])
            with suppress(ConflictError):  # another operator was faster: theirs first, then ours
                await self._bus.compare_and_set(CONTROL, wanted, revision)
                break
        self.see(wanted)
        await note(self._bus, self._settings.run_directory, event)
        answer: Report = msgspec.to_builtins(wanted)
        return answer

    async def _set(self, body: Report) -> Report:
        """Change one setting, or refuse it with the reason.

        Raises:
            UserError: it cannot change while the run goes on, or not to this.
        """
        by, reason, named = (text_in(body, key) for key in ("by", "reason", "setting"))
        setting = full_name(self._settings, named)
        while True:
            found, revision = await self._bus.get(CHANGES, Changes)
            changes = found or Changes()
            value = check_change(self._settings, changes, setting, body.get("value"))
            self._check(setting)
            given = value_of(self._settings, setting)
            before = dict(held_changes(self._settings, changes)).get(setting, given)
            event = SettingChanged(setting=setting, before=before, after=value, by=by, reason=reason)
            change = Change(value=value, given=given, by=by, reason=reason, at=event.at)
            wanted = Changes(by_setting=changes.by_setting | {setting: change})
            with suppress(ConflictError):  # another operator was faster: theirs first, then ours
                await self._bus.compare_and_set(CHANGES, wanted, revision)
                break
        self._follow(wanted)
        await note(self._bus, self._settings.run_directory, event)
        return dict(held_changes(self._settings, wanted))


def text_in(body: Report, key: str) -> str:
    """Return a text of a request; empty where there is none.

    Raises:
        UserError: it is no text, or too long.
    """
    value = body.get(key, "")
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise UserError(f"{key}: got {value!r:.100}, need a text of at most {MAX_TEXT} characters")
    return value
