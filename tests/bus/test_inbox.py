"""A delivery belongs to one process until it is settled; nothing is lost when that process or the broker dies."""

from typing import Any

import anyio
import msgspec
import pytest

from areal_async.bus import MOST_TIMES, Bus, EmbeddedBroker, Inbox, Role, take_trainer_consumer
from areal_async.bus.accounts import ANSWERS_END_S
from areal_async.bus.inbox import GRACE_S, MOST_PULL_S, PULL_S
from areal_async.errors import ConsumerGoneError, FencedError
from tests.brokers import PATIENCE_S, OpenRole, fetch_all, kill, until

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]


@pytest.fixture(autouse=True)
def _nothing_comes_again_by_itself_and_acks_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_async.config.settings.TICKET_ACK_WAIT_S", 10 * PATIENCE_S)
    monkeypatch.setattr("areal_async.bus.inbox.SINGLE_DEADLINE_S", PATIENCE_S)


async def publish_tickets(bus: Bus, count: int) -> None:
    for index in range(count):
        await bus.publish(bus.names.tickets("gsm8k"), f"{index}".encode(), msg_id=f"ticket-{index}")


async def publish_trajectories(bus: Bus, count: int) -> None:
    async with anyio.create_task_group() as publishers:
        for index in range(count):
            subject = bus.names.trajectories("gsm8k", f"0-{index}-0")
            publishers.start_soon(lambda subject=subject: bus.publish(subject, b"payload", headers={"Areal-X": "y"}))


async def test_fetch_takes_what_is_there_and_no_more_than_asked(open_role: OpenRole) -> None:
    controller, node = await open_role(Role.CONTROLLER), await open_role(Role.NODE)
    await publish_tickets(controller, 3)

    async with node.consume(node.names.tickets_stream, node.names.nodes_consumer) as inbox:
        first = await fetch_all(inbox, 2)
        rest = await inbox.fetch(2, wait_s=PATIENCE_S)
        none = await inbox.fetch(2, wait_s=0)

    assert [delivery.data for delivery in first] == [b"0", b"1"]
    assert [delivery.data for delivery in rest] == [b"2"]
    assert none == []


async def test_fetch_waits_for_the_first_message(open_role: OpenRole) -> None:
    controller, node = await open_role(Role.CONTROLLER), await open_role(Role.NODE)
    fetched: list[bytes] = []

    async with node.consume(node.names.tickets_stream, node.names.nodes_consumer) as inbox:

        async def fetch() -> None:
            fetched.extend(delivery.data for delivery in await inbox.fetch(5, wait_s=PATIENCE_S))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fetch)
            await anyio.wait_all_tasks_blocked()
            await publish_tickets(controller, 1)

    assert fetched == [b"0"]


async def test_a_message_that_is_the_last_is_had_with_one_request(open_role: OpenRole) -> None:
    controller, node = await open_role(Role.CONTROLLER), await open_role(Role.NODE)
    sent = node.connection.client.stats

    async with node.consume(node.names.tickets_stream, node.names.nodes_consumer) as inbox:
        assert await inbox.fetch(2, wait_s=0) == []
        before = sent["out_msgs"]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: inbox.fetch(2, wait_s=PATIENCE_S))
            await until(lambda: sent["out_msgs"] > before)
            await publish_tickets(controller, 1)
        num_sent_for_one = sent["out_msgs"] - before
        await publish_tickets(controller, 3)  # two more: the first is known
        more = await fetch_all(inbox, 2)

    assert num_sent_for_one == 1
    assert [delivery.data for delivery in more] == [b"1", b"2"]


