"""The doctor on real stores: what the broker or its files have lost is named to the last id, and nothing is changed."""

import fcntl
import hashlib
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec
import pytest

from areal_async.bus import Bus, EmbeddedBroker, HeldError, Role, copied_broker, declare, open_bus, order_rollback
from areal_async.bus.inspection import StoreCopy
from areal_async.config.settings import (
    BusSettings,
    DatasetSettings,
    RolloutSettings,
    RunSettings,
    Settings,
    TaskSettings,
)
from areal_async.doctor import Diagnosis, examine
from areal_async.doctor.audit import examination
from areal_async.doctor.audit.report import PromiseVerdict, Ruling, ViolationKind
from areal_async.errors import UserError
from areal_async.launch.run_directory import RunDirectory
from areal_async.monitor.snapshot import locked, read_status
from areal_async.protocol.publish_log import PublishLog
from areal_async.protocol.subjects import ADMITTED, ROLLBACK
from areal_async.protocol.types import Admitted, Outcome, OutcomeKind, Version
from areal_async.protocol.wire import decode_headers
from areal_async.rollout.backpressure import Backpressure
from areal_async.rollout.publish import Outbox
from areal_async.vision.images import Image
from tests.brokers import OpenRole
from tests.bus.stored import ref_of, ticket, trajectory

pytestmark = pytest.mark.anyio

NUM_GROUPS = 12
HANGS_S = 4.0
"""A broker that has not come up after so long hangs, as far as these tests go."""


class DeadRun(NamedTuple):
    """A run that nobody runs, and what its broker could read."""

    directory: Path
    stored: set[str]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_in(tmp_path)


def settings_in(tmp_path: Path) -> Settings:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"question": "{index}"}}\n' for index in range(NUM_GROUPS)))
    return Settings(
        run=RunSettings(name="test", directory=tmp_path),
        tasks=(TaskSettings(workflow="w.py", dataset=DatasetSettings(path=str(rows))),),
        rollout=RolloutSettings(group_size=2, min_group_size=2, batch_groups=2, max_stream_bytes=64 << 20),
        bus=BusSettings(operation_deadline_s=60.0, max_disk_bytes=8 << 30),
    )


async def produce(
    bus: Bus, receipts: PublishLog, group_id: str, *, siblings: tuple[int, ...] = (0, 1), image: bytes = b""
) -> None:
    """Store slots of a group in one message, as a node does."""
    outbox = Outbox(
        bus, ticket(group_id, group_size=2), producer="n.ab", num_expected=len(siblings), linger_s=10.0,
        backpressure=Backpressure(), publish_log=receipts,
    )  # fmt: skip
    refs, images = [ref_of(image)] if image else None, {ref_of(image).sha256: Image(image, 8, 8)}
    for sibling in siblings:
        outbox.put(trajectory(group_id, sibling, images=refs), images)
    await outbox.run()


async def produce_singly(bus: Bus, receipts: PublishLog, group_id: str) -> None:
    """Store both slots, each in its own message."""
    for sibling in (0, 1):
        await produce(bus, receipts, group_id, siblings=(sibling,))


@asynccontextmanager
async def operator_of(broker: EmbeddedBroker, settings: Settings) -> AsyncIterator[Bus]:
    async with open_bus(
        broker.url, names=settings.names, role=Role.OPERATOR, credentials=broker.credentials(Role.OPERATOR)
    ) as bus:
        yield bus


@pytest.fixture(scope="module")
def dead_runs(tmp_path_factory: pytest.TempPathFactory) -> DeadRun:
    """A run whose groups are stored and whose broker has stopped; each test has a copy, and damages that."""
    settings = settings_in(tmp_path_factory.mktemp("dead"))
    stored = anyio.run(make_dead_run, settings, backend_options={"use_uvloop": True})
    return DeadRun(settings.run_directory, stored)


@pytest.fixture
def stored(dead_runs: DeadRun, settings: Settings) -> set[str]:
    """The sample uids that are stored in the dead run of ``settings``."""
    shutil.copytree(dead_runs.directory, settings.run_directory)
    return dead_runs.stored


async def make_dead_run(settings: Settings) -> set[str]:
    """Store groups, stop the broker, and return what it could read."""
    broker = EmbeddedBroker(settings)
    await broker.start()
    try:
        async with operator_of(broker, settings) as bus:
            await declare(bus, settings)
            receipts = PublishLog(settings.run_directory, "n")
            for index in range(NUM_GROUPS):
                await produce(bus, receipts, f"0-{index}-0")
            return await readable(bus)
    finally:
        await broker.aclose()


