"""A start reads a snapshot and the log's tail, and comes to what the whole log says; a bad one costs the whole log."""

from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog

from areal_async.bus import Bus, JournalSnapshots, Role, snapshots
from areal_async.config.settings import BusSettings, EvalSettings, RolloutSettings, RunSettings, Settings
from areal_async.controller.accounts import Accounts
from areal_async.controller.controller import Controller
from areal_async.controller.tasks import Tasks
from areal_async.protocol.journal import Journal
from areal_async.protocol.run_state import ServerState, Snapshot
from areal_async.protocol.subjects import ACCOUNTS, ADMITTED, JOURNAL
from areal_async.protocol.types import Admitted, Cut, CutGroup, CutKind, Outcome, OutcomeKind, Ticket, WeightsVersion
from areal_async.rollout.settled import SettledGroups
from areal_async.trainer.batch.lineage import Lineage
from areal_async.trainer.batch.reader import JournalReader
from tests.brokers import PATIENCE_S, OpenRole, until

pytestmark = pytest.mark.anyio

NUM_STEPS = 12
EVERY = 8


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        run=RunSettings(name="test", directory=tmp_path, steps=100),
        rollout=RolloutSettings(group_size=1, min_group_size=1, batch_groups=64, max_staleness=1),
        eval=EvalSettings(every_steps=0),
        bus=BusSettings(operation_deadline_s=60.0, max_disk_bytes=8 << 30),
    )


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "EVERY", EVERY)


@pytest.fixture
async def trainer(open_role: OpenRole) -> Bus:
    """The trainer of a run whose log has 12 steps of two groups, one in three of which fails, and 3 bad entries."""
    bus = await open_role(Role.TRAINER)
    await bus.publish(bus.names.cuts, Cut(kind=CutKind.BEGIN, lineage=1, step=0))
    for step in range(1, NUM_STEPS + 1):
        names = [f"0-{2 * step + offset}-0" for offset in range(2)]
        groups = [CutGroup(group_id=name, workflow="w", slots=[]) for name in names]
        await bus.publish(bus.names.cuts, Cut(lineage=1, step=step, groups=groups))
        for number, name in enumerate(names):
            kind = OutcomeKind.FAILED if (step + number) % 3 == 0 else OutcomeKind.TRAINED
            await bus.publish(bus.names.outcomes, Outcome(group_id=name, kind=kind, lineage=1, step=step))
        if step % 4 == 0:
            await bus.publish(bus.names.outcomes, b"no outcome")
    await bus.publish(bus.names.cuts, Cut(lineage=1, step=NUM_STEPS + 1, groups=groups[:1]))
    return bus


async def num_entries(bus: Bus) -> int:
    return (await bus.stream_state(bus.names.outcomes_stream)).last_sequence


async def read(bus: Bus, *, keeps_snapshots: bool = False, own_step: int = 99) -> JournalReader:
    """Read the log to its end, as a rank does that starts."""
    reader = JournalReader(bus, lineage=9, restored_step=own_step, keeps_snapshots=keeps_snapshots)
    async with anyio.create_task_group() as loops:
        loops.start_soon(reader.run)
        with anyio.fail_after(PATIENCE_S):
            await reader.read_through(await num_entries(bus))
        loops.cancel_scope.cancel()
    return reader