def note_pulls(node: Bus, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list to which the time of each pull that waits is added, in nanoseconds."""
    expires: list[int] = []
    publish = node.connection.publish

    async def noting(subject: str, payload: bytes = b"", **rest: Any) -> None:
        expires.extend(msgspec.json.decode(payload)["expires"] for _ in range(b"expires" in payload))
        await publish(subject, payload, **rest)

    monkeypatch.setattr(node.connection, "publish", noting)
    return expires


async def test_a_pull_waits_so_much_longer_as_its_connection_is_slowed_down(
    open_role: OpenRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await open_role(Role.NODE)
    expires = note_pulls(node, monkeypatch)
    for times in (1.0, MOST_TIMES):
        node.connection.slow_down(times)
        async with (
            node.consume(node.names.tickets_stream, node.names.nodes_consumer) as inbox,
            anyio.create_task_group() as tasks,
        ):
            num_before = len(expires)
            tasks.start_soon(lambda inbox=inbox: inbox.fetch(1, wait_s=100 * PULL_S))
            await until(lambda num_before=num_before: len(expires) > num_before)
            tasks.cancel_scope.cancel()

    assert expires == [PULL_S * 1e9, MOST_PULL_S * 1e9]


@pytest.fixture
def _forgets(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ANSWERS_END_S, "$JS.API.CONSUMER.MSG.NEXT.", request.param)


@pytest.mark.usefixtures("_forgets")
@pytest.mark.parametrize(
    ("_forgets", "times", "grace_s"), [(0.5, 1.0, GRACE_S), (60.0, MOST_TIMES, PATIENCE_S)], indirect=["_forgets"]
)
async def test_pulls_last_no_longer_than_the_broker_remembers_who_asked(
    open_role: OpenRole, monkeypatch: pytest.MonkeyPatch, times: float, grace_s: float
) -> None:
    node = await open_role(Role.NODE)
    expires = note_pulls(node, monkeypatch)
    monkeypatch.setattr("areal_async.bus.inbox.PULL_S", 0.2)
    monkeypatch.setattr("areal_async.bus.inbox.GRACE_S", grace_s)
    node.connection.slow_down(MOST_TIMES)
    async with (
        node.consume(node.names.tickets_stream, node.names.nodes_consumer) as inbox,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(lambda: inbox.fetch(1, wait_s=PATIENCE_S))
        await until(lambda: len(expires) > 1)
        tasks.cancel_scope.cancel()

    assert expires[:2] == [0.2 * MOST_TIMES * 1e9, 0.2 * times * 1e9]


async def test_what_is_given_back_comes_again_and_what_is_termed_does_not(open_role: OpenRole) -> None:
    controller, node = await open_role(Role.CONTROLLER), await open_role(Role.NODE)
    await publish_tickets(controller, 3)

    async with node.consume(node.names.tickets_stream, node.names.nodes_consumer) as inbox:
        nacked, acked, termed = await fetch_all(inbox, 3)
        await acked.ack()
        await termed.term()
        await nacked.in_progress()
        await nacked.nak()
        (again,) = await inbox.fetch(3, wait_s=PATIENCE_S)
        assert await again.ack_sync()

    assert (again.data, again.num_delivered) == (nacked.data, 2)
    assert (await controller.stream_state(node.names.tickets_stream)).num_messages == 0


async def leave_a_pull_behind(operator: Bus, inbox: Inbox) -> None:
    """Cancel a fetch while the broker holds its pull."""
    names = operator.names
    consumer = f"$JS.API.CONSUMER.INFO.{names.tickets_stream}.{names.nodes_consumer}"

    async def is_held() -> bool:
        return bool((await operator.api.ask(consumer))["num_waiting"])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: inbox.fetch(1, wait_s=10 * PATIENCE_S))
        await until(is_held)
        tasks.cancel_scope.cancel()


async def test_a_cancelled_fetch_loses_no_message(open_role: OpenRole) -> None:
    operator, controller, node = [await open_role(role) for role in (Role.OPERATOR, Role.CONTROLLER, Role.NODE)]
    async with node.consume(node.names.tickets_stream, node.names.nodes_consumer) as inbox:
        await leave_a_pull_behind(operator, inbox)
        await publish_tickets(controller, 1)  # goes to the pull that the cancelled fetch left behind

        (delivery,) = await fetch_all(inbox, 1)

    assert delivery.data == b"0"


async def test_leaving_an_inbox_gives_back_what_nobody_fetched(open_role: OpenRole) -> None:
    operator, controller, node = [await open_role(role) for role in (Role.OPERATOR, Role.CONTROLLER, Role.NODE)]
    async with node.consume(node.names.tickets_stream, node.names.nodes_consumer) as inbox:
        await leave_a_pull_behind(operator, inbox)
        await publish_tickets(controller, 1)
        await until(lambda: bool(inbox._arrived))

    other = await open_role(Role.NODE, "1")
    async with other.consume(node.names.tickets_stream, node.names.nodes_consumer) as inbox:
        (delivery,) = await fetch_all(inbox, 1)

    assert delivery.num_delivered == 2


async def test_fetch_goes_on_after_the_broker_was_killed(broker: EmbeddedBroker, open_role: OpenRole) -> None:
    controller, node = await open_role(Role.CONTROLLER), await open_role(Role.NODE)
    fetched: list[bytes] = []

    async with node.consume(node.names.tickets_stream, node.names.nodes_consumer) as inbox:

        async def fetch() -> None:
            while not fetched:
                fetched.extend(delivery.data for delivery in await inbox.fetch(1, wait_s=PATIENCE_S))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fetch)
            await anyio.wait_all_tasks_blocked()
            kill(broker)
            await publish_tickets(controller, 1)

    assert fetched == [b"0"]


async def test_settled_messages_stay_settled_when_the_broker_is_killed_at_once(
    broker: EmbeddedBroker, open_role: OpenRole
) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    consumer = await take_trainer_consumer(trainer, 1)
    await publish_trajectories(node, 300)
    async with trainer.consume(trainer.names.trajectories_stream, consumer) as inbox:
        deliveries = await fetch_all(inbox, 300)

        unconfirmed = await trainer.settle(deliveries)
        kill(broker)

    assert (len(deliveries), unconfirmed) == (300, [])
    assert (await trainer.stream_state(trainer.names.trajectories_stream)).num_messages == 0


async def num_pending(trainer: Bus, consumer: str) -> int:
    """How many messages the broker has not delivered, as far as it knows."""
    info = await trainer.api.ask(f"$JS.API.CONSUMER.INFO.{trainer.names.trajectories_stream}.{consumer}")
    return int(info["num_pending"])


async def test_what_a_killed_broker_forgot_it_delivered_comes_again_and_is_then_settled_by_either_delivery(
    broker: EmbeddedBroker, open_role: OpenRole
) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    consumer = await take_trainer_consumer(trainer, 1)
    await publish_trajectories(node, 100)
    async with trainer.consume(trainer.names.trajectories_stream, consumer) as inbox:
        first = await fetch_all(inbox, 100)
        kill(broker)
        again = []
        while await num_pending(trainer, consumer):  # asked once it is back
            again += await inbox.fetch(100, wait_s=0.5)

        unconfirmed = await trainer.settle(first)

    assert unconfirmed == []
    assert {delivery.sequence for delivery in again} <= {delivery.sequence for delivery in first}
    assert (await trainer.stream_state(trainer.names.trajectories_stream)).num_messages == 0


async def test_the_trainer_gets_headers_without_payloads_but_knows_their_size(open_role: OpenRole) -> None:
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    consumer = await take_trainer_consumer(trainer, 1)
    await publish_trajectories(node, 1)

    async with trainer.consume(trainer.names.trajectories_stream, consumer) as inbox:
        (delivery,) = await fetch_all(inbox, 1)
    message = await trainer.get_message(trainer.names.trajectories_stream, delivery.sequence)

    assert (delivery.data, delivery.num_bytes, delivery.headers["Areal-X"]) == (b"", 7, "y")
    assert message is not None
    assert (message.subject, message.data) == (delivery.subject, b"payload")


async def test_a_newer_lineage_fences_the_older_one(open_role: OpenRole) -> None:
    node, zombie, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER), await open_role(Role.TRAINER)
    stream = trainer.names.trajectories_stream
    await publish_trajectories(node, 1)
    async with zombie.consume(stream, await take_trainer_consumer(zombie, 1)) as old:
        (held,) = await fetch_all(old, 1)

        async with trainer.consume(stream, await take_trainer_consumer(trainer, 2)) as new:
            assert not await held.ack_sync(deadline_s=0.3)
            (delivery,) = await fetch_all(new, 1)

        assert delivery.sequence == held.sequence
        with pytest.raises(ConsumerGoneError):
            await old.fetch(1, wait_s=PATIENCE_S)
    with pytest.raises(FencedError):
        await take_trainer_consumer(zombie, 1)
