"""What trajectories show is stored before them, once for their group, and the trainer gets it with them."""

from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from areal_async.bus import Bus, Role
from areal_async.config.settings import MIN_IMAGE_STREAM_BYTES, BusSettings, RolloutSettings, RunSettings, Settings
from areal_async.errors import WireError
from areal_async.protocol.publish_log import PublishLog
from areal_async.protocol.types import Cut, CutGroup, CutSlot, ImageRef, SlotStatus, Ticket
from areal_async.protocol.wire import decode_headers
from areal_async.rollout import backpressure, publish
from areal_async.rollout.backpressure import Backpressure
from areal_async.rollout.publish import Outbox
from areal_async.trainer.batch.payloads import BatchSlot, fetch, slots_of
from areal_async.vision.images import Image
from tests.brokers import OpenRole, until
from tests.bus.stored import ref_of, trajectory

pytestmark = pytest.mark.anyio

GROUP_SIZE = 4
TICKET = Ticket(group_id="0-7-0", workflow="w", row={}, group_size=GROUP_SIZE, version="1-0", number=7)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(backpressure, "MAX_FULL_WAIT_S", 0.2)
    monkeypatch.setattr(publish, "FLUSH_DEADLINE_S", 0.1)
    return Settings(
        run=RunSettings(name="test", directory=tmp_path),
        rollout=RolloutSettings(group_size=GROUP_SIZE, max_image_stream_bytes=MIN_IMAGE_STREAM_BYTES),
        bus=BusSettings(operation_deadline_s=60.0, max_disk_bytes=8 << 30),
    )


def image(num_bytes: int, seed: int = 0) -> Image:
    return Image(bytes([seed]) * num_bytes, 8, 8)


class Group:
    """One group's outbox."""

    def __init__(self, bus: Bus, settings: Settings) -> None:
        self._bus = bus
        self.backpressure = Backpressure()
        self.outbox = Outbox(
            bus,
            TICKET,
            producer="a",
            num_expected=GROUP_SIZE,
            linger_s=0.0,
            backpressure=self.backpressure,
            publish_log=PublishLog(settings.run_directory, "a"),
        )

    def put(self, sibling: int, images: Sequence[Image]) -> None:
        refs = [ref_of(one.data) for one in images]
        self.outbox.put(trajectory(TICKET.group_id, sibling, images=refs or None), {one.sha256: one for one in images})

    async def stored(self) -> list[BatchSlot]:
        """Return what is stored of it, as a cut has it."""
        names = self._bus.names
        items = [
            CutSlot(slot=slot, sequence=message.sequence)
            async for message in self._bus.find_messages(
                names.trajectories_stream, names.trajectories(TICKET.workflow, TICKET.group_id)
            )
            for slot in decode_headers(message.headers, sequence=message.sequence, num_bytes=len(message.data)).slots
        ]
        group = CutGroup(group_id=TICKET.group_id, workflow=TICKET.workflow, slots=items)
        return slots_of(Cut(lineage=1, step=1, groups=[group]))


async def newest() -> bool:
    return True


async def test_siblings_store_one_copy_and_the_trainer_gets_it(open_role: OpenRole, settings: Settings) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    group, shared, own = Group(node, settings), image(100_000), image(3, seed=1)
    for sibling in range(GROUP_SIZE):
        group.put(sibling, [shared, shared] if sibling else [own])

    await group.outbox.run()

    state = await trainer.stream_state(trainer.names.images_stream)
    assert state.num_messages == 2
    assert state.num_bytes + (await trainer.stream_state(trainer.names.trajectories_stream)).num_bytes <= 110_000
    found = await fetch(trainer, await group.stored())
    assert found.images == {one.sha256: one.data for one in (shared, own)}
    assert (len(found.trajectories), found.missing) == (GROUP_SIZE, {})


async def test_no_slot_is_stored_before_what_it_shows(open_role: OpenRole, settings: Settings) -> None:
    """A full stream holds up the siblings that show something new, and nobody else."""
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    filling, shown = image(6 << 20), image(3 << 20, seed=1)
    await node.images.put("0-1-0", ref_of(filling.data), filling.data)
    group = Group(node, settings)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(group.outbox.run)
        group.put(0, [])
        await until(lambda: group.outbox.num_left == GROUP_SIZE - 1)
        for sibling in range(1, GROUP_SIZE):
            group.put(sibling, [shown] if sibling > 1 else [])
        await until(lambda: group.backpressure.num_waiting == 1)
        assert [slot.header.sibling for slot in await group.stored()] == [0]

        await trainer.images.purge(["0-1-0"], is_newest=newest)
        with anyio.fail_after(30):
            await until(lambda: group.outbox.num_left == 0)

    assert (await fetch(trainer, await group.stored())).images == {shown.sha256: shown.data}


async def test_a_slot_that_is_ready_while_another_is_made_waits_for_what_it_shows(
    open_role: OpenRole, settings: Settings
) -> None:
    node = await open_role(Role.NODE)
    filling = image(6 << 20)
    await node.images.put("0-1-0", ref_of(filling.data), filling.data)
    group = Group(node, settings)
    async with anyio.create_task_group() as tasks:
        async with group.backpressure.encoding:
            tasks.start_soon(group.outbox.run)
            group.put(0, [])
            await until(lambda: group.backpressure.encoding.statistics().tasks_waiting == 1)
            group.put(1, [image(3 << 20, seed=1)])
        await until(lambda: group.outbox.num_left < GROUP_SIZE)

        assert [slot.header.sibling for slot in await group.stored()] == [0]
        tasks.cancel_scope.cancel()


async def test_an_image_that_no_stream_of_this_size_holds_is_its_siblings_failure(
    open_role: OpenRole, settings: Settings
) -> None:
    node = await open_role(Role.NODE)
    group = Group(node, settings)
    for sibling in range(GROUP_SIZE):
        group.put(sibling, [image(9 << 20)] if sibling == 2 else [])

    await group.outbox.run()

    slots = [slot.header for slot in await group.stored()]
    assert [slot.status for slot in slots].count(SlotStatus.SCORED) == GROUP_SIZE - 1
    failed = next(slot for slot in slots if slot.status is SlotStatus.FAILED)
    assert failed.sibling == 2
    assert "got 9437184 bytes, need at most 6710886; raise rollout.max_image_stream_bytes" in failed.reason


async def test_a_slot_whose_image_is_gone_or_refused_is_missing_with_why(
    open_role: OpenRole, settings: Settings
) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    group, images = Group(node, settings), [image(10, seed) for seed in range(GROUP_SIZE)]
    for sibling in range(GROUP_SIZE):
        group.put(sibling, [images[sibling]])
    await group.outbox.run()
    names = trainer.names
    await trainer.api.ask(
        f"$JS.API.STREAM.PURGE.{names.images_stream}", {"filter": names.images(TICKET.group_id, images[1].sha256)}
    )

    def check(ref: ImageRef, data: bytes) -> None:
        if ref.sha256 == images[2].sha256:
            raise WireError(f"image: got {len(data)} bytes")

    found = await fetch(trainer, await group.stored(), check_image=check)

    assert [one.slot.sibling for _, one in sorted(found.trajectories.items())] == [0, 3]
    assert set(found.images) == {images[0].sha256, images[3].sha256}
    assert "got 0 bytes, need 10; it was not stored, or is purged" in found.missing[TICKET.group_id, 1]
    assert found.missing[TICKET.group_id, 2] == "image: got 10 bytes"
