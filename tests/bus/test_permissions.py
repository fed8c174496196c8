"""Each role can do its own work and nothing else; a denial is told at once, with role and subject."""

from pathlib import Path

import anyio
import msgspec
import nats
import pytest
from structlog.testing import capture_logs

from areal_async.bus import Bus, EmbeddedBroker, Role, take_trainer_consumer
from areal_async.bus.connection import connect
from areal_async.bus.permissions import SERVICES_INBOX
from areal_async.bus.private import ensure_key, write_private
from areal_async.bus.streams import all_streams
from areal_async.config.settings import Settings
from areal_async.errors import BusError, UserError
from areal_async.protocol.run_state import Control, ServerState
from areal_async.protocol.subjects import (
    ADMITTED,
    ARMS,
    CHANGES,
    CHECKPOINT,
    CONTROL,
    HOSTS,
    LAUNCHER,
    LINEAGE,
    RUN_STATE,
    Names,
)
from areal_async.protocol.types import Admitted, Cut, CutKind, LineageRecord, Outcome, OutcomeKind, Ticket
from tests.brokers import PATIENCE_S, OpenRole, fetch_all
from tests.bus.stored import ticket

pytestmark = pytest.mark.anyio

RUN = Names("test")

OPERATOR, CONTROLLER, NODE, TRAINER = Role.OPERATOR, Role.CONTROLLER, Role.NODE, Role.TRAINER
BUCKETS = {f"KV_{RUN.bucket}": "keys", f"KV_{RUN.nodes_bucket}": "nodes' keys"}
STREAMS = {BUCKETS.get(stream, stream.rpartition("_")[2].lower()): stream for stream in all_streams(RUN)}
KEY, NODES_KEY = f"$KV.{RUN.bucket}", f"$KV.{RUN.nodes_bucket}"
CONSUMERS = {
    NODE: (RUN.tickets_stream, RUN.nodes_consumer),
    CONTROLLER: (RUN.eval_stream, RUN.eval_controller_consumer),
    TRAINER: (RUN.trajectories_stream, RUN.trainer_consumer(1)),
}
"""One consumer of each role's own."""

READERS = {
    "tickets": (TRAINER,),
    "trajectories": (NODE, TRAINER),
    "images": (CONTROLLER, NODE, TRAINER),
    "outcomes": (CONTROLLER, NODE, TRAINER),
    "events": (CONTROLLER, TRAINER),
    **dict.fromkeys(BUCKETS.values(), (CONTROLLER, NODE, TRAINER)),
}
"""Who asks a stream's leader for a message; whose DIRECT.GET is the same."""

PURGERS = {"trajectories": (TRAINER,), "images": (CONTROLLER, TRAINER), "eval": (CONTROLLER,)}
"""Who removes what a stream holds, beside the operator."""

NUM_LONG = 150
"""Of 20 kB: three megabytes."""

Action = tuple[str, frozenset[Role]]
"""A subject, and the roles that may publish on it."""


def _only(subject: str, *roles: Role) -> Action:
    return subject, frozenset(roles)


