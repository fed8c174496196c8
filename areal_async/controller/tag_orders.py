"""Orders that give a run's versions tags, while it lives. The tags are in its directory, not in its keys."""

import anyio.to_thread
import msgspec

from areal_async.bus import Bus, Report, Schema, ServiceEndpoint, json_object
from areal_async.config.settings import Settings
from areal_async.controller.audit import log
from areal_async.controller.steering import TEXT
from areal_async.errors import UserError
from areal_async.protocol.events import VersionTagged
from areal_async.versions.promotion import Promotion, promote
from areal_async.versions.tags import Tag

PROMOTE = "promote"


class TagOrders:
    """The endpoint of the controller at which operators promote versions."""

    def __init__(self, bus: Bus, settings: Settings) -> None:
        self._bus = bus
        self._settings = settings

    @property
    def endpoints(self) -> list[ServiceEndpoint]:
        """The endpoint."""
        given: dict[str, Schema] = {"tag": TEXT, "by": TEXT, "reason": TEXT, "comparison": TEXT}
        given |= {"version": {"type": ["string", "null"]}, "at_least": {"type": "number"}, "force": {"type": "boolean"}}
        return [
            ServiceEndpoint(
                name=PROMOTE,
                subject=self._bus.names.control(PROMOTE),
                description="give a tag to a version that did not do worse than the one that has it, or take it away",
                request=json_object(optional=[*given], **given),
                response=json_object(tag="string", version="string", was="string", comparison="string"),
                answer=self._promote,
            )
        ]

    async def _promote(self, body: Report) -> Report:
        """Give a tag, or take it away.

        Raises:
            UserError: the order cannot be read, or ``promote`` refuses.
        """
        try:
            wanted = msgspec.convert(body, Promotion)
        except msgspec.ValidationError as exc:
            raise UserError(f"promote: {exc}") from exc
        tag = await anyio.to_thread.run_sync(promote, self._settings.run_directory, self._settings, wanted)
        await tell(self._bus, tag)
        return {"tag": tag.tag, "version": tag.version, "was": tag.was, "comparison": tag.comparison}


async def tell(bus: Bus, tag: Tag) -> None:
    """Say that a tag has moved."""
    event = VersionTagged(
        tag=tag.tag, version=tag.version, was=tag.was, by=tag.by, reason=tag.why, comparison=tag.comparison
    )
    log.info(event.kind, **msgspec.structs.asdict(event))
    await bus.publish_event(event)
