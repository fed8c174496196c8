"""The order to go on from an earlier checkpoint, as the controller takes it; ``trainer.begin`` carries it out."""

from collections.abc import Callable

import anyio.to_thread

from areal_async.bus import Bus, Report, Schema, ServiceEndpoint, json_object, order_rollback
from areal_async.config.change_record import ordered_rollback
from areal_async.config.settings import Settings
from areal_async.controller.audit import note
from areal_async.controller.steering import TEXT, text_in
from areal_async.errors import UserError
from areal_async.process.failpoints import failpoint
from areal_async.protocol.journal import Journal
from areal_async.protocol.run_state import Rollback
from areal_async.protocol.types import Version, WeightsVersion
from areal_async.versions.resolve import resolve
from areal_async.versions.restore_points import is_restore_point, restore_points

ORDER = "rollback"


class RollbackOrders:
    """The endpoint of the controller at which operators have the run go back."""

    def __init__(self, bus: Bus, settings: Settings, journal: Callable[[], Journal]) -> None:
        self._bus = bus
        self._settings = settings
        self._journal = journal

    @property
    def endpoints(self) -> list[ServiceEndpoint]:
        """The one."""
        said: dict[str, Schema] = {"by": TEXT, "reason": TEXT}
        return [
            ServiceEndpoint(
                name=ORDER,
                subject=self._bus.names.control(ORDER),
                description="go on from an earlier checkpoint, as a new lineage: what was trained since is given up",
                request=json_object(optional=[*said], version=TEXT, **said),
                response=json_object(version="string", number="integer"),
                answer=self._order,
            )
        ]

    async def _order(self, body: Report) -> Report:
        """Take an order.

        Raises:
            UserError: there is no such checkpoint, or the run has trained its last step and is about to end.
        """
        wanted, by, reason = (text_in(body, key) for key in ("version", "by", "reason"))
        newest, _ = await self._bus.get(self._bus.names.weights_key(), WeightsVersion)
        if newest is not None and newest.final:
            raise UserError(
                f"run {self._settings.run.name}: has trained its last step, and is about to end; "
                "give the order again when it has"
            )
        version = await checkpoint_of(self._settings, self._journal(), wanted)
        order = await go_back(self._bus, self._settings, version, by=by, reason=reason)
        return {"version": order.version, "number": order.number}


async def checkpoint_of(settings: Settings, journal: Journal, wanted: str) -> Version:
    """Return which checkpoint is meant of those that the run may go back to.

    Raises:
        UserError: it is none of those; the sentence lists them.
    """
    directory = settings.run_directory
    points = await anyio.to_thread.run_sync(restore_points, directory, journal)
    of_step = [version for version in points if str(version.step) == wanted]
    version = resolve(directory, settings, str(of_step[-1]) if of_step else wanted, option="--to", among=points)
    folder = directory / "checkpoints" / str(version)
    if not await anyio.to_thread.run_sync(is_restore_point, folder, journal):
        raise UserError(f"--to: got {version}, whose steps were trained otherwise since; name another checkpoint")
    return version


async def go_back(bus: Bus, settings: Settings, version: Version, *, by: str, reason: str) -> Rollback:
    """Order it, and leave that on record."""
    order = await order_rollback(bus, version, by=by, reason=reason)
    assert order is not None
    failpoint("controller.after_rollback_order")
    await note(bus, settings.run_directory, ordered_rollback(order))
    return order
