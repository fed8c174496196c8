"""Whoever asks the broker has its answer, and nobody else: a role's key writes nowhere by way of an answer."""

from collections.abc import Iterator

import anyio
import msgspec
import pytest

from areal_async.bus import Bus, Role, take_trainer_consumer
from areal_async.bus.accounts import covers
from areal_async.bus.connection import Handler, Received
from areal_async.bus.permissions import SERVICES_INBOX, permissions
from areal_async.bus.streams import all_streams
from areal_async.protocol.subjects import ADMITTED, CHANGES, CHECKPOINT, CONTROL, LAUNCHER, LINEAGE, RUN_STATE, Names
from areal_async.protocol.types import Admitted
from tests.brokers import PATIENCE_S, OpenRole, until

pytestmark = pytest.mark.anyio

RUN = Names("test")
KEYS, NODES_KEYS = f"$KV.{RUN.bucket}.", f"$KV.{RUN.nodes_bucket}."
OTHERS = [role for role in Role if role is not Role.OPERATOR]
VICTIM = "victim"
TARGETS = [
    *(RUN.control(order) for order in ("set", "pause", "stop")),
    *(KEYS + key for key in (ADMITTED, CHANGES, CHECKPOINT, CONTROL, LINEAGE, RUN_STATE, "weights.actor")),
    NODES_KEYS + "server.s",
    *(RUN.tickets("w"), RUN.eval_tickets("w"), RUN.eval_results("w"), RUN.trajectories("w", "9-9-9")),
    *(
        RUN.cuts,
        RUN.outcomes,
        RUN.dead_groups,
        RUN.weights,
        RUN.status("controller"),
        RUN.event("role.lost", "operator"),
    ),
    *(RUN.metrics(role) for role in Role),
    *(f"{role.inbox_prefix}.{VICTIM}" for role in Role),
    f"{SERVICES_INBOX}.{VICTIM}",
    f"$JS.ACK.{RUN.trajectories_stream}.{RUN.trainer_consumer(1)}.1.1.1.1.0",
    f"$JS.ACK._.x.{RUN.trajectories_stream}.{RUN.trainer_consumer(1)}.1.1.1.1.0.x",
    f"$JS.API.STREAM.PURGE.{RUN.outcomes_stream}",
    "$SRV.PING",
    "_R_.x",
]
"""Where an answer would do harm."""
NEXT = b'{"batch": 1, "no_wait": true}'
HEARTBEATS = b'{"batch": 1, "expires": 100000000, "idle_heartbeat": 20000000}'
MISSING = b'{"seq": 999}'
NOTHING = b'{"filter": "nothing"}'
ALL = b'{"seq": 1, "batch": 9, "next_by_subj": ">"}'


def _requests(role: Role) -> Iterator[tuple[str, bytes]]:
    """Everything that the role may ask of anybody: each subject on which it may publish at all."""
    for pattern in permissions(role, RUN).publish:
        subject = pattern.replace("*", "x").replace(">", "x")
        if pattern.startswith("$JS.API.DIRECT.GET."):
            if pattern.endswith(".>"):
                yield pattern.replace(".>", f".{KEYS}{ADMITTED}" if "KV_" in pattern else f".{RUN.outcomes}"), b""
            else:
                yield from ((subject, body) for body in (b'{"seq": 1}', MISSING, ALL, b"no JSON"))
        elif pattern.startswith("$JS.API.STREAM.MSG.GET."):
            yield from ((subject, body) for body in (b'{"seq": 1}', MISSING, b'{"last_by_subj": ">"}'))
        elif pattern.startswith("$JS.API.CONSUMER.MSG.NEXT."):
            yield from ((subject.replace(".x", f".{RUN.trainer_consumer(1)}"), body) for body in (NEXT, HEARTBEATS))
        elif pattern.startswith("$JS.API.STREAM.PURGE."):
            yield subject, NOTHING  # what is gone then is no answer's doing
        elif pattern.startswith("$JS.ACK."):
            yield pattern.replace("*", "x").replace(">", "1.1.1.1.0"), b"+NXT " + NEXT
        else:
            yield subject, b""


async def _counts(operator: Bus) -> dict[str, int]:
    """How many messages each subject has in the streams."""
    found: dict[str, int] = {}
    for stream in all_streams(RUN):
        answer = await operator.api.ask(f"$JS.API.STREAM.INFO.{stream}", {"subjects_filter": ">"})
        found |= answer["state"].get("subjects") or {}
    return found


@pytest.mark.parametrize("role", OTHERS)
async def test_no_answer_of_the_broker_reaches_what_its_asker_may_not_write(open_role: OpenRole, role: Role) -> None:
    """Any subject that a role may publish on may answer: reads, pulls, acks, the broker's word that it has stored."""
    buses = {one: await open_role(one) for one in Role}
    operator, mine = buses[Role.OPERATOR], buses[role]
    await buses[Role.CONTROLLER].put(ADMITTED, Admitted(total=7))
    await buses[Role.TRAINER].publish(RUN.outcomes, b"x")
    for subject in (RUN.trajectories("w", "0-0-0"), RUN.tickets("w"), RUN.eval_tickets("w"), RUN.eval_results("w")):
        await operator.publish(subject, b"x")
    await take_trainer_consumer(buses[Role.TRAINER], 1)
    allowed = permissions(role, RUN).publish
    targets = [target for target in TARGETS if not any(covers(pattern, target) for pattern in allowed)]
    targets.remove(f"{role.inbox_prefix}.{VICTIM}")
    heard: list[str] = []

    def hear(message: Received) -> None:
        if message.subject in targets:
            heard.append(message.subject)

    for one, bus in buses.items():
        for subject in permissions(one, RUN).subscribe:
            if one is not role:
                await bus.connection.listen(subject, hear)
        await bus.api.ask("$JS.API.INFO")
    before = await _counts(operator)

    for subject, payload in _requests(role):
        for target in targets:
            await mine.connection.publish(subject, payload, reply=target)
    answered = [subject for subject, payload in _requests(role) if await _is_answered(mine, subject, payload)]
    for bus in buses.values():
        await bus.api.ask("$JS.API.INFO")
    after = await _counts(operator)

    assert heard == []
    assert {target: after.get(target) for target in targets} == {target: before.get(target) for target in targets}
    assert {subject for subject, _ in _requests(role) if subject.startswith("$JS.API.")} <= set(answered)


