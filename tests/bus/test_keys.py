"""Of writers that race for a key exactly one wins, each knows whether it did, and readers see every last value."""

import anyio
import msgspec
import pytest

from areal_async.bus import MOST_TIMES, Bus, EmbeddedBroker, Role
from areal_async.bus.connection import CONNECT_TRY_S, MAX_OUTSTANDING_PINGS, PING_INTERVAL_S, RECONNECT_WAIT_S
from areal_async.bus.keys import HISTORY, WHOLE_S, _View
from areal_async.bus.log import Attention
from areal_async.bus.streams import forget_nodes
from areal_async.controller.processes.failure_detector import LOST_S
from areal_async.errors import ConflictError, WireError
from areal_async.protocol.run_state import ServerState
from areal_async.protocol.subjects import ADMITTED, LINEAGE
from areal_async.protocol.types import Admitted, LineageRecord, WeightsVersion
from areal_async.rollout.metrics import INTERVAL_S
from tests.brokers import PATIENCE_S, OpenRole, kill, until

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]


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
    assert await node.keys(ADMITTED, "server.") == [ADMITTED, "server.s0", "server.s2"]
    assert await node.keys("server.s2") == ["server.s2"]
    assert await node.entries("weights.", ServerState) == {}
    assert await node.records({"server.": ServerState, ADMITTED: Admitted, "absent": Admitted, "none.": Admitted}) == {
        "server.s0": states[0],
        "server.s2": states[2],
        ADMITTED: Admitted(),
    }
    assert await node.records({"absent": Admitted}) == {}


