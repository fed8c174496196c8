"""A log is read whole and in order, also by one who joins late and while the broker is killed under the reader."""

import anyio
import pytest

from areal_async.bus import EmbeddedBroker, Message, Role
from tests.brokers import PATIENCE_S, OpenRole, kill

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]


async def test_a_follower_gets_what_was_and_what_comes_once_each_over_kills_of_the_broker(
    broker: EmbeddedBroker, open_role: OpenRole
) -> None:
    writer, reader = await open_role(Role.TRAINER), await open_role(Role.CONTROLLER)
    names = reader.names
    seen: list[Message] = []
    for index in range(20):
        await writer.publish(names.outcomes, f"{index}".encode(), msg_id=f"{index}")

    async def follow() -> None:
        async for message in reader.follow(names.outcomes_stream, names.log):
            seen.append(message)
            if len(seen) == 60:
                return

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow)
            for index in range(20, 60):
                if index in (30, 45):
                    kill(broker)
                subject = names.outcomes if index % 2 else names.cuts
                await writer.publish(subject, f"{index}".encode(), msg_id=f"{index}")

    assert [message.data for message in seen] == [f"{index}".encode() for index in range(60)]
    assert [message.sequence for message in seen] == list(range(1, 61))


async def test_a_follower_starts_where_it_is_told(open_role: OpenRole) -> None:
    bus = await open_role(Role.TRAINER)
    for index in range(5):
        await bus.publish(bus.names.outcomes, f"{index}".encode())
    follower = bus.follow(bus.names.outcomes_stream, bus.names.outcomes, start_sequence=4)

    with anyio.fail_after(PATIENCE_S):
        assert (await anext(follower)).data == b"3"


async def test_a_cancelled_follower_can_go_on(open_role: OpenRole) -> None:
    bus = await open_role(Role.TRAINER)
    follower = bus.follow(bus.names.outcomes_stream, bus.names.outcomes)
    with anyio.move_on_after(0.05):
        await anext(follower)
    await bus.publish(bus.names.outcomes, b"late")

    with anyio.fail_after(PATIENCE_S):
        assert (await anext(follower)).data == b"late"


async def test_a_log_longer_than_one_batch_is_read_whole_and_by_subject(open_role: OpenRole) -> None:
    bus = await open_role(Role.TRAINER)
    names = bus.names

    async def publish(worker: int) -> None:
        for index in range(worker, 600, 60):
            await bus.publish(names.cuts if index % 12 == 0 else names.outcomes, f"{index}".encode())

    async with anyio.create_task_group() as writers:
        for worker in range(60):
            writers.start_soon(publish, worker)
    everything = await bus.read_log(names.outcomes_stream, names.log)
    cuts = await bus.read_log(names.outcomes_stream, names.cuts)
    newest = await bus.read_log(names.outcomes_stream, names.log, start_sequence=599)

    assert sorted(int(message.data) for message in everything) == list(range(600))
    assert [message.sequence for message in everything] == list(range(1, 601))
    assert sorted(int(message.data) for message in cuts) == list(range(0, 600, 12))
    assert [message.sequence for message in newest] == [599, 600]


async def test_stored_messages_are_found_by_subject_and_by_sequence(open_role: OpenRole) -> None:
    node = await open_role(Role.NODE)
    names = node.names
    stored = {}
    for group in ("0-1-0", "0-2-0", "0-1-0"):
        subject = names.trajectories("gsm8k", group)
        published = await node.publish(subject, bytes(100_000), headers={"Areal-Group": group})
        stored[published.sequence] = subject

    wanted = names.trajectories("gsm8k", "0-1-0")
    found = [message.sequence async for message in node.find_messages(names.trajectories_stream, wanted)]
    one = await node.get_message(names.trajectories_stream, found[0])
    missing = await node.get_message(names.trajectories_stream, 99)

    assert found == [sequence for sequence, subject in stored.items() if subject == wanted]
    assert one is not None
    assert (one.headers["Areal-Group"], len(one.data)) == ("0-1-0", 100_000)
    assert missing is None


async def test_core_messages_reach_a_subscriber_once_it_has_entered(open_role: OpenRole) -> None:
    trainer, controller = await open_role(Role.TRAINER), await open_role(Role.CONTROLLER)

    async with controller.subscribe(controller.names.all_metrics) as messages:
        await trainer.emit(trainer.names.metrics("trainer", "0"), b"{}")
        with anyio.fail_after(PATIENCE_S):
            subject, data = await anext(messages)

    assert (subject, data) == (trainer.names.metrics("trainer", "0"), b"{}")