class Counted:
    """How many of the log's entries a process has read in batches."""

    def __init__(self, bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num = 0
        read_batch = bus.api.read_batch

        async def counting(stream: str, subject: str, start_sequence: int) -> list[Any]:
            batch = await read_batch(stream, subject, start_sequence)
            self.num += len(batch)
            return batch

        monkeypatch.setattr(bus.api, "read_batch", counting)


async def whole(bus: Bus) -> Journal:
    """What all of the log says."""
    lineage = Lineage(bus, number=9, checkpoint=None)
    return await lineage.read_log(is_whole=True)


async def test_a_start_reads_the_snapshot_and_the_tail_alone(
    trainer: Bus, open_role: OpenRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await read(trainer, keeps_snapshots=True)
    snapshot, _ = await trainer.get(JOURNAL, Snapshot)
    assert snapshot is not None
    tail = await num_entries(trainer) - snapshot.sequence
    assert 0 < tail < EVERY

    counted = Counted(trainer, monkeypatch)
    second = await read(trainer)

    assert counted.num == tail
    assert second.journal.state() == first.journal.state()
    assert second.journal.cuts == first.journal.cuts
    assert set((await whole(trainer)).settled) == set(second.journal.settled)


async def test_a_lineage_follows_the_last_entry_that_a_snapshot_stands_for(
    trainer: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await read(trainer, keeps_snapshots=True)
    counted = Counted(trainer, monkeypatch)

    lineage = await Lineage.take(trainer)
    await lineage.read_log()

    assert counted.num < EVERY
    assert await lineage.write_begin() == await num_entries(trainer)


async def test_a_node_asks_the_snapshot_what_is_settled(
    trainer: Bus, open_role: OpenRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    await read(trainer, keeps_snapshots=True)
    node = await open_role(Role.NODE)
    counted = Counted(node, monkeypatch)
    tickets = [Ticket(group_id=f"0-{index}-0", workflow="w", row={}, group_size=1, version="1-0") for index in (2, 99)]

    settled = SettledGroups(node)

    assert await settled.among(tickets) == {"0-2-0"}
    assert await settled.among(tickets) == {"0-2-0"}
    assert counted.num < EVERY


async def _damage_state(bus: Bus, snapshot: Snapshot) -> object:
    damaged = snapshot.state[:-1] + bytes([snapshot.state[-1] ^ 1])  # a number that is as good as the other
    return await bus.put(JOURNAL, Snapshot(**{**_fields(snapshot), "state": damaged}))


async def _name_another_entry(bus: Bus, snapshot: Snapshot) -> object:
    return await bus.put(JOURNAL, Snapshot(**{**_fields(snapshot), "entry_sha256": "0" * 64}))


async def _go_beyond_the_log(bus: Bus, snapshot: Snapshot) -> object:
    return await bus.put(JOURNAL, Snapshot(**{**_fields(snapshot), "sequence": 10_000}))


async def _stand_for_no_entry(bus: Bus, snapshot: Snapshot) -> object:
    return await bus.put(JOURNAL, Snapshot(**{**_fields(snapshot), "sequence": 0}))


async def _hold_something_else(bus: Bus, snapshot: Snapshot) -> object:
    entry = await bus.get_message(bus.names.outcomes_stream, snapshot.sequence)
    assert entry is not None
    return await snapshots.Snapshots(bus, JOURNAL).save(entry, b"\x93\x01\x02\x03")


def _fields(snapshot: Snapshot) -> dict[str, Any]:
    return {name: getattr(snapshot, name) for name in snapshot.__struct_fields__}


@pytest.mark.parametrize(
    "damage", [_damage_state, _name_another_entry, _go_beyond_the_log, _stand_for_no_entry, _hold_something_else]
)
async def test_the_whole_log_is_read_in_the_place_of_a_bad_snapshot(
    damage: Any, trainer: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await read(trainer, keeps_snapshots=True)
    snapshot, _ = await trainer.get(JOURNAL, Snapshot)
    await damage(trainer, snapshot)
    counted = Counted(trainer, monkeypatch)

    with structlog.testing.capture_logs() as logged:
        second = await read(trainer, keeps_snapshots=True)

    assert [line["instead"] for line in logged if line["event"] == "snapshot.refused"] == ["the whole log is read"]
    assert counted.num == await num_entries(trainer)
    assert second.journal.state() == first.journal.state()
    third, sequence = await JournalSnapshots(trainer).load_journal()
    assert sequence  # a good one has taken its place
    assert len(third.settled) > 0


async def test_who_goes_back_before_the_snapshots_checkpoint_reads_the_whole_log(
    trainer: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await read(trainer, keeps_snapshots=True)
    counted = Counted(trainer, monkeypatch)

    reader = await read(trainer, own_step=3)

    assert counted.num == await num_entries(trainer)
    assert 4 in reader.journal.cuts


async def test_an_older_writer_does_not_replace_a_newer_snapshot(trainer: Bus) -> None:
    older, newer = JournalSnapshots(trainer), JournalSnapshots(trainer)
    journal, _ = await older.load_journal()
    await newer.load_journal()
    entries = await trainer.read_log(trainer.names.outcomes_stream, trainer.names.log)

    await newer.offer(entries[20], journal)
    await older.offer(entries[10], journal)

    snapshot, _ = await trainer.get(JOURNAL, Snapshot)
    assert snapshot is not None
    assert snapshot.sequence == entries[20].sequence


@pytest.fixture
async def controlled(trainer: Bus, open_role: OpenRole) -> Bus:
    """A controller's bus, in a run that has admitted what the log tells of."""
    await trainer.put(trainer.names.weights_key(), WeightsVersion(version="1-0", path="x"))
    node = await open_role(Role.NODE)
    await node.put(node.names.server_key("s"), ServerState(server_id="s", node_id="n", url="", version="1-0"))
    controller = await open_role(Role.CONTROLLER)
    await controller.put(ADMITTED, Admitted(total=40, num_fresh=40))
    return controller


async def _controlling(bus: Bus, settings: Settings) -> tuple[Controller, Accounts]:
    """Let a controller run until it waits for the next entry of the log."""
    accounts = Accounts(max_groups_in_flight=1)
    controller = Controller(bus, settings, Tasks([("w", [{}] * 100)]), None, accounts=accounts)
    async with anyio.create_task_group() as loops:
        loops.start_soon(controller.run)
        await until(lambda: controller.waits_for.startswith("a credit"))
        sequence = await num_entries(bus)
        for _ in range(EVERY):
            late = Outcome(group_id="0-2-0", kind=OutcomeKind.LATE, lineage=1)
            sequence = (await bus.publish(bus.names.outcomes, late)).sequence
        await until(lambda: controller._log_sequence >= sequence)
        loops.cancel_scope.cancel()
    return controller, accounts


async def test_a_controller_that_starts_has_the_books_of_the_one_before(
    controlled: Bus, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, before = await _controlling(controlled, settings)
    snapshot, _ = await controlled.get(ACCOUNTS, Snapshot)
    assert snapshot is not None
    tail = await num_entries(controlled) - snapshot.sequence
    counted = Counted(controlled, monkeypatch)

    _, after = await _controlling(controlled, settings)

    assert counted.num == tail + EVERY
    assert (after.num_settled, len(after.readmissions)) == (before.num_settled, len(before.readmissions))
    state, expected = after.state(), before.state()
    assert state is not None
    assert expected is not None
    assert state.journal.settled == expected.journal.settled
    assert (state.readmitted, state.cuts) == (expected.readmitted, expected.cuts)
