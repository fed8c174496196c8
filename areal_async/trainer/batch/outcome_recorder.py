"""What becomes of groups, carried out: outcomes stored, and only then the messages they speak of removed.

The rules are ``GroupOutcomes``'. A trained group's messages stay until ``on_checkpoint``; every other end is recorded
and its messages are removed at once, or soon (``bus.Sweep``): one that a crash leaves behind is removed by the next
lineage, which finds its outcome.
"""

from collections.abc import Iterable, Sequence

import anyio
import structlog

from areal_async.bus import Bus, Delivery
from areal_async.errors import StreamFullError
from areal_async.process.failpoints import failpoint
from areal_async.protocol.events import GroupDead
from areal_async.protocol.types import Cut, Outcome, OutcomeKind, StoredMessage
from areal_async.telemetry import spans
from areal_async.trainer.batch.group_outcomes import GroupOutcomes
from areal_async.trainer.batch.inventory import Inventory
from areal_async.trainer.batch.lineage import Lineage

log = structlog.get_logger()


class OutcomeRecorder:
    """Records outcomes of one lineage and removes what they settle."""

    def __init__(self, bus: Bus, fates: GroupOutcomes[Delivery], lineage: Lineage) -> None:
        self._bus = bus
        self._fates = fates
        self._sweep = bus.sweep(bus.names.trajectories_stream, is_newest=lineage.is_newest)

    @property
    def num_held_bytes(self) -> int:
        """Of the stream, in messages that are settled and not removed yet."""
        return self._sweep.num_bytes

    async def make_room(self) -> None:
        """Remove every settled message now, whatever it costs."""
        await self._sweep.flush()

    def take_counts(self) -> tuple[int, int]:
        """Return how many groups were dropped as stale, and how many failed, since the last call."""
        return self._fates.take_counts()

    async def on_checkpoint(self, step: int) -> None:
        """Record and remove what the checkpoint of ``step`` contains: on disk, and the newest by the bucket."""
        await self._record(self._fates.of_checkpoint(step))
        failpoint("trainer.before_acks")
        await self._sweep.settle(self._fates.release_cuts(step))
        failpoint("trainer.after_acks")

    async def settle(self, group_ids: Iterable[str], kind: OutcomeKind, *, reason: str, step: int) -> None:
        """End groups without training them: record, then remove."""
        ids = list(group_ids)
        await self._record(self._fates.of_untrained(ids, kind, reason=reason, step=step))
        await self._sweep.settle(self._fates.release(ids))

    async def receive(self, message: StoredMessage, delivery: Delivery) -> None:
        """Take a stored message; record its slots that cannot be used, and remove what needs not be kept."""
        unusable = self._fates.receive(message, delivery)
        for outcome in unusable:
            await store_outcome(self._bus, outcome)
        await self._sweep.settle(self._fates.release_received(message, unusable))

    async def _record(self, outcomes: Sequence[Outcome]) -> None:
        async with anyio.create_task_group() as publishing:
            for outcome in outcomes:
                publishing.start_soon(store_outcome, self._bus, outcome)
        self._fates.note_recorded(outcomes)


async def store_outcome(bus: Bus, outcome: Outcome) -> None:
    """Record an outcome; once, however often it is said."""
    names = bus.names
    if outcome.kind is OutcomeKind.DEAD:
        try:
            await bus.publish(names.dead_groups, outcome, msg_id=f"dead.{outcome.group_id}")
        except StreamFullError:  # of letters that anybody may write; the same outcome is in the log, below
            log.warning("dead_letter.no_room", group_id=outcome.group_id, reason=outcome.reason)
        await bus.publish_event(GroupDead(group_id=outcome.group_id, reason=outcome.reason))
    uid = outcome.sample_uid or outcome.group_id
    with spans.settled(outcome):
        await bus.publish(names.outcomes, outcome, msg_id=f"{outcome.lineage}.{uid}.{outcome.kind}")


async def fail_group(bus: Bus, group_id: str, cut: Cut, *, reason: str, lineage: int, max_attempts: int) -> None:
    """Record that a group of a cut has failed, from a rank that settles nothing else.

    Its messages stay, as in a crash.
    """
    fates: GroupOutcomes[Delivery] = GroupOutcomes(Inventory(), lineage=lineage, max_attempts=max_attempts, recorded=())
    fates.hold(cut)
    for outcome in fates.of_untrained([group_id], OutcomeKind.FAILED, reason=reason, step=cut.step):
        await store_outcome(bus, outcome)
