"""A message whose publish returned is stored, exactly once, whatever happens to the broker (P1)."""

import os
import signal
from pathlib import Path

import anyio
import pytest

from areal_async.bus import EmbeddedBroker, Role
from areal_async.config.settings import BusSettings, RolloutSettings, RunSettings, Settings
from areal_async.errors import BusError, ConflictError, StreamFullError
from areal_async.protocol.types import Outcome, OutcomeKind
from tests.brokers import PATIENCE_S, OpenRole, freeze, kill

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]
MAX_STREAM_BYTES = 1 << 20


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        run=RunSettings(name="test", directory=tmp_path),
        rollout=RolloutSettings(max_stream_bytes=MAX_STREAM_BYTES, max_trajectory_bytes=1 << 15),
        bus=BusSettings(operation_deadline_s=60.0, max_disk_bytes=8 << 30),
    )


async def test_every_acknowledged_id_is_stored_once_over_kills_of_the_broker(
    broker: EmbeddedBroker, open_role: OpenRole
) -> None:
    bus = await open_role(Role.CONTROLLER)
    num_published = 0

    async def publish(worker: int) -> None:
        nonlocal num_published
        for index in range(25):
            await bus.publish(bus.names.outcomes, b"x", msg_id=f"{worker}-{index}")
            num_published += 1
            if num_published in (30, 80, 130):
                kill(broker)

    async with anyio.create_task_group() as publishers:
        for worker in range(8):
            publishers.start_soon(publish, worker)

    stored = [message.headers["Nats-Msg-Id"] for message in await bus.read_log(bus.names.outcomes_stream, ">")]
    assert sorted(stored) == sorted(f"{worker}-{index}" for worker in range(8) for index in range(25))


async def test_the_same_id_is_stored_once_and_told_as_duplicate(open_role: OpenRole) -> None:
    bus = await open_role(Role.NODE)
    subject = bus.names.trajectories("gsm8k", "0-1-0")

    first = await bus.publish(subject, b"a", msg_id="one")
    second = await bus.publish(subject, b"a", msg_id="one")

    assert (first.is_duplicate, second.is_duplicate) == (False, True)
    assert first.sequence == second.sequence
    assert (await bus.stream_state(bus.names.trajectories_stream)).num_messages == 1


async def test_a_full_stream_refuses_at_once_and_takes_again_after_an_ack(open_role: OpenRole) -> None:
    node, operator = await open_role(Role.NODE), await open_role(Role.OPERATOR)
    subject = node.names.trajectories("gsm8k", "0-1-0")
    await operator.api.ask(
        f"$JS.API.CONSUMER.CREATE.{node.names.trajectories_stream}.trainer-1",
        {
            "stream_name": node.names.trajectories_stream,
            "config": {"name": "trainer-1", "durable_name": "trainer-1", "ack_policy": "explicit"},
        },
    )

    for _ in range(MAX_STREAM_BYTES // 101_000):
        await node.publish(subject, bytes(100_000))
    with anyio.fail_after(PATIENCE_S), pytest.raises(StreamFullError, match="exceeded"):
        await node.publish(subject, bytes(100_000))

    async with operator.consume(node.names.trajectories_stream, "trainer-1") as inbox:
        assert not await operator.settle(await inbox.fetch(5, wait_s=PATIENCE_S))
    await node.publish(subject, bytes(100_000))


async def test_an_entry_is_stored_only_after_the_one_it_names(open_role: OpenRole) -> None:
    bus = await open_role(Role.TRAINER)
    outcome = Outcome(group_id="0-0-0", kind=OutcomeKind.STALE, lineage=1)
    await bus.publish(bus.names.outcomes, outcome)

    first = await bus.publish(bus.names.cuts, b"1", expected_last_subject_sequence=0)
    await bus.publish(bus.names.outcomes, outcome)
    second = await bus.publish(bus.names.cuts, b"2", expected_last_subject_sequence=first.sequence)

    assert second.sequence > first.sequence
    with pytest.raises(ConflictError):
        await bus.publish(bus.names.cuts, b"other", expected_last_subject_sequence=first.sequence)


async def test_repeating_an_entry_whose_answer_was_lost_is_a_duplicate_not_a_conflict(open_role: OpenRole) -> None:
    bus = await open_role(Role.TRAINER)
    first = await bus.publish(bus.names.cuts, b"1", msg_id="mine", expected_last_subject_sequence=0)
    await bus.publish(bus.names.cuts, b"2", expected_last_subject_sequence=first.sequence)

    again = await bus.publish(bus.names.cuts, b"1", msg_id="mine", expected_last_subject_sequence=0)

    assert again == (first.sequence, True)


async def test_a_message_over_the_limit_is_refused_and_the_connection_lives_on(open_role: OpenRole) -> None:
    bus = await open_role(Role.NODE)
    subject = bus.names.trajectories("gsm8k", "0-1-0")

    with pytest.raises(BusError, match="need at most"):
        await bus.publish(subject, bytes(9 << 20))

    await bus.publish(subject, b"small")


async def test_a_request_in_flight_is_repeated_as_soon_as_the_connection_is_lost(
    broker: EmbeddedBroker, open_role: OpenRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.bus.api.TRY_DEADLINE_S", 1000.0)
    bus = await open_role(Role.CONTROLLER)
    await freeze(broker)

    async with anyio.create_task_group() as publisher:
        publisher.start_soon(bus.publish, bus.names.outcomes, b"x")
        await anyio.wait_all_tasks_blocked()
        kill(broker)

    assert (await bus.stream_state(bus.names.outcomes_stream)).num_messages == 1


async def test_without_a_broker_an_operation_ends_at_its_deadline(broker: EmbeddedBroker, open_role: OpenRole) -> None:
    bus = await open_role(Role.CONTROLLER)
    bus.api.operation_deadline_s = 0.5
    await freeze(broker)

    with anyio.fail_after(PATIENCE_S), pytest.raises(BusError, match=r"no success within 0.5 s"):
        await bus.publish(bus.names.outcomes, b"x")

    os.kill(broker.pid, signal.SIGCONT)
