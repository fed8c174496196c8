"""Giant trajectories go through whole, and no client is ever cut off for leaving them unread (P8)."""

import time
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from areal_async.bus import EmbeddedBroker, Role, broker_config, take_trainer_consumer
from areal_async.bus.log import BATCH_BYTES
from areal_async.config.settings import MAX_PAYLOAD_BYTES, BusSettings, RolloutSettings, RunSettings, Settings
from areal_async.protocol.publish_log import PublishLog
from areal_async.protocol.types import CutSlot, Ticket, Trajectory
from areal_async.protocol.wire import decode_headers
from areal_async.rollout.backpressure import Backpressure
from areal_async.rollout.node_context import READS_AT_ONCE
from areal_async.rollout.publish import Outbox
from areal_async.trainer.batch.payloads import FETCHES_AT_ONCE, BatchSlot, SlotKey, fetch
from tests.brokers import OpenRole, fetch_all
from tests.bus.stored import giant

GROUP_SIZE = 16
HOLDS = {"held up once": (1, 1.0), "always slow": (300, 0.003)}
"""How often, and for how many seconds, the reader's loop is held up, as by decoding."""
PENDING_BYTES = 36 << 20
"""Of the broker of these tests: less than the trajectories of a group, as the real one's is less than a batch's."""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(broker_config, "MAX_PENDING_BYTES", PENDING_BYTES)
    return Settings(
        run=RunSettings(name="test", directory=tmp_path),
        rollout=RolloutSettings(group_size=GROUP_SIZE, max_stream_bytes=256 << 20),
        bus=BusSettings(operation_deadline_s=60.0, max_disk_bytes=8 << 30),
    )


@pytest.mark.anyio
@pytest.mark.parametrize(("num_holds", "hold_s"), HOLDS.values(), ids=list(HOLDS))
async def test_a_group_of_four_megabytes_each_goes_through_to_a_reader_that_is_busy(
    broker: EmbeddedBroker, open_role: OpenRole, settings: Settings, num_holds: int, hold_s: float
) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    ticket = Ticket(group_id="0-0-0", workflow="w", row={}, group_size=GROUP_SIZE, version="1-0")
    outbox = Outbox(
        node, ticket, producer="a", num_expected=GROUP_SIZE, linger_s=0.0, backpressure=Backpressure(),
        publish_log=PublishLog(settings.run_directory, "a"),
    )  # fmt: skip
    for sibling in range(GROUP_SIZE):
        outbox.put(giant(ticket.group_id, sibling, num_bytes=4 << 20))
    await outbox.run()
    async with trainer.consume(node.names.trajectories_stream, await take_trainer_consumer(trainer, 1)) as inbox:
        deliveries = await fetch_all(inbox, GROUP_SIZE)
    stored = [decode_headers(one.headers, sequence=one.sequence, num_bytes=one.num_bytes) for one in deliveries]
    placed = [
        BatchSlot(position=slot.sibling, group_id="0-0-0", workflow="w", item=CutSlot(slot=slot, sequence=one.sequence))
        for one in stored
        for slot in one.slots
    ]

    found: dict[int, Trajectory] = {}
    missing: list[SlotKey] = []

    async def fetch_them() -> None:
        by_position, gone, _ = await fetch(trainer, placed)
        found.update(by_position)
        missing.extend(gone)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fetch_them)
        if num_holds == 1:
            await anyio.wait_all_tasks_blocked()  # all has been asked for
        for _ in range(num_holds):
            time.sleep(hold_s)  # noqa: ASYNC251  that is the point
            await anyio.lowlevel.checkpoint()

    assert missing == []
    assert sorted(found) == list(range(GROUP_SIZE))
    assert all((found[sibling].sequences[0].token_ids == sibling).all() for sibling in found)
    assert trainer.connection.num_losses == 0
    assert "Slow Consumer" not in (settings.run_directory / "logs" / "nats.log").read_text()


def test_what_is_asked_for_at_once_is_less_than_half_of_what_the_broker_lets_wait() -> None:
    largest_answer_bytes = BATCH_BYTES + MAX_PAYLOAD_BYTES

    # Twice, as what the broker writes counts until the last of it is written.
    assert 2 * max(FETCHES_AT_ONCE, READS_AT_ONCE) * largest_answer_bytes <= broker_config.MAX_PENDING_BYTES