async def delete(operator: Bus, group_id: str, *, sibling: int) -> None:
    """Delete the message with this slot, as somebody at the broker might."""
    names = operator.names
    subject = names.trajectories("w", group_id)
    for message in await operator.read_log(names.trajectories_stream, subject):
        stored = decode_headers(message.headers, sequence=message.sequence, num_bytes=0)
        if any(slot.sibling == sibling for slot in stored.slots):
            await operator.api.ask(f"$JS.API.STREAM.MSG.DELETE.{names.trajectories_stream}", {"seq": message.sequence})


async def readable(bus: Bus) -> set[str]:
    """The sample uids of every message that the broker can still read."""
    found = set()
    for message in await bus.read_log(bus.names.trajectories_stream, ">"):
        stored = decode_headers(message.headers, sequence=message.sequence, num_bytes=len(message.data))
        found |= {slot.sample_uid for slot in stored.slots}
    return found


def ruling(diagnosis: Diagnosis, promise: str) -> Ruling:
    return next(one for one in diagnosis.rulings if one.promise == promise)


def ids(diagnosis: Diagnosis, promise: str, kind: ViolationKind) -> list[str]:
    return sorted(one.id for one in ruling(diagnosis, promise).findings if one.kind is kind)


def digest(directory: Path) -> dict[str, str]:
    """Every file below a directory, and what it holds."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file()
    }


async def test_a_stored_trajectory_that_vanishes_from_a_live_run_is_named(
    broker: EmbeddedBroker, open_role: OpenRole, settings: Settings
) -> None:
    node, operator = await open_role(Role.NODE), await open_role(Role.OPERATOR)
    receipts = PublishLog(settings.run_directory, "n")
    for group_id in ("0-0-0", "0-1-0"):
        await produce_singly(node, receipts, group_id)
    before = await examine(settings, settings.run_directory, broker.url)

    await delete(operator, "0-1-0", sibling=1)

    assert before.is_live
    assert ruling(before, "P1").verdict is PromiseVerdict.PROVED
    after = await examine(settings, settings.run_directory, broker.url)
    assert ids(after, "P1", ViolationKind.LOST) == ["0-1-0.1.a"]
    assert after.slots["lost"] == 1
    assert not after.is_clean


async def test_an_order_to_go_back_that_nobody_has_carried_out_is_told_with_what_does(
    broker: EmbeddedBroker, open_role: OpenRole, settings: Settings
) -> None:
    operator = await open_role(Role.OPERATOR)
    order = await order_rollback(operator, Version(1, 2), by="ann", reason="it\n\x1b[31mdiverged")
    assert order is not None
    diagnosis = await examine(settings, settings.run_directory, broker.url)

    assert diagnosis.notes == [
        f"rollback to 1-2 is ordered (ann, {order.at}, it \\x1b[31mdiverged) and not carried out: "
        "the trainer that begins next does it; a newer order replaces it"
    ]
    status = await read_status(settings, operator, ask_live=locked(RunDirectory(settings.run_directory)))
    assert status.notes[-1] == diagnosis.notes[0].replace(
        "the trainer that begins next does it", "the run's next start does it, run test"
    )
    await operator.put(ROLLBACK, msgspec.structs.replace(order, lineage=2))
    assert not (await examine(settings, settings.run_directory, broker.url)).notes


async def test_what_was_settled_may_vanish(broker: EmbeddedBroker, open_role: OpenRole, settings: Settings) -> None:
    node, operator = await open_role(Role.NODE), await open_role(Role.OPERATOR)
    await produce(node, PublishLog(settings.run_directory, "n"), "0-1-0")
    await operator.publish(operator.names.outcomes, Outcome(group_id="0-1-0", kind=OutcomeKind.STALE, lineage=1))

    await delete(operator, "0-1-0", sibling=0)

    diagnosis = await examine(settings, settings.run_directory, broker.url)
    assert ruling(diagnosis, "P1").verdict is PromiseVerdict.PROVED
    assert diagnosis.slots["stale"] == 2


async def test_without_receipts_the_sibling_that_an_acked_ticket_promised_is_named(
    broker: EmbeddedBroker, open_role: OpenRole, settings: Settings, tmp_path: Path
) -> None:
    node, operator = await open_role(Role.NODE), await open_role(Role.OPERATOR)
    await operator.put(ADMITTED, Admitted(total=NUM_GROUPS, num_fresh=NUM_GROUPS))
    elsewhere = PublishLog(tmp_path / "another_host", "n")
    for index in range(NUM_GROUPS):
        await produce_singly(node, elsewhere, f"0-{index}-0")
    before = await examine(settings, settings.run_directory, broker.url)

    await delete(operator, "0-3-0", sibling=0)

    assert ruling(before, "P1").verdict is PromiseVerdict.UNDECIDED
    assert any(elsewhere.producer in missing for missing in ruling(before, "P1").missing)
    after = await examine(settings, settings.run_directory, broker.url)
    assert ids(after, "P1", ViolationKind.LOST) == ["0-3-0.0"]


async def test_an_admitted_prompt_that_nothing_remembers_is_a_hole(
    broker: EmbeddedBroker, open_role: OpenRole, settings: Settings
) -> None:
    node, operator = await open_role(Role.NODE), await open_role(Role.OPERATOR)
    controller = await open_role(Role.CONTROLLER)
    await operator.put(ADMITTED, Admitted(total=NUM_GROUPS, num_fresh=NUM_GROUPS))
    receipts = PublishLog(settings.run_directory, "n")
    await produce(node, receipts, "0-0-0")
    for index in range(2, NUM_GROUPS):
        await controller.publish(controller.names.tickets("w"), ticket(f"0-{index}-0", group_size=2))

    diagnosis = await examine(settings, settings.run_directory, broker.url)

    assert ids(diagnosis, "P7", ViolationKind.HOLE) == ["0-1-0"]
    assert ruling(diagnosis, "P1").verdict is PromiseVerdict.PROVED


def flip_a_payload(block: Path) -> None:
    data = bytearray(block.read_bytes())
    data[data.index(b"0-6-0", len(data) // 2) + 400] ^= 0xFF
    block.write_bytes(data)


def flip_without_index(block: Path) -> None:
    flip_a_payload(block)
    (block.parent / "index.db").unlink()


def flip_a_sequence(block: Path) -> None:
    """Of a record: four bytes of length, eight of sequence, eight of time, two of the subject's length, the subject."""
    data = bytearray(block.read_bytes())
    data[data.index(b"areal.test.trajectories.w.0-6-0") - 2 - 8 - 3] ^= 0xFF
    block.write_bytes(data)