async def test_entries_asked_for_again_are_read_as_far_as_they_have_changed(
    open_role: OpenRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, node = await open_role(Role.OPERATOR), await open_role(Role.NODE)

    def state(server_id: str, version: str = "") -> ServerState:
        return ServerState(server_id=server_id, node_id="n", url="", version=version)

    for server_id in "abcd":
        await node.put(f"server.{server_id}", state(server_id))
    first = await node.entries("server.", ServerState)
    assert [value.server_id for value, _ in first.values()] == list("abcd")
    assert await node.entries("server.", ServerState) == first

    revision = await node.put("server.b", state("b", "1-2"))
    await operator.delete("server.c")
    await node.put("server.e", state("e"))
    monkeypatch.setattr(node.api, "read_last_of_each", None)  # all of them are not asked for
    second = await node.entries("server.", ServerState)

    assert second == await (await open_role(Role.NODE, "1")).entries("server.", ServerState)
    assert second["server.b"] == (state("b", "1-2"), revision)
    assert sorted(second) == ["server.a", "server.b", "server.d", "server.e"]


async def test_entries_that_were_purged_are_missed_at_the_next_whole_look(
    open_role: OpenRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, node = await open_role(Role.OPERATOR), await open_role(Role.NODE)
    await node.put("server.a", ServerState(server_id="a", node_id="n", url="", version=""))
    assert await node.entries("server.", ServerState)

    await forget_nodes(operator)
    monkeypatch.setattr("areal_async.bus.keys._View.is_over", lambda *_: True)

    assert await node.entries("server.", ServerState) == {}


async def test_the_more_keys_there_are_the_more_seldom_all_of_them_are_read() -> None:
    few, many = _View(num_losses=0), _View(num_losses=0)
    few.entries, many.entries = {"a": (None, 1)}, {str(number): (None, 1) for number in range(1_000)}
    for view in (few, many):
        view._began_at -= 2 * WHOLE_S

    assert few.is_over(num_losses=0)
    assert not many.is_over(num_losses=0)
    assert many.is_over(num_losses=1)


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
    key = reader.names.weights_key()
    await writer.put(key, LineageRecord(lineage=1))
    watch = reader.watch_key(key, LineageRecord)

    with anyio.fail_after(PATIENCE_S):
        assert (await anext(watch)).lineage == 1
        kill(broker)
        await writer.put(key, LineageRecord(lineage=2))
        assert (await anext(watch)).lineage == 2


async def test_a_watcher_does_not_look_again_for_what_it_has_just_found(open_role: OpenRole) -> None:
    trainer, node = await open_role(Role.TRAINER), await open_role(Role.NODE)
    key = trainer.names.weights_key()
    await trainer.put(key, WeightsVersion(version="1-0", path="/w"))
    watch = node.watch_key(key, WeightsVersion, poll_s=10 * PATIENCE_S)
    assert (await anext(watch)).version == "1-0"
    num_sent = node.connection.client.stats["out_msgs"]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anext, watch)
        await anyio.wait_all_tasks_blocked()
        assert node.connection.client.stats["out_msgs"] == num_sent
        tasks.cancel_scope.cancel()
    await trainer.put(key, WeightsVersion(version="1-1", path="/w"))

    assert (await anext(watch)).version == "1-1"


async def test_a_connection_that_is_slowed_down_pings_and_looks_more_seldom(open_role: OpenRole) -> None:
    node = await open_role(Role.NODE)
    watching = Attention(node.api, "somewhere", 3.0)

    node.connection.slow_down(2.0)

    assert node.connection.client.options["ping_interval"] == 2 * PING_INTERVAL_S
    assert watching._poll_s == 6.0


async def test_a_node_is_back_from_a_dead_connection_before_it_is_taken_for_lost(open_role: OpenRole) -> None:
    node = await open_role(Role.NODE)
    node.connection.slow_down(MOST_TIMES)
    between_s = node.connection.client.options["ping_interval"]

    told_s = (MAX_OUTSTANDING_PINGS + 1) * between_s + RECONNECT_WAIT_S + CONNECT_TRY_S
    assert INTERVAL_S * MOST_TIMES + told_s < LOST_S  # it may have been about to speak


async def test_a_watcher_of_a_key_that_does_not_exist_waits_for_it(open_role: OpenRole) -> None:
    writer, reader = await open_role(Role.TRAINER), await open_role(Role.NODE)
    key = reader.names.weights_key()
    seen: list[int] = []

    async def watch() -> None:
        seen.append((await anext(reader.watch_key(key, LineageRecord, poll_s=10 * PATIENCE_S))).lineage)

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await anyio.wait_all_tasks_blocked()
            assert not seen
            await writer.put(key, LineageRecord(lineage=7))

    assert seen == [7]


async def test_no_number_of_unreadable_values_displaces_the_last_good_one_for_those_who_knew_it(
    open_role: OpenRole,
) -> None:
    """As many as are kept, and one more: an answer of the broker, sent to the key by who asked for it."""
    operator, controller, node = [await open_role(role) for role in (Role.OPERATOR, Role.CONTROLLER, Role.NODE)]
    await controller.put(ADMITTED, Admitted(total=6))
    await node.get(ADMITTED, Admitted)
    revision = await controller.compare_and_set(ADMITTED, Admitted(total=7), (await node.get(ADMITTED, Admitted))[1])
    assert (await node.get(ADMITTED, Admitted))[0] == Admitted(total=7)

    for _ in range(HISTORY + 1):
        body = msgspec.json.encode({"seq": 999})
        subject = f"$JS.API.DIRECT.GET.{controller.names.outcomes_stream}"
        await operator.connection.publish(subject, body, reply=f"$KV.{controller.names.bucket}.{ADMITTED}")
    await until(lambda: _has_revision(operator, revision + HISTORY + 1))

    for bus in (controller, node):
        assert await bus.get(ADMITTED, Admitted) == (Admitted(total=7), revision + HISTORY + 1)
        assert await bus.records({ADMITTED: Admitted}) == {ADMITTED: Admitted(total=7)}
    with pytest.raises(WireError, match=r"admitted: got 16 values that cannot be read; put one by hand"):
        await (await open_role(Role.CONTROLLER, "1")).get(ADMITTED, Admitted)
    await controller.compare_and_set(ADMITTED, Admitted(total=8), revision + HISTORY + 1)
    assert (await (await open_role(Role.CONTROLLER, "1")).get(ADMITTED, Admitted))[0] == Admitted(total=8)


async def test_a_nodes_key_that_cannot_be_read_stands_for_who_knew_it_and_is_written_anew(open_role: OpenRole) -> None:
    node, controller, other = await open_role(Role.NODE), await open_role(Role.CONTROLLER), await open_role(Role.NODE)
    state, key = ServerState(server_id="s", node_id="n", url="u", version="1-0"), node.names.server_key("s")
    await node.put(key, state)
    await controller.get(key, ServerState)

    await node.publish(f"$KV.{node.names.nodes_bucket}.{key}", b"none")

    assert (await controller.get(key, ServerState))[0] == state
    nothing, revision = await other.get(key, ServerState)
    assert nothing is None
    await other.compare_and_set(key, state, revision)
    assert (await other.get(key, ServerState))[0] == state


async def _has_revision(bus: Bus, revision: int) -> bool:
    last = await bus.get_last(f"KV_{bus.names.bucket}", f"$KV.{bus.names.bucket}.{ADMITTED}")
    return last is not None and last.sequence == revision
