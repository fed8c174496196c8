"""Orders to a live run: paused, resumed, stopped. Whoever may ask the controller can give them, with any NATS client.

An order is one compare-and-set of the key ``control``, so two operators never undo each other unseen, and it outlives
the controller. Each is told as an event with who gave it and why: the audit record.
"""

import msgspec
import structlog

from areal_async.bus import Bus, Endpoint, Report
from areal_async.errors import ConflictError, UserError
from areal_async.events import RunOrdered
from areal_async.run_state import Control
from areal_async.subjects import CONTROL

MAX_TEXT = 200

log = structlog.get_logger()


class Steering:
    """The controller's side of it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.control = Control()
        """As it was seen last."""

    @property
    def endpoints(self) -> list[Endpoint]:
        """One per order. Each takes ``{"by": who, "reason": why}``, both optional, and answers with ``Control``."""
        names = self._bus.names
        return [
            Endpoint(
                name="pause",
                subject=names.control("pause"),
                description="admit nothing more; what was admitted is finished",
                answer=self._pause,
            ),
            Endpoint(
                name="resume",
                subject=names.control("resume"),
                description="admit again",
                answer=self._resume,
            ),
            Endpoint(
                name="stop",
                subject=names.control("stop"),
                description="finish the step, checkpoint and end; the same command as before goes on from there",
                answer=self._stop,
            ),
        ]

    async def _pause(self, body: Report) -> Report:
        return await self._order("pause", body, is_paused=True)

    async def _resume(self, body: Report) -> Report:
        return await self._order("resume", body, is_paused=False)

    async def _stop(self, body: Report) -> Report:
        return await self._order("stop", body, is_stopping=True)

    async def _order(self, name: str, body: Report, **changes: bool) -> Report:
        """Carry out one order; one that changes nothing is no mistake.

        Raises:
            UserError: ``by`` or ``reason`` is no text.
        """
        by, reason = (_text(body, key) for key in ("by", "reason"))
        while True:
            found, revision = await self._bus.get(CONTROL, Control)
            event = RunOrdered(order=name, by=by, reason=reason)
            wanted = msgspec.structs.replace(found or Control(), by=by, reason=reason, at=event.at, **changes)
            try:
                await self._bus.compare_and_set(CONTROL, wanted, revision)
                break
            except ConflictError:
                continue  # another operator was faster: theirs first, then ours
        log.info(event.kind, order=name, by=by, reason=reason)
        await self._bus.tell(event)
        answer: Report = msgspec.to_builtins(wanted)
        return answer


def _text(body: Report, key: str) -> str:
    value = body.get(key, "")
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise UserError(f"{key}: got {value!r:.100}, need a text of at most {MAX_TEXT} characters")
    return value
