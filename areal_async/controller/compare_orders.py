"""The order that has nodes serve a side of a comparison, for as long as whoever makes it asks again.

Who compares asks the rows itself, and takes the answers in. So nothing of a comparison is lost with the controller, and
nothing of it stays in the run when whoever compares has died.
"""

from contextlib import suppress
from typing import Any

import anyio
import msgspec

from areal_async.bus import Bus, Report, ServiceEndpoint, json_object
from areal_async.config.settings import Settings
from areal_async.controller.arm_orders import refuse_colocated
from areal_async.controller.audit import note
from areal_async.controller.steering import TEXT, text_in
from areal_async.errors import ConflictError, UserError
from areal_async.protocol.arms import MAX_PATH_CHARACTERS, Arms, Pinned
from areal_async.protocol.events import RunOrdered
from areal_async.protocol.subjects import ARMS

COMPARE = "compare"
LEASE_S = 60.0
"""Time after which a side is served no longer, unless somebody has asked again."""
LOOK_S = 5.0
MAX_COMPARED = 4
"""Sides that are served at once: of so many comparisons."""


class CompareOrders:
    """The endpoint of the controller at which those who compare have versions served."""

    def __init__(self, bus: Bus, settings: Settings) -> None:
        self._bus = bus
        self._settings = settings
        self._asked_until_s: dict[str, float] = {}
        """By the loop's clock. A controller that takes over begins anew."""

    @property
    def endpoints(self) -> list[ServiceEndpoint]:
        """The endpoint."""
        side: dict[str, Any] = {"arm_id": TEXT, "version": TEXT, "by": TEXT}
        side["path"] = {"type": "string", "maxLength": MAX_PATH_CHARACTERS}
        return [
            ServiceEndpoint(
                name=COMPARE,
                subject=self._bus.names.control(COMPARE),
                description=f"serve a side of a comparison for {LEASE_S:g} s more, or, without its path, no longer",
                request=json_object(optional=[*side], name=TEXT, **side),
                response=json_object(lease_s="number"),
                answer=self._compare,
            )
        ]

    async def run_leases(self) -> None:
        """End what nobody asks for any more, until cancelled."""
        while True:
            await anyio.sleep(LOOK_S)
            arms, _ = await self._bus.get(ARMS, Arms)
            now_s = anyio.current_time()
            for name in (arms or Arms()).compared:
                if now_s > self._asked_until_s.setdefault(name, now_s + LEASE_S):
                    await self._serve(name, None)

    async def _compare(self, body: Report) -> Report:
        """Have a side served a while longer, or no longer.

        Raises:
            UserError: the order cannot be read, or the run has no room for a comparison.
        """
        name, by = (text_in(body, key) for key in ("name", "by"))
        if "path" not in body:
            await self._serve(name, None)
            return {"lease_s": 0.0}
        try:
            side = msgspec.convert({key: value for key, value in body.items() if key != "by"}, Pinned)
        except msgspec.ValidationError as exc:
            raise UserError(f"compare: {exc}") from exc
        if not self._settings.eval.share:
            raise UserError("compare: the run has eval.share=0, so its nodes answer for no comparison; give --here")
        refuse_colocated(self._settings, "compare: got a run")
        self._asked_until_s[name] = anyio.current_time() + LEASE_S
        if await self._serve(name, side):
            event = RunOrdered(order=f"{COMPARE} {side.version or side.path}", by=by, reason="")
            await note(self._bus, self._settings.run_directory, event)
        return {"lease_s": LEASE_S}

    async def _serve(self, name: str, side: Pinned | None) -> bool:
        """Write what is to be served under a name; return whether that is news."""
        while True:
            found, revision = await self._bus.get(ARMS, Arms)
            arms = found or Arms()
            compared = {other: one for other, one in arms.compared.items() if other != name}
            if side is not None:
                compared[name] = side
            if compared == arms.compared:
                return False
            if len(compared) > MAX_COMPARED:
                raise UserError(f"compare: the run makes {MAX_COMPARED} comparisons already; wait for one of them")
            with suppress(ConflictError):
                await self._bus.compare_and_set(ARMS, msgspec.structs.replace(arms, compared=compared), revision)
                return True
