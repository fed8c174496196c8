"""Bytes in subjects that are no text: the broker takes any but blanks and line ends, and readers go on all the same."""

import anyio
import pytest

from areal_async.bus import Bus, Role, take_trainer_consumer
from areal_async.bus.inbox import SIZE_HEADER
from areal_async.config.settings import Settings
from areal_async.launch.membership import MembershipPublisher
from areal_async.launch.run import forget_earlier
from areal_async.protocol import wire
from areal_async.protocol.run_state import CrewState, ServerState
from areal_async.protocol.types import DeadLetter
from tests.brokers import PATIENCE_S, OpenRole, fetch_all, until
from tests.bus.stored import WORKFLOW, store
from tests.bus.test_controller import World, controlling

pytestmark = pytest.mark.anyio

TOKENS = [b"\xff", b"a\xc3", b"a\x0cb", b"a\x0bb", b"a\x0c1", b"\x00", b"\x1b[31m", "é\u2028".encode()]


async def _publish(bus: Bus, subject: bytes, data: bytes) -> None:
    """As somebody does who has a key and not our client."""
    await bus.connection.client._send_command(b"PUB " + subject + f" {len(data)}\r\n".encode() + data + b"\r\n")
    await bus.api.ask("$JS.API.INFO")


@pytest.mark.both_loops
@pytest.mark.parametrize("token", TOKENS)
async def test_a_subject_that_is_no_text_does_not_stop_its_readers(open_role: OpenRole, token: bytes) -> None:
    """Stored, it would come again to every trainer that starts."""
    operator, node, trainer = [await open_role(one) for one in (Role.OPERATOR, Role.NODE, Role.TRAINER)]
    names, heard = operator.names, list[bytes]()
    await operator.connection.listen(names.all_metrics, lambda message: heard.append(message.data))
    await operator.api.ask("$JS.API.INFO")

    await _publish(node, f"areal.{names.run}.trajectories.{WORKFLOW}.".encode() + token, b"x")
    await _publish(node, f"areal.{names.run}.metrics.node.".encode() + token, b"x")
    await node.emit(names.metrics("node", "n0"), b"y")
    await store(node, "0-0-0", [0], group_size=1)

    await until(lambda: heard == [b"x", b"y"])
    consumer = await take_trainer_consumer(trainer, 1)
    async with trainer.consume(names.trajectories_stream, consumer) as inbox:
        hostile, good = await fetch_all(inbox, 2)
        await trainer.dead_letter(hostile, "no text")
        assert good.subject == names.trajectories(WORKFLOW, "0-0-0")
    assert len(await trainer.read_log(names.trajectories_stream, names.all_trajectories)) <= 2
    (letter,) = await operator.read_log(names.dead_stream, names.undecodable)
    assert wire.decode(letter.data, DeadLetter).sequence == hostile.sequence
    assert [one.connection.num_losses for one in (operator, trainer, node)] == [0, 0, 0]


@pytest.mark.parametrize("token", ["a.b", "a.b.c.d", "é", "x" * 4000, "a,b", "$KV"])
async def test_who_speaks_under_no_name_is_nobody_to_the_launcher(open_role: OpenRole, token: str) -> None:
    """It keeps a key for each group; what ends its hearing ends the run."""
    operator, node = await open_role(Role.OPERATOR), await open_role(Role.NODE)
    names = operator.names
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(MembershipPublisher(operator).run_reports)

        async def is_heard() -> bool:
            await node.connection.publish(f"areal.{names.run}.metrics.node.{token}", b"{}")
            await node.emit(names.metrics("node", "n0"), b"{}")
            return (await operator.get(names.crew_key("node-n0"), CrewState))[0] is not None

        await until(is_heard)
        tasks.cancel_scope.cancel()

    assert await operator.keys("crew.") == [names.crew_key("node-n0")]


@pytest.mark.parametrize("token", [b"\xff", b"a\xc3", "é".encode(), b"\x1b[31m", b"a,b", b"x" * 4000])
async def test_a_servers_key_that_nobody_can_write_again_holds_nothing_up(
    open_role: OpenRole, settings: Settings, token: bytes
) -> None:
    """It could be neither fenced nor deleted, and the run would wait for its version for ever."""
    operator = await open_role(Role.OPERATOR)
    world = World(await open_role(Role.NODE), await open_role(Role.TRAINER))
    ghost = ServerState(server_id="ghost", node_id="n", url="", version="0-0")
    await _publish(world.node, f"$KV.{operator.names.nodes_bucket}.server.".encode() + token, wire.encode(ghost))

    with anyio.fail_after(PATIENCE_S):
        async with controlling(open_role, settings) as controller:
            await world.hold("1-0")
            await until(lambda: controller.report()["held"] == "1-0")
            assert list(await operator.entries("server.", ServerState)) == [operator.names.server_key("s")]
        await forget_earlier(operator, with_nodes=True)


@pytest.mark.parametrize("told", ["abc", "-1", "9" * 5000, "1e9"])
async def test_a_sender_does_not_say_how_large_his_message_is(open_role: OpenRole, told: str) -> None:
    """Headers without an end swallow what the broker says of it, where all roles are in one account."""
    operator, trainer = await open_role(Role.OPERATOR), await open_role(Role.TRAINER)
    names = operator.names
    headers = f"NATS/1.0\r\n{SIZE_HEADER}: {told}\r\nX: yzz".encode()
    command = f"HPUB {names.trajectories(WORKFLOW, '0-0-0')} {len(headers)} {len(headers) + 1}\r\n".encode()
    await operator.connection.client._send_command(command + headers + b"x\r\n")
    consumer = await take_trainer_consumer(trainer, 1)

    async with trainer.consume(names.trajectories_stream, consumer) as inbox:
        (delivery,) = await fetch_all(inbox, 1)

    assert delivery.headers[SIZE_HEADER] == told, "it is the sender's"
    assert delivery.num_bytes == len(delivery.data)
