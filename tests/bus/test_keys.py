"""Of writers that race for a key exactly one wins, each knows whether it did, and readers see every last value."""

import anyio
import pytest

from areal_async.bus import Bus, EmbeddedBroker, Role
from areal_async.errors import ConflictError
from areal_async.run_state import ServerState
from areal_async.subjects import ADMITTED, LINEAGE
from areal_async.types import Admitted, LineageRecord
from tests.brokers import PATIENCE_S, OpenRole, kill
from tests.loops import on_both_loops

pytestmark = pytest.mark.anyio
anyio_backend = on_both_loops


async def test_a_key_has_no_revision_before_it_is_set_and_keeps_one_after_it_is_deleted(open_role: OpenRole) -> None:
    bus = await open_role(Role.OPERATOR)

    assert await bus.get(ADMITTED, Admitted) == (None, 0)
    revision = await bus.put(ADMITTED, Admitted(total=1))
    assert await bus.get(ADMITTED, Admitted) == (Admitted(total=1), revision)
    await bus.delete(ADMITTED)
    gone, deleted_at = await bus.get(ADMITTED, Admitted)
    assert gone is None
    assert deleted_at > revision
    await bus.compare_and_set(ADMITTED, Admitted(total=2), deleted_at)
    assert (await bus.get(ADMITTED, Admitted))[0] == Admitted(total=2)


async def test_create_refuses_an_existing_key_and_takes_a_deleted_one(open_role: OpenRole) -> None:
    bus = await open_role(Role.OPERATOR)
    await bus.create(LINEAGE, LineageRecord(lineage=1))

    with pytest.raises(ConflictError):
        await bus.create(LINEAGE, LineageRecord(lineage=1))

    await bus.delete(LINEAGE)
    await bus.create(LINEAGE, LineageRecord(lineage=2))


async def test_of_two_that_take_the_same_lineage_with_the_same_bytes_one_conflicts(open_role: OpenRole) -> None:
    first, second = await open_role(Role.TRAINER, "0"), await open_role(Role.TRAINER, "1")
    won: list[Bus] = []

    async def take(bus: Bus) -> None:
        try:
            await bus.compare_and_set(LINEAGE, LineageRecord(lineage=1), 0)
        except ConflictError:
            return
        won.append(bus)

    async with anyio.create_task_group() as race:
        race.start_soon(take, first)
        race.start_soon(take, second)

    assert len(won) == 1


async def test_counting_by_compare_and_set_misses_and_repeats_nothing_over_kills_of_the_broker(
    broker: EmbeddedBroker, open_role: OpenRole
) -> None:
    num_won = 0

    async def count(bus: Bus) -> None:
        nonlocal num_won
        for _ in range(40):
            old, revision = await bus.get(ADMITTED, Admitted)
            try:
                await bus.compare_and_set(ADMITTED, Admitted(total=(old.total if old else 0) + 1), revision)
            except ConflictError:
                continue
            num_won += 1
            if num_won in (10, 30):
                kill(broker)

    async with anyio.create_task_group() as counters:
        for instance in "012":
            counters.start_soon(count, await open_role(Role.CONTROLLER, instance))

    bus = await open_role(Role.CONTROLLER)
    assert num_won >= 40
    assert (await bus.get(ADMITTED, Admitted))[0] == Admitted(total=num_won)


async def test_entries_and_keys_are_found_by_prefix(open_role: OpenRole) -> None:
    node, operator = await open_role(Role.NODE), await open_role(Role.OPERATOR)
    await operator.put(ADMITTED, Admitted())
    states = [ServerState(server_id=f"s{n}", node_id="n", url="u", version="1-0") for n in range(3)]
    for state in states:
        await node.put(node.names.server_key(state.server_id), state)
    await node.delete(node.names.server_key("s1"))

    assert [state for state, _ in (await node.entries("server.", ServerState)).values()] == [states[0], states[2]]
    assert await node.keys() == [ADMITTED, "server.s0", "server.s2"]
    assert await node.keys("server.s2") == ["server.s2"]
    assert await node.entries("weights.", ServerState) == {}
    assert await node.records({"server.": ServerState, ADMITTED: Admitted, "absent": Admitted, "none.": Admitted}) == {
        "server.s0": states[0],
        "server.s2": states[2],
        ADMITTED: Admitted(),
    }
    assert await node.records({"absent": Admitted}) == {}


async def test_entries_are_found_however_many_there_are(open_role: OpenRole, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_async.bus.log.BATCH_MESSAGES", 3)
    node = await open_role(Role.NODE)
    states = [ServerState(server_id=f"s{n}", node_id="n", url="u", version="1-0") for n in range(9)]
    for state in [*states, states[0]]:
        await node.put(node.names.server_key(state.server_id), state)

    found = await node.entries("server.", ServerState)

    assert [state for state, _ in found.values()] == [*states[1:], states[0]]
    assert found["server.s0"][1] == 10


async def test_a_watcher_sees_the_present_value_and_the_newest_after_the_broker_was_killed(
    broker: EmbeddedBroker, open_role: OpenRole
) -> None:
    writer, reader = await open_role(Role.TRAINER), await open_role(Role.NODE)
    await writer.put(LINEAGE, LineageRecord(lineage=1))
    watch = reader.watch_key(LINEAGE, LineageRecord)

    with anyio.fail_after(PATIENCE_S):
        assert (await anext(watch)).lineage == 1
        kill(broker)
        await writer.put(LINEAGE, LineageRecord(lineage=2))
        assert (await anext(watch)).lineage == 2


async def test_a_watcher_of_a_key_that_does_not_exist_waits_for_it(open_role: OpenRole) -> None:
    writer, reader = await open_role(Role.TRAINER), await open_role(Role.NODE)
    seen: list[int] = []

    async def watch() -> None:
        seen.append((await anext(reader.watch_key(LINEAGE, LineageRecord, poll_s=10 * PATIENCE_S))).lineage)

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await anyio.wait_all_tasks_blocked()
            assert not seen
            await writer.put(LINEAGE, LineageRecord(lineage=7))

    assert seen == [7]