async def _is_answered(bus: Bus, subject: str, payload: bytes) -> bool:
    """Whether there is an answer where the asker may hear it; a message that is pulled has its own subject."""
    if not subject.startswith(("$JS.API.", "$KV.")):
        return False
    inbox, arrived = bus.connection.new_inbox(), anyio.Event()
    async with bus.connection.listening(inbox, lambda _: arrived.set()):
        await bus.connection.publish(subject, payload, reply=inbox)
        with anyio.move_on_after(PATIENCE_S):
            await arrived.wait()
    return arrived.is_set()


HEARD = [
    (Role.OPERATOR, Role.NODE, KEYS + LAUNCHER),
    (Role.OPERATOR, Role.NODE, KEYS + RUN.fleet_key("n0")),
    (Role.CONTROLLER, Role.NODE, KEYS + RUN.fleet_key("n0")),
    (Role.OPERATOR, Role.NODE, KEYS + CONTROL),
    (Role.CONTROLLER, Role.NODE, KEYS + CONTROL),
    (Role.CONTROLLER, Role.NODE, KEYS + CHANGES),
    (Role.CONTROLLER, Role.NODE, KEYS + RUN_STATE),
    (Role.TRAINER, Role.NODE, KEYS + RUN.weights_key()),
    (Role.NODE, Role.NODE, NODES_KEYS + RUN.node_key("n0")),
    (Role.OPERATOR, Role.CONTROLLER, KEYS + CONTROL),
    (Role.CONTROLLER, Role.CONTROLLER, KEYS + CHANGES),
    (Role.OPERATOR, Role.CONTROLLER, RUN.outcomes),
    (Role.TRAINER, Role.CONTROLLER, RUN.outcomes),
    (Role.TRAINER, Role.CONTROLLER, RUN.cuts),
    *((speaker, Role.CONTROLLER, RUN.metrics(speaker)) for speaker in Role),
    (Role.OPERATOR, Role.TRAINER, RUN.tickets("w")),
    (Role.CONTROLLER, Role.TRAINER, RUN.tickets("w")),
    (Role.CONTROLLER, Role.TRAINER, KEYS + CHANGES),
    (Role.OPERATOR, Role.TRAINER, RUN.outcomes),
    (Role.TRAINER, Role.TRAINER, RUN.cuts),
    *((speaker, Role.OPERATOR, RUN.metrics(speaker)) for speaker in Role),
    *((speaker, Role.OPERATOR, RUN.event("role.lost", speaker)) for speaker in Role),
    (Role.CONTROLLER, Role.OPERATOR, KEYS + RUN_STATE),
    (Role.NODE, Role.OPERATOR, NODES_KEYS + RUN.server_key("s0")),
    (Role.TRAINER, Role.OPERATOR, RUN.weights),
]
"""Who says something, who waits for it, and where."""


async def test_what_a_role_waits_for_reaches_it_once_and_from_whom_it_may_come(open_role: OpenRole) -> None:
    """As it is said, not at the next look."""
    buses = {role: await open_role(role) for role in Role}
    heard: list[tuple[Role, bytes]] = []

    def hearing(role: Role) -> Handler:
        return lambda message: heard.append((role, message.data))

    for role, bus in buses.items():
        for subject in permissions(role, RUN).subscribe:
            if not subject.startswith(("_INBOX", "$SRV", "$JS")):
                await bus.connection.listen(subject, hearing(role))
        await bus.api.ask("$JS.API.INFO")

    for number, (speaker, hearer, subject) in enumerate(HEARD):
        await buses[speaker].connection.publish(subject, b"%d" % number)
        await until(lambda one=(hearer, b"%d" % number): one in heard)  # type: ignore[misc]
    for bus in buses.values():
        await bus.api.ask("$JS.API.INFO")

    assert sorted(heard) == sorted(set(heard))


async def test_no_role_can_have_the_broker_trace_or_schedule_a_message_to_where_it_may_not_write(
    open_role: OpenRole,
) -> None:
    """By a header of what it publishes."""
    node, operator = await open_role(Role.NODE), await open_role(Role.OPERATOR)
    heard: list[str] = []
    await operator.connection.listen("areal.test.control.>", lambda message: heard.append(message.subject))
    before = await _counts(operator)
    own = RUN.trajectories("w", "0-0-0")

    for target in (RUN.control("pause"), KEYS + ADMITTED):
        for headers in (
            {"Nats-Trace-Dest": target},
            {"Nats-Trace-Dest": target, "Nats-Trace-Only": "true"},
            {"Nats-Schedule": "@every 1s", "Nats-Schedule-Target": target},
        ):
            await node.connection.publish(own, msgspec.json.encode({}), headers=headers)
    await node.publish(own, b"x")
    await operator.api.ask("$JS.API.INFO")

    assert heard == []
    assert set(await _counts(operator)) - set(before) <= {own}
