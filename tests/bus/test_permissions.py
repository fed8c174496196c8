"""Each role can do its own work and nothing else; a denial is told at once, with role and subject."""

from pathlib import Path

import anyio
import pytest

from areal_async.bus import Bus, EmbeddedBroker, Role, connect, take_trainer_consumer
from areal_async.bus.broker_config import ensure_key
from areal_async.bus.private import write_private
from areal_async.errors import BusError, UserError
from areal_async.subjects import ADMITTED, LINEAGE, Names
from areal_async.types import Admitted, LineageRecord
from tests.brokers import OpenRole

pytestmark = pytest.mark.anyio

RUN = Names("test")

FORBIDDEN = {
    Role.CONTROLLER: [
        RUN.trajectories("w", "0-0-0"),
        RUN.cuts,
        f"$KV.{RUN.bucket}.{LINEAGE}",
        f"$JS.API.STREAM.DELETE.{RUN.tickets_stream}",
        f"$JS.API.CONSUMER.MSG.NEXT.{RUN.tickets_stream}.{RUN.nodes_consumer}",
        f"$JS.ACK.{RUN.trajectories_stream}.trainer-1.1.1.1.1.0",
        RUN.events("trainer"),
    ],
    Role.NODE: [
        RUN.tickets("w"),
        RUN.outcomes,
        RUN.cuts,
        RUN.dead_groups,
        RUN.weights,
        f"$KV.{RUN.bucket}.{ADMITTED}",
        f"$KV.{RUN.bucket}.{LINEAGE}",
        f"$KV.{RUN.bucket}.{RUN.fleet_key('n0')}",
        f"$JS.API.STREAM.PURGE.{RUN.trajectories_stream}",
        f"$JS.API.STREAM.MSG.DELETE.{RUN.trajectories_stream}",
        f"$JS.API.CONSUMER.CREATE.{RUN.tickets_stream}.mine",
        f"$JS.API.CONSUMER.MSG.NEXT.{RUN.trajectories_stream}.trainer-1",
        f"$JS.ACK.{RUN.trajectories_stream}.trainer-1.1.1.1.1.0",
        f"$JS.ACK.{RUN.eval_stream}.{RUN.eval_controller_consumer}.1.1.1.1.0",
        RUN.metrics("trainer"),
        "areal.other.tickets.w",
    ],
    Role.TRAINER: [
        RUN.tickets("w"),
        RUN.trajectories("w", "0-0-0"),
        f"$KV.{RUN.bucket}.{ADMITTED}",
        f"$KV.{RUN.bucket}.server.s0",
        f"$JS.API.STREAM.CREATE.{RUN.trajectories_stream}",
        f"$JS.API.STREAM.DELETE.{RUN.trajectories_stream}",
        f"$JS.API.CONSUMER.DELETE.{RUN.tickets_stream}.{RUN.nodes_consumer}",
        f"$JS.ACK.{RUN.tickets_stream}.{RUN.nodes_consumer}.1.1.1.1.0",
        RUN.events("operator"),
    ],
    Role.OPERATOR: ["areal.other.tickets.w", "$SYS.REQ.SERVER.PING"],
}


@pytest.mark.parametrize("role", list(Role))
async def test_what_is_not_a_roles_work_is_denied_quickly(open_role: OpenRole, role: Role) -> None:
    bus = await open_role(role)

    with anyio.fail_after(10):
        for subject in FORBIDDEN[role]:
            with pytest.raises(BusError, match=f"denied to the role {role}"):
                await bus.publish(subject, b"x")


@pytest.mark.parametrize("role", [Role.CONTROLLER, Role.NODE, Role.TRAINER])
async def test_no_role_can_listen_to_anothers_answers_or_to_the_trajectories(open_role: OpenRole, role: Role) -> None:
    bus = await open_role(role)

    for subject in ("_INBOX_operator.>", RUN.trajectories("w", "0-0-0"), ">"):
        with anyio.fail_after(10), pytest.raises(BusError, match="denied to the role"):
            async with bus.subscribe(subject):
                pass


async def test_every_role_can_do_its_own_work(open_role: OpenRole) -> None:
    buses: dict[Role, Bus] = {role: await open_role(role) for role in Role}
    controller, node, trainer = buses[Role.CONTROLLER], buses[Role.NODE], buses[Role.TRAINER]

    await controller.publish(RUN.tickets("w"), b"x")
    await controller.publish(RUN.eval_tickets("w"), b"x")
    await trainer.publish(RUN.dead_groups, b"x")
    for bus in buses.values():
        await bus.publish(RUN.undecodable, b"x")
    await controller.compare_and_set(ADMITTED, Admitted(), 0)
    await node.publish(RUN.trajectories("w", "0-0-0"), b"x")
    await node.publish(RUN.eval_results("w"), b"x")
    await trainer.create(LINEAGE, LineageRecord(lineage=1))
    await trainer.publish(RUN.outcomes, b"x")
    await trainer.publish(RUN.cuts, b"x")
    for bus, stream, consumer in (
        (node, RUN.tickets_stream, RUN.nodes_consumer),
        (node, RUN.eval_stream, RUN.eval_nodes_consumer),
        (controller, RUN.eval_stream, RUN.eval_controller_consumer),
        (trainer, RUN.trajectories_stream, await take_trainer_consumer(trainer, 1)),
    ):
        async with bus.consume(stream, consumer) as inbox:
            (delivery,) = await inbox.fetch(1, wait_s=10)
            assert await delivery.ack_sync()
    assert len(await trainer.read_log(RUN.tickets_stream, RUN.all_tickets)) == 0
    assert len(await node.read_log(RUN.outcomes_stream, RUN.log)) == 2


async def test_without_a_key_or_with_a_foreign_one_the_broker_refuses(broker: EmbeddedBroker, tmp_path: Path) -> None:
    foreign, broken = tmp_path / "foreign.nk", tmp_path / "broken.nk"
    ensure_key(foreign)
    write_private(broken, b"SU, and then not a key")

    for credentials in (None, foreign):
        with pytest.raises(UserError, match="refused the role node"):
            await connect(broker.url, name="x", role=Role.NODE, credentials=credentials, deadline_s=10)
    for credentials in (broken, tmp_path / "missing.nk"):
        with pytest.raises(UserError, match=r"bus\.credentials"):
            await connect(broker.url, name="x", role=Role.NODE, credentials=credentials, deadline_s=10)