ACTIONS: dict[str, Action] = {
    "admit a group": _only(RUN.tickets("w"), CONTROLLER, OPERATOR),
    "ask an evaluation": _only(RUN.eval_tickets("w"), CONTROLLER, OPERATOR),
    "forge a trajectory": _only(RUN.trajectories("w", "0-0-0"), NODE, OPERATOR),
    "forge an image": _only(RUN.images("0-0-0", "0" * 64), CONTROLLER, NODE, OPERATOR),
    "forge an evaluation's result": _only(RUN.eval_results("w"), NODE, OPERATOR),
    "ask an arm": _only(RUN.arm_tickets("old-1"), CONTROLLER, OPERATOR),
    "forge an arm's answers": _only(RUN.arm_results("old-1"), NODE, OPERATOR),
    "forge an outcome": _only(RUN.outcomes, CONTROLLER, TRAINER, OPERATOR),
    "forge a cut": _only(RUN.cuts, TRAINER, OPERATOR),
    "declare a group dead": _only(RUN.dead_groups, TRAINER, OPERATOR),
    "announce weights": _only(RUN.weights, TRAINER, OPERATOR),
    "set the weights": _only(f"{KEY}.{RUN.weights_key()}", TRAINER, OPERATOR),
    "take the lineage": _only(f"{KEY}.{LINEAGE}", TRAINER, OPERATOR),
    "set the checkpoint": _only(f"{KEY}.{CHECKPOINT}", TRAINER, OPERATOR),
    "move the data cursor": _only(f"{KEY}.{ADMITTED}", CONTROLLER, OPERATOR),
    "end the run": _only(f"{KEY}.{RUN_STATE}", CONTROLLER, OPERATOR),
    "record an evaluation": _only(f"{KEY}.eval.3", CONTROLLER, OPERATOR),
    "choose the arms": _only(f"{KEY}.{ARMS}", CONTROLLER, OPERATOR),
    "count an arm's pairs": _only(f"{KEY}.{RUN.arm_key('old')}", CONTROLLER, OPERATOR),
    "speak for a server": _only(f"{NODES_KEY}.{RUN.server_key('s0')}", CONTROLLER, NODE, OPERATOR),
    "size a node's fleet": _only(f"{KEY}.{RUN.fleet_key('n0')}", CONTROLLER, OPERATOR),
    "choose the run's hosts": _only(f"{KEY}.{HOSTS}", CONTROLLER, OPERATOR),
    "say how processes fare": _only(f"{KEY}.{RUN.crew_key('node-0')}", OPERATOR),
    "keep a node's id": _only(f"{NODES_KEY}.{RUN.node_key('n0')}", NODE, OPERATOR),
    "keep the run": _only(f"{KEY}.{LAUNCHER}", OPERATOR),
    "pause the run": _only(f"{KEY}.{CONTROL}", CONTROLLER, OPERATOR),
    "change a setting": _only(f"{KEY}.{CHANGES}", CONTROLLER, OPERATOR),
    "order the controller": _only(RUN.control("pause"), OPERATOR),
    "ask what a process does": _only(RUN.status("node"), OPERATOR),
    "look for services": _only("$SRV.PING", OPERATOR),
    "let a pushed stream go on": _only(f"$JS.FC.{RUN.outcomes_stream}.x.y", OPERATOR),
    "take in a stream": _only(f"$JS.SNAPSHOT.RESTORE.{RUN.tickets_stream}.x", OPERATOR),
    "answer operators": _only("_INBOX_services.x", CONTROLLER, NODE, TRAINER),
    "set a key of nobody's": _only(f"{KEY}.other", OPERATOR),
    "set a key of nobody's among the nodes'": _only(f"{NODES_KEY}.other", OPERATOR),
    "speak for a server among the run's keys": _only(f"{KEY}.{RUN.server_key('s0')}", OPERATOR),
    "read the tickets": _only(f"$JS.API.DIRECT.GET.{RUN.tickets_stream}", TRAINER, OPERATOR),
    "read the trajectories": _only(f"$JS.API.DIRECT.GET.{RUN.trajectories_stream}", NODE, TRAINER, OPERATOR),
    "read the images": _only(f"$JS.API.DIRECT.GET.{RUN.images_stream}", CONTROLLER, NODE, TRAINER, OPERATOR),
    "read evaluations": _only(f"$JS.API.DIRECT.GET.{RUN.eval_stream}", OPERATOR),
    "read events": _only(f"$JS.API.DIRECT.GET.{RUN.events_stream}", CONTROLLER, TRAINER, OPERATOR),
    "read dead letters": _only(f"$JS.API.DIRECT.GET.{RUN.dead_stream}", OPERATOR),
    "fence a trainer": _only(
        f"$JS.API.CONSUMER.DELETE.{RUN.trajectories_stream}.{RUN.trainer_consumer(1)}", TRAINER, OPERATOR
    ),
    "list every stream": _only("$JS.API.STREAM.NAMES", OPERATOR),
    "purge the account": _only("$JS.API.ACCOUNT.PURGE.x", OPERATOR),
    "command the server": _only("$SYS.REQ.SERVER.PING"),
    "read the server's accounts": _only("$SYS.REQ.ACCOUNT.PING.CONNZ"),
    "step the leader down": _only("$JS.API.META.LEADER.STEPDOWN", OPERATOR),
    "write into another run": _only("areal.other.tickets.w"),
    "write another run's keys": _only(f"$KV.AREAL_other.{ADMITTED}"),
    **{f"speak for the {role}'s metrics": _only(RUN.metrics(role), role, OPERATOR) for role in Role},
    **{f"speak for the {role}'s events": _only(RUN.event("role.lost", role), role, OPERATOR) for role in Role},
    **{f"answer the {role}": _only(f"{role.inbox_prefix}.x.1") for role in Role},
    **{
        f"{verb.lower()} of {name}": _only(
            f"$JS.API.STREAM.{verb}.{stream}",
            OPERATOR,
            *(PURGERS.get(name, ()) if verb == "PURGE" else ()),
            *(READERS.get(name, ()) if verb == "MSG.GET" else ()),
        )
        for name, stream in STREAMS.items()
        for verb in ("CREATE", "UPDATE", "DELETE", "PURGE", "MSG.DELETE", "MSG.GET", "SNAPSHOT", "RESTORE")
    },
    **{
        f"{verb.lower()} of the {owner}'s consumer": _only(f"$JS.{prefix}.{stream}.{consumer}{rest}", owner, OPERATOR)
        for owner, (stream, consumer) in CONSUMERS.items()
        for verb, prefix, rest in (
            ("pull", "API.CONSUMER.MSG.NEXT", ""),
            ("ack", "ACK", ".1.1.1.1.0"),
            ("newer ack", "ACK._.hash", ".1.1.1.1.0.x"),
        )
    },
    **{
        f"ask for the {owner}'s next message as if it was an ack of the {role}'s": _only(
            f"$JS.ACK.{'.'.join(CONSUMERS[owner])}.{'.'.join(CONSUMERS[role])}.1.1.1", owner, OPERATOR
        )
        for owner in CONSUMERS
        for role in CONSUMERS
        if role is not owner
    },
    **{
        f"{verb.lower()} a consumer of {name}": _only(
            f"$JS.API.CONSUMER.{verb}.{stream}.mine", OPERATOR, *([TRAINER] if name == "trajectories" else [])
        )
        for name, stream in STREAMS.items()
        for verb in ("CREATE", "DELETE")
    },
    **{
        f"make an old consumer of {name}": _only(f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.mine", OPERATOR)
        for name, stream in STREAMS.items()
    },
}
FORBIDDEN = [(role, what) for role in Role for what, (_, allowed) in ACTIONS.items() if role not in allowed]


@pytest.mark.parametrize("role", list(Role))
async def test_what_is_not_a_roles_work_is_denied_quickly(open_role: OpenRole, role: Role) -> None:
    bus, operator = await open_role(role), await open_role(OPERATOR, "1")
    before = [await operator.stream_state(stream) for stream in all_streams(RUN)]

    with anyio.fail_after(100):
        mine = [what for forbidden, what in FORBIDDEN if forbidden is role]
        possible = [what for what in mine if not await _is_denied(bus, ACTIONS[what][0])]

    assert possible == []
    assert [await operator.stream_state(stream) for stream in all_streams(RUN)] == before


async def _is_denied(bus: Bus, subject: str) -> bool:
    try:
        await bus.publish(subject, b"x")
    except BusError as exc:
        return f"denied to the role {bus.role}" in str(exc)
    return False


def test_the_table_forbids_what_it_should() -> None:
    assert len(FORBIDDEN) > 250
    assert {role for role, _ in FORBIDDEN} == set(Role)
    assert {(NODE, "forge an outcome"), (TRAINER, "forge a trajectory"), (CONTROLLER, "set the weights")} <= set(
        FORBIDDEN
    )
    assert {what for role, what in FORBIDDEN if role is TRAINER and what.startswith("purge of")} == {
        f"purge of {name}" for name in STREAMS if name not in ("trajectories", "images")
    }
    assert {(NODE, "purge of images"), (NODE, "purge of trajectories"), (CONTROLLER, "purge of trajectories")} <= set(
        FORBIDDEN
    )
    assert (TRAINER, "forge an image") in FORBIDDEN


async def test_what_the_broker_writes_for_somebody_is_not_believed(open_role: OpenRole) -> None:
    """As at a broker of one's own where all roles are in one account: there an answer goes wherever its asker says."""
    node, trainer, controller = await open_role(NODE), await open_role(TRAINER), await open_role(CONTROLLER)
    operator = await open_role(OPERATOR)
    await controller.put(ADMITTED, Admitted(total=7))
    forged = {
        RUN.tickets("w"): ticket("0-9-0", group_size=2),
        RUN.cuts: Cut(kind=CutKind.BEGIN, lineage=9, step=0),
        RUN.outcomes: Outcome(group_id="0-9-0", kind=OutcomeKind.TRAINED, lineage=1),
        f"{KEY}.{ADMITTED}": Admitted(total=0),
        f"{KEY}.{LINEAGE}": LineageRecord(lineage=9),
    }
    for subject, record in forged.items():
        for headers in ({}, {"KV-Operation": "DEL"}):
            own = RUN.trajectories("w", f"0-{len(subject)}-{len(headers)}")
            stored = await node.publish(own, record, headers=headers)
            request = msgspec.json.encode({"seq": stored.sequence})
            await operator.connection.publish(f"$JS.API.DIRECT.GET.{RUN.trajectories_stream}", request, reply=subject)
    await operator.connection.request("$JS.API.INFO", deadline_s=PATIENCE_S)

    async with node.consume(RUN.tickets_stream, RUN.nodes_consumer) as inbox:
        for delivery in await fetch_all(inbox, 2):
            assert await node.decode(delivery, Ticket) is None
    entries = await trainer.read_log(RUN.outcomes_stream, RUN.log)
    assert len(entries) == 4
    for entry in entries:
        assert await trainer.decode(entry, Cut if entry.subject == RUN.cuts else Outcome) is None
    assert (await controller.get(ADMITTED, Admitted))[0] == Admitted(total=7)
    assert (await trainer.get(LINEAGE, LineageRecord))[0] is None


async def test_a_node_cannot_purge_the_keys_by_a_header(open_role: OpenRole) -> None:
    node = await open_role(NODE)
    state = ServerState(server_id="s1", node_id="n", url="", version="")
    await node.put(RUN.server_key("s1"), state)

    with pytest.raises(BusError, match="rollup not permitted"):
        await node.publish(f"{NODES_KEY}.{RUN.server_key('s0')}", b"x", headers={"Nats-Rollup": "all"})

    assert (await node.get(RUN.server_key("s1"), ServerState))[0] == state


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
async def test_a_key_that_others_may_read_is_refused(broker: EmbeddedBroker, mode: int) -> None:
    key = broker.credentials(NODE)
    key.chmod(mode)

    with pytest.raises(UserError, match=f"with mode {mode:o}, which others may use, need 600; chmod it"):
        await connect(broker.url, name="x", role=NODE, credentials=key, deadline_s=PATIENCE_S)


async def test_a_broker_does_not_start_on_keys_that_are_open_to_others(settings: Settings) -> None:
    directory = settings.run_directory / "credentials"
    directory.mkdir(parents=True, mode=0o700)
    directory.chmod(0o755)
    with pytest.raises(UserError, match="credentials with mode 755, which others may use, need 700"):
        await EmbeddedBroker(settings).start()

    directory.chmod(0o700)
    ensure_key(directory / "node.nk")
    (directory / "node.nk").chmod(0o644)
    with pytest.raises(UserError, match="node.nk with mode 644, which others may use, need 600"):
        await EmbeddedBroker(settings).start()


@pytest.mark.parametrize("role", [Role.CONTROLLER, Role.NODE, Role.TRAINER])
async def test_no_role_can_listen_to_anothers_answers_or_questions_or_to_the_trajectories(
    open_role: OpenRole, role: Role
) -> None:
    bus = await open_role(role)
    asked = {CONTROLLER: RUN.status("controller"), TRAINER: RUN.status("trainer"), NODE: RUN.status("server", "0-0")}
    of_others = [subject for other, subject in asked.items() if other is not role]

    for subject in ("_INBOX_operator.>", RUN.trajectories("w", "0-0-0"), ">", *of_others):
        with anyio.fail_after(PATIENCE_S), pytest.raises(BusError, match="denied to the role"):
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
            (delivery,) = await fetch_all(inbox, 1)
            assert await delivery.ack_sync()
    assert len(await trainer.read_log(RUN.tickets_stream, RUN.all_tickets)) == 0
    assert len(await node.read_log(RUN.outcomes_stream, RUN.log)) == 2


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_plain_client_of_the_operators_reads_a_long_stream_and_the_keys_with_one_inbox(
    broker: EmbeddedBroker, open_role: OpenRole
) -> None:
    """Past some two megabytes the broker pushes on only when told to: a denial there looks like the stream's end."""
    operator = await open_role(OPERATOR)
    await operator.put(CONTROL, Control(is_paused=True))
    for _ in range(NUM_LONG):
        await operator.publish(RUN.event("long.message", OPERATOR), bytes(20_000))

    client = await nats.connect(broker.url, nkeys_seed=str(broker.credentials(OPERATOR)), inbox_prefix=SERVICES_INBOX)
    try:
        jetstream = client.jetstream()
        pushed = await jetstream.subscribe(RUN.all_events, stream=RUN.events_stream, ordered_consumer=True)
        for _ in range(NUM_LONG):
            await pushed.next_msg(timeout=60)
        entry = await (await jetstream.key_value(RUN.bucket)).get(CONTROL)
    finally:
        await client.close()

    assert msgspec.json.decode(entry.value or b"", type=Control).is_paused


async def test_another_roles_key_is_told_at_once_and_once(broker: EmbeddedBroker) -> None:
    with (
        capture_logs() as logs,
        pytest.raises(
            UserError, match=r"/node\.nk is not the key of the role operator .*; give that as bus\.credentials"
        ),
    ):
        await connect(broker.url, name="x", role=OPERATOR, credentials=broker.credentials(NODE), deadline_s=PATIENCE_S)

    assert [one["event"] for one in logs if one["log_level"] == "error"] == []


async def test_without_a_key_or_with_a_foreign_one_the_broker_refuses(broker: EmbeddedBroker, tmp_path: Path) -> None:
    foreign, broken = tmp_path / "foreign.nk", tmp_path / "broken.nk"
    ensure_key(foreign)
    write_private(broken, b"SU, and then not a key")

    for credentials in (None, foreign):
        with pytest.raises(UserError, match="refused the role node"):
            await connect(broker.url, name="x", role=Role.NODE, credentials=credentials, deadline_s=PATIENCE_S)
    for credentials in (broken, tmp_path / "missing.nk"):
        with pytest.raises(UserError, match=r"bus\.credentials"):
            await connect(broker.url, name="x", role=Role.NODE, credentials=credentials, deadline_s=PATIENCE_S)
