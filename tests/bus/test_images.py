"""An image is stored once for its group and whole, whoever puts it and dies; what is read is what its name says."""

import os
import random
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from areal_async.bus import Bus, EmbeddedBroker, Role, declare
from areal_async.bus import images as images_module
from areal_async.bus.images import CHUNK_BYTES, END_HEADER
from areal_async.bus.log import BATCH_MESSAGES, Message
from areal_async.config.settings import MESSAGE_OVERHEAD_BYTES, MIN_IMAGE_STREAM_BYTES, RolloutSettings, Settings
from areal_async.errors import ConflictError, StoredImageError, StreamFullError, UserError
from areal_async.protocol.subjects import Names
from tests.brokers import PATIENCE_S, OpenRole
from tests.bus.stored import ref_of

pytestmark = pytest.mark.anyio

GROUP = "0-3-0"
RUN = Names("test")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"rollout": RolloutSettings(max_image_stream_bytes=64 << 20)})


def image(num_bytes: int, *, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


async def is_newest() -> bool:
    return True


async def is_not_newest() -> bool:
    return False


async def num_chunks(bus: Bus) -> int:
    return (await bus.stream_state(RUN.images_stream)).num_messages


@pytest.mark.parametrize("num_bytes", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 20_000_000])
async def test_an_image_of_any_size_comes_back_as_it_was(open_role: OpenRole, num_bytes: int) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    data = image(num_bytes)

    await node.images.put(GROUP, ref_of(data), data)

    assert await trainer.images.get(GROUP, ref_of(data)) == data
    state = await trainer.stream_state(RUN.images_stream)
    assert state.num_messages == -(-num_bytes // CHUNK_BYTES)
    assert num_bytes <= state.num_bytes <= num_bytes + 400 * state.num_messages


async def test_siblings_and_the_controller_share_one_copy_and_groups_none(open_role: OpenRole) -> None:
    controller, node, other = [await open_role(role) for role in (Role.CONTROLLER, Role.NODE, Role.NODE)]
    data = image(3 * CHUNK_BYTES)
    for bus in (controller, node, other, node):
        await bus.images.put(GROUP, ref_of(data), data)
    stored = await num_chunks(node)

    await node.images.put("0-4-0", ref_of(data), data)

    assert (stored, await num_chunks(node)) == (3, 6)
    assert await node.images.groups() == [GROUP, "0-4-0"]


async def test_nothing_is_kept_of_an_image_that_is_stored(open_role: OpenRole) -> None:
    node = await open_role(Role.NODE)
    data = image(CHUNK_BYTES + 1)

    await node.images.put(GROUP, ref_of(data), data)
    await node.images.put(GROUP, ref_of(data), data)

    assert not node.api.seen.newest(RUN.images_stream, RUN.images(GROUP, ref_of(data).sha256))


async def test_of_many_producers_at_once_each_chunk_is_stored_once(open_role: OpenRole) -> None:
    buses = [await open_role(Role.NODE, str(number)) for number in range(4)]
    data = image(7 * CHUNK_BYTES + 5)

    async with anyio.create_task_group() as putting:
        for bus in buses:
            putting.start_soon(bus.images.put, GROUP, ref_of(data), data)

    assert await num_chunks(buses[0]) == 8
    assert await buses[0].images.get(GROUP, ref_of(data)) == data


PUT = """
import sys
from pathlib import Path
import anyio
from areal_async.bus import Role, open_bus
from areal_async.protocol.subjects import Names
from tests.bus.test_images import GROUP, image, ref_of

async def main(url, key, num_bytes):
    async with open_bus(url, names=Names("test"), role=Role.NODE, credentials=Path(key)) as bus:
        data = image(num_bytes)
        await bus.images.put(GROUP, ref_of(data), data)

anyio.run(main, sys.argv[1], sys.argv[2], int(sys.argv[3]))
"""


async def test_half_an_image_is_none_until_another_producer_has_stored_the_rest(
    broker: EmbeddedBroker, open_role: OpenRole, tmp_path: Path
) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    data = image(4 * CHUNK_BYTES)
    arguments = [broker.url, str(broker.credentials(Role.NODE)), str(len(data))]
    faults = {"AREAL_FAULTS": "images.after_chunk:2:kill", "AREAL_FAULTS_FIRED": str(tmp_path / "fired")}

    with anyio.fail_after(PATIENCE_S):
        await anyio.run_process(
            [sys.executable, "-c", PUT, *arguments], check=False, env={**os.environ, **faults}, cwd=ROOT
        )
    assert await num_chunks(trainer) == 2
    with pytest.raises(StoredImageError, match=f"of group {GROUP}: got 2097152 bytes, need 4194304; it was not stored"):
        await trainer.images.get(GROUP, ref_of(data))
    await node.images.put(GROUP, ref_of(data), data)

    assert await num_chunks(trainer) == 4
    assert await trainer.images.get(GROUP, ref_of(data)) == data


async def test_what_was_purged_is_none_and_can_be_stored_again(open_role: OpenRole) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    data, other = image(2 * CHUNK_BYTES), image(10, seed=1)
    for group_id in (GROUP, "0-3-1", "0-30-0"):
        for one in (data, other):
            await node.images.put(group_id, ref_of(one), one)

    await trainer.images.purge([GROUP, "0-30-0"], is_newest=is_newest)

    assert await trainer.images.groups() == ["0-3-1"]
    assert await trainer.images.get("0-3-1", ref_of(data)) == data
    with pytest.raises(
        StoredImageError, match=f"of group {GROUP}: got 0 bytes, need 2097152; it was not stored, or is"
    ):
        await trainer.images.get(GROUP, ref_of(data))
    await node.images.put(GROUP, ref_of(data), data)
    assert await trainer.images.get(GROUP, ref_of(data)) == data


async def test_a_purge_in_the_middle_of_a_put_leaves_no_gap_in_the_image(
    open_role: OpenRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late sibling puts while its group is purged: it begins anew."""
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    data = image(4 * CHUNK_BYTES)
    store_after, num_calls = node.api.store_after, 0

    async def store_and_purge(*args: object, **named: object) -> object:
        nonlocal num_calls
        num_calls += 1
        stored = await store_after(*args, **named)  # type: ignore[arg-type]
        if num_calls == 2:
            await trainer.images.purge([GROUP], is_newest=is_newest)
        return stored

    monkeypatch.setattr(node.api, "store_after", store_and_purge)
    await node.images.put(GROUP, ref_of(data), data)

    assert await trainer.images.get(GROUP, ref_of(data)) == data
    assert await num_chunks(trainer) == 4


async def test_an_older_lineage_purges_and_sweeps_nothing(open_role: OpenRole) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    data = image(10)
    await node.images.put(GROUP, ref_of(data), data)

    await trainer.images.purge([GROUP], is_newest=is_not_newest)
    await trainer.images.sweep(lambda _: False, is_newest=is_not_newest)
    await trainer.images.clear(is_newest=is_not_newest)

    assert await trainer.images.get(GROUP, ref_of(data)) == data


async def test_orphans_are_swept_half_stored_and_forged_ones_too_and_what_is_live_stays(open_role: OpenRole) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    data = image(2 * CHUNK_BYTES)
    for group_id in (GROUP, "0-4-0"):
        await node.images.put(group_id, ref_of(data), data)
    await node.api.store(RUN.images("0-5-0", ref_of(data).sha256), data[:CHUNK_BYTES], headers={END_HEADER: "1048576"})
    await node.api.store("areal.test.images.nobody.nothing", b"x")

    swept = await trainer.images.sweep({GROUP, "0-9-0"}.__contains__, is_newest=is_newest)

    assert swept == ["0-4-0", "0-5-0", "nobody"]
    assert await trainer.images.groups() == [GROUP]
    assert await num_chunks(trainer) == 2


@pytest.mark.parametrize("name", ["eval-a$b", "a\x01b", "ä", "*", ">"])
async def test_what_no_group_is_called_ends_nobody_and_can_be_removed(open_role: OpenRole, name: str) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    await node.images.put(GROUP, ref_of(b"one"), b"one")
    await node.api.store(f"areal.test.images.{name}.x", b"x")

    assert await trainer.images.sweep(lambda _: False, is_newest=is_newest) == [GROUP]
    assert await num_chunks(trainer) == 1
    await trainer.images.clear(is_newest=is_newest)
    assert await num_chunks(trainer) == 0


@pytest.mark.parametrize("damage", ["a flipped bit", "a missing end", "more than its end", "another image"])
async def test_bytes_that_are_not_those_of_the_name_are_refused(open_role: OpenRole, damage: str) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    data = image(1000)
    forged = {
        "a flipped bit": bytes([data[0] ^ 1]) + data[1:],
        "a missing end": data[:-1],
        "more than its end": data + b"x",
        "another image": image(1000, seed=1),
    }[damage]
    await node.api.store(RUN.images(GROUP, ref_of(data).sha256), forged, headers={END_HEADER: "1000"})

    with pytest.raises(StoredImageError, match=f"image {ref_of(data).sha256} of group {GROUP}: got "):
        await trainer.images.get(GROUP, ref_of(data))


@pytest.mark.parametrize("said", ["", "x", "-1", "1001", "٣", "9" * 5000])
async def test_what_says_of_itself_no_end_is_not_gone_on_with(open_role: OpenRole, said: str) -> None:
    node = await open_role(Role.NODE)
    data = image(1000)
    await node.api.store(RUN.images(GROUP, ref_of(data).sha256), data[:10], headers={END_HEADER: said} if said else {})

    with pytest.raises(StoredImageError, match="what is stored under its name is none of ours"):
        await node.images.put(GROUP, ref_of(data), data)

    assert await num_chunks(node) == 1


async def test_a_file_is_not_stored_under_another_ones_name(open_role: OpenRole) -> None:
    node = await open_role(Role.NODE)

    with pytest.raises(AssertionError, match="are another file"):
        await node.images.put(GROUP, ref_of(b"one"), b"two")


async def test_a_full_stream_refuses_and_goes_on_where_it_stood_once_there_is_room(
    open_role: OpenRole, settings: Settings
) -> None:
    operator, node, trainer = [await open_role(role) for role in (Role.OPERATOR, Role.NODE, Role.TRAINER)]
    small = RolloutSettings(max_image_stream_bytes=MIN_IMAGE_STREAM_BYTES)
    await declare(operator, settings.model_copy(update={"rollout": small}))
    data, other, large = image(5 * CHUNK_BYTES), image(5 * CHUNK_BYTES, seed=1), image(7 * CHUNK_BYTES, seed=2)
    assert await node.images.has_room_to_admit()
    await node.images.put("0-1-0", ref_of(data), data)
    assert await node.images.has_room_to_admit()

    with pytest.raises(StreamFullError, match="maximum bytes exceeded"):
        await node.images.put(GROUP, ref_of(other), other)
    assert await num_chunks(node) == 7
    assert not await node.images.has_room_to_admit()
    with pytest.raises(UserError, match=r"got 7340032 bytes, need at most 6710886; raise rollout.max_image_stream_byt"):
        await node.images.put(GROUP, ref_of(large), large)
    await trainer.images.purge(["0-1-0"], is_newest=is_newest)
    await node.images.put(GROUP, ref_of(other), other)

    assert await trainer.images.get(GROUP, ref_of(other)) == other
    assert await num_chunks(node) == 5


async def test_the_least_stream_is_not_scarce_before_a_chunk_finds_no_room() -> None:
    assert MIN_IMAGE_STREAM_BYTES * (1 - images_module.SCARCE_SHARE) >= CHUNK_BYTES + MESSAGE_OVERHEAD_BYTES


async def test_a_stream_of_images_is_not_made_smaller_than_what_it_holds(
    open_role: OpenRole, settings: Settings
) -> None:
    operator, node = await open_role(Role.OPERATOR), await open_role(Role.NODE)
    data = image(9 << 20)
    await node.images.put(GROUP, ref_of(data), data)

    smaller = RolloutSettings(max_image_stream_bytes=MIN_IMAGE_STREAM_BYTES)
    with pytest.raises(UserError, match=r"rollout\.max_image_stream_bytes: got 8388608, need at least the 94"):
        await declare(operator, settings.model_copy(update={"rollout": smaller}))


async def test_a_chunk_is_stored_after_the_one_before_it_alone(open_role: OpenRole) -> None:
    """A compare-and-set on the image's subject: of two first chunks the second is refused."""
    node = await open_role(Role.NODE)
    subject = RUN.images(GROUP, "0" * 64)
    await node.api.store_after(0, RUN.images_stream, subject, b"x")

    with pytest.raises(ConflictError):
        await node.api.store_after(0, RUN.images_stream, subject, b"x")


async def test_no_more_is_read_of_an_image_than_it_can_have(
    open_role: OpenRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anyone who may store one may store any number of empty chunks."""
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    subject, num_read = RUN.images(GROUP, ref_of(b"image").sha256), 0
    for _ in range(3 * BATCH_MESSAGES):
        await node.api.store(subject, b"")
    read_batch = trainer.api.read_batch

    async def counted(*arguments: Any) -> list[Message]:
        nonlocal num_read
        batch = await read_batch(*arguments)
        num_read += len(batch)
        return batch

    monkeypatch.setattr(trainer.api, "read_batch", counted)

    with pytest.raises(StoredImageError, match="got 0 bytes, need 5"):
        await trainer.images.get(GROUP, ref_of(b"image"))
    assert num_read == BATCH_MESSAGES