def destroy_a_part(block: Path) -> None:
    data = block.read_bytes()
    third = len(data) // 3
    block.write_bytes(data[:third] + bytes(third) + data[2 * third :])


def truncate(block: Path) -> None:
    block.write_bytes(block.read_bytes()[: block.stat().st_size // 2])


async def test_a_dead_run_whose_files_are_whole_has_lost_nothing(settings: Settings, stored: set[str]) -> None:
    healthy = await examine(settings, settings.run_directory, "nats://127.0.0.1:1")

    assert ruling(healthy, "P1").verdict is PromiseVerdict.PROVED
    assert healthy.slots["in the broker"] == len(stored)
    assert not healthy.is_live


@pytest.mark.parametrize(
    "damage", [flip_a_payload, flip_without_index, flip_a_sequence, destroy_a_part, truncate, Path.unlink]
)
async def test_what_the_brokers_files_have_lost_is_counted_and_named_exactly(
    settings: Settings, stored: set[str], damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    left: set[str] = set()

    @asynccontextmanager
    async def looked_into(settings: Settings, directory: Path) -> AsyncIterator[StoreCopy]:
        async with copied_broker(settings, directory) as copy, operator_of(copy.broker, settings) as bus:
            left.update(await readable(bus))
            yield copy

    monkeypatch.setattr("areal_async.bus.server.START_DEADLINE_S", HANGS_S)
    monkeypatch.setattr(examination, "copied_broker", looked_into)
    (block,) = (settings.run_directory / "bus").rglob(f"{settings.names.trajectories_stream}/msgs/*.blk")
    damage(block)
    before = digest(settings.run_directory)

    diagnosis = await examine(settings, settings.run_directory, "nats://127.0.0.1:1")

    assert left < stored
    assert ids(diagnosis, "P1", ViolationKind.LOST) == sorted(stored - left)
    assert diagnosis.slots["lost"] == len(stored - left)
    assert digest(settings.run_directory) == before, "the run's own files were touched"


async def test_a_stream_that_the_broker_cannot_recover_is_left_out_and_all_in_it_is_lost(
    settings: Settings, stored: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.bus.server.START_DEADLINE_S", HANGS_S)
    for stream in (settings.names.trajectories_stream, settings.names.dead_stream):
        (metadata,) = (settings.run_directory / "bus").rglob(f"{stream}/meta.inf")
        metadata.write_bytes(b"")

    diagnosis = await examine(settings, settings.run_directory, "nats://127.0.0.1:1")

    assert ids(diagnosis, "P1", ViolationKind.LOST) == sorted(stored)
    for stream in (settings.names.trajectories_stream, settings.names.dead_stream):
        assert any(stream in note and "cannot recover" in note for note in diagnosis.notes)


async def test_a_payload_that_differs_from_what_its_producer_noted_is_lost(
    broker: EmbeddedBroker, open_role: OpenRole, settings: Settings
) -> None:
    node = await open_role(Role.NODE)
    receipts = PublishLog(settings.run_directory, "n")
    await produce(node, receipts, "0-0-0")
    await produce(node, receipts, "0-1-0")
    path = next((settings.run_directory / "produced").iterdir())
    first, second = path.read_text().splitlines()
    path.write_text(first.replace('"crc32":', '"crc32":1') + "\n" + second + "\n")

    diagnosis = await examine(settings, settings.run_directory, broker.url)

    assert ids(diagnosis, "P1", ViolationKind.LOST) == ["0-0-0.0.a", "0-0-0.1.a"]
    assert "its producer noted" in ruling(diagnosis, "P1").findings[0].text


async def test_a_trajectory_whose_image_is_gone_is_lost(
    broker: EmbeddedBroker, open_role: OpenRole, settings: Settings
) -> None:
    node, operator = await open_role(Role.NODE), await open_role(Role.OPERATOR)
    receipts = PublishLog(settings.run_directory, "n")
    for group_id in ("0-0-0", "0-1-0"):
        await node.images.put(group_id, ref_of(b"image"), b"image")
        await produce(node, receipts, group_id, image=b"image")
    before = await examine(settings, settings.run_directory, broker.url)

    await operator.api.ask(
        f"$JS.API.STREAM.PURGE.{operator.names.images_stream}", {"filter": operator.names.images("0-1-0", "*")}
    )

    assert ruling(before, "P1").verdict is PromiseVerdict.PROVED
    after = await examine(settings, settings.run_directory, broker.url)
    assert ids(after, "P1", ViolationKind.LOST) == ["0-1-0.0.a", "0-1-0.1.a"]
    assert "of group 0-1-0: got 0 bytes, need 5" in ruling(after, "P1").findings[0].text
    await operator.api.ask(f"$JS.API.STREAM.DELETE.{operator.names.images_stream}")
    without = await examine(settings, settings.run_directory, broker.url)
    assert len(ids(without, "P1", ViolationKind.LOST)) == 4


async def test_an_entry_of_the_log_that_cannot_be_read_is_told_of_and_left_where_it_is(
    broker: EmbeddedBroker, open_role: OpenRole, settings: Settings
) -> None:
    operator = await open_role(Role.OPERATOR)
    await operator.publish(operator.names.cuts, b"no cut")

    diagnosis = await examine(settings, settings.run_directory, broker.url)

    (note,) = diagnosis.notes
    assert f"a message on {operator.names.cuts} cannot be read" in note
    assert (await operator.stream_state(operator.names.dead_stream)).num_messages == 0


async def test_a_store_that_another_process_holds_is_refused_by_its_name(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.doctor.audit.examination.CONNECT_DEADLINE_S", 0.2)
    bus = settings.run_directory / "bus"
    (bus / "jetstream").mkdir(parents=True)
    credentials = settings.run_directory / "credentials"
    credentials.mkdir(mode=0o700)
    key = credentials / "operator.nk"
    key.write_text("SUAIBDPBAUTWCWBKIO6XHQNINK5FWJW4OHLXC3HQ2KFE4PEJUA44CNHTC4")
    key.chmod(0o600)
    with (bus / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4711")
        lock.flush()

        with pytest.raises(HeldError, match="held by process 4711"):
            async with copied_broker(settings, settings.run_directory):
                pass
        with pytest.raises(UserError, match="held by process 4711.*not reachable"):
            await examine(settings, settings.run_directory, "nats://127.0.0.1:1")


async def test_a_run_without_a_store_is_a_users_mistake(settings: Settings) -> None:
    with pytest.raises(UserError, match="there is none"):
        await examine(settings, settings.run_directory, "nats://127.0.0.1:1")


async def test_a_stream_whose_files_are_gone_is_told_of(settings: Settings, stored: set[str]) -> None:
    (stream,) = (settings.run_directory / "bus").rglob(settings.names.trajectories_stream)
    shutil.rmtree(stream)

    diagnosis = await examine(settings, settings.run_directory, "nats://127.0.0.1:1")

    assert ids(diagnosis, "P1", ViolationKind.LOST) == sorted(stored)
    assert settings.names.trajectories_stream in diagnosis.notes[0]
