"""Which groups are settled already, as the outcome log says: their tickets need no work."""

from collections.abc import Collection

import anyio

from areal_async.bus import Bus
from areal_async.types import Outcome
from areal_async.wire import decode


class SettledGroups:
    """Reads the outcome log on demand, each time only what is new."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._lock = anyio.Lock()
        self._next_sequence = 1
        self._newest_lineage = 0
        self._groups: set[str] = set()

    async def among(self, group_ids: Collection[str]) -> set[str]:
        """Return those that are settled as of now."""
        async with self._lock:
            names = self._bus.names
            for message in await self._bus.read_log(
                names.outcomes_stream, names.outcomes, start_sequence=self._next_sequence
            ):
                self._next_sequence = message.sequence + 1
                outcome = decode(message.data, Outcome)
                # What an older lineage recorded after a newer one had begun does not count.
                if outcome.lineage >= self._newest_lineage and outcome.kind.settles:
                    self._groups.add(outcome.group_id)
                self._newest_lineage = max(self._newest_lineage, outcome.lineage)
        return self._groups.intersection(group_ids)
