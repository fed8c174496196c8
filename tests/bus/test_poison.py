"""A message that is none of ours, on every stream: its reader goes on, it becomes a dead letter, and it is counted.

The readers are the roles' real loops, the broker is the real one. What waits for the message ends all the same.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from areal_async.bus import Bus, Role
from areal_async.config.settings import (
    BusSettings,
    DatasetSettings,
    EvalSettings,
    InferenceSettings,
    ModelSettings,
    RolloutSettings,
    RunSettings,
    SamplingSettings,
    Settings,
    TaskSettings,
)
from areal_async.controller.controller import Controller
from areal_async.errors import WireError
from areal_async.protocol import wire
from areal_async.protocol.evaluations import EvalResult, EvalTicket
from areal_async.protocol.run_state import ServerState
from areal_async.protocol.subjects import ADMITTED
from areal_async.protocol.types import (
    Admitted,
    CutKind,
    DeadLetter,
    Outcome,
    OutcomeKind,
    Record,
    Ticket,
    WeightsVersion,
)
from areal_async.rollout.node import run_node
from areal_async.trainer.batch.payloads import fetch, slots_of
from tests.brokers import PATIENCE_S, OpenRole, fetch_all, until
from tests.bus.stored import WORKFLOW, store, ticket, trajectory
from tests.bus.test_controller import ROWS, World, controlling
from tests.bus.test_feed import running
from tests.bus.test_node import RUN_DEADLINE_S

pytestmark = pytest.mark.anyio

TESTS = Path(__file__).parents[1]
MODEL = TESTS.parent / "configs" / "models" / "tiny"
GARBAGE = b'{"schema":1,"group_id":"\xff'


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("PYTHONPATH", f"{TESTS / 'fakes'}:{TESTS.parent}")
    workflow = tmp_path / "w.py"
    workflow.write_text("async def w(prompt, policy):\n    return float(len((await policy.complete([5])).token_ids))\n")
    return Settings(
        run=RunSettings(name="test", directory=tmp_path, steps=2),
        tasks=(TaskSettings(workflow=str(workflow), dataset=DatasetSettings(path="none")),),
        model=ModelSettings(path=str(MODEL), dtype="float32"),
        rollout=RolloutSettings(
            group_size=2, min_group_size=2, batch_groups=2, max_staleness=1, max_attempts=2, max_stream_bytes=64 << 20,
            sampling=SamplingSettings(max_new_tokens=8),
        ),
        inference=InferenceSettings(backend="sglang", python=Path(sys.executable), start_deadline_s=PATIENCE_S),
        eval=EvalSettings(every_steps=0),
        bus=BusSettings(operation_deadline_s=60.0, max_disk_bytes=8 << 30),
    )  # fmt: skip


@pytest.fixture
async def operator(open_role: OpenRole) -> Bus:
    return await open_role(Role.OPERATOR)


async def dead_letters(operator: Bus, count: int) -> list[DeadLetter]:
    """All dead letters, once there are ``count``."""

    async def letters() -> list[DeadLetter]:
        stored = await operator.read_log(operator.names.dead_stream, operator.names.undecodable)
        return [wire.decode(message.data, DeadLetter) for message in stored]

    async def is_so() -> bool:
        return len(await letters()) >= count

    await until(is_so)
    return await letters()


async def counted(operator: Bus, role: str, *, at_least: int) -> None:
    """Wait until a role's metrics count this many."""
    with anyio.fail_after(PATIENCE_S):
        async with operator.subscribe(operator.names.all_metrics) as reports:
            async for subject, data in reports:
                said = msgspec.json.decode(data, type=dict[str, Any])
                if subject.split(".")[3] == role and said.get("num_dead_letters", 0) >= at_least:
                    return


async def stored_in(bus: Bus, stream: str) -> int:
    return (await bus.stream_state(stream)).num_messages


@asynccontextmanager
async def running_node(node: Bus, settings: Settings) -> AsyncIterator[None]:
    async def run() -> None:
        await run_node(settings, node, node_id="n0", run_directory=settings.run_directory, grace_s=0.1)

    with anyio.fail_after(RUN_DEADLINE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            yield
            tasks.cancel_scope.cancel()


# tickets

UNUSABLE_TICKETS = {
    "garbage": GARBAGE,
    "empty": b"",
    "another schema": wire.encode(ticket("0-1-0", group_size=2)).replace(b'"schema":1', b'"schema":2'),
    "no group": wire.encode(ticket("zero", group_size=2)),
    "too large a group": wire.encode(ticket("0-1-0", group_size=1 << 40)),
    "no version": wire.encode(ticket("0-1-0", group_size=2, version="new")),
    "nested too deep": b'{"schema":1,"row":' + b"[" * 100_000,
}


async def test_a_node_goes_on_after_tickets_that_are_none(
    open_role: OpenRole, operator: Bus, settings: Settings
) -> None:
    names = operator.names
    node, trainer = await open_role(Role.NODE), await open_role(Role.TRAINER)
    await trainer.put(names.weights_key(), WeightsVersion(version="1-0", path=str(MODEL)))
    for data in UNUSABLE_TICKETS.values():
        await operator.publish(names.tickets(WORKFLOW), data)
        await operator.publish(names.eval_tickets(WORKFLOW), data)
    await operator.publish(names.tickets(WORKFLOW), ticket("0-2-0", group_size=2))
    evaluation = EvalTicket(eval_id="1-0", index=0, workflow=WORKFLOW, row={})
    await operator.publish(names.eval_tickets(WORKFLOW), evaluation)

    async with running_node(node, settings):

        async def are_settled() -> bool:
            left = [await stored_in(operator, stream) for stream in (names.tickets_stream, names.eval_stream)]
            return left == [0, 1]  # the result of the evaluation

        await until(are_settled)
        letters = await dead_letters(operator, 2 * len(UNUSABLE_TICKETS))
        await counted(operator, "node", at_least=2 * len(UNUSABLE_TICKETS))

    assert len(letters) == 2 * len(UNUSABLE_TICKETS)
    assert {letter.stream for letter in letters} == {names.tickets_stream, names.eval_stream}
    assert {letter.reader for letter in letters} == {"node"}
    assert GARBAGE in {letter.data for letter in letters}
    assert await stored_in(operator, names.trajectories_stream) == 1


async def test_the_trainer_goes_on_after_tickets_that_are_none(
    open_role: OpenRole, operator: Bus, settings: Settings
) -> None:
    names = operator.names
    future = wire.encode(ticket("0-1-0", group_size=2, version="9-0"))
    for data in (*UNUSABLE_TICKETS.values(), future):
        await operator.publish(names.tickets(WORKFLOW), data)
    await operator.publish(names.tickets(WORKFLOW), ticket("0-2-0", group_size=2))

    async with running(await open_role(Role.TRAINER), settings) as station:
        await until(lambda: len(station.feed.planner.open) == 1)
        letters = await dead_letters(operator, len(UNUSABLE_TICKETS) + 1)

    assert [letter.sequence for letter in letters] == list(range(1, len(UNUSABLE_TICKETS) + 2))
    assert station.bus.num_dead_letters == len(letters)


# trajectories


def _headers(**changes: object) -> dict[str, str]:
    payload, headers, _ = wire.encode_message(
        [trajectory("0-0-0", 0), trajectory("0-0-0", 1)],
        Ticket(row={}, group_id="0-0-0", workflow=WORKFLOW, version="1-0", group_size=2),
    )
    group = msgspec.json.decode(headers[wire.GROUP_HEADER])
    slots = msgspec.json.decode(headers[wire.SLOTS_HEADER])
    for key, value in changes.items():
        if key in group:
            group[key] = value
        else:
            slots[0][key] = value
    encoded = {wire.GROUP_HEADER: group, wire.SLOTS_HEADER: slots}
    return {name: msgspec.json.encode(value).decode() for name, value in encoded.items()}


UNUSABLE_HEADERS = {
    "none": {},
    "garbage": {wire.GROUP_HEADER: "{", wire.SLOTS_HEADER: "[]"},
    "status of the broker": {"Status": "404", "Nats-Sequence": "x", "Nats-Msg-Size": "x"},
    "another schema": _headers(schema=2),
    "another group": _headers(group_id="0-1-0"),
    "another workflow": _headers(workflow="v"),
    "no group size": _headers(group_size=0),
    "no version": _headers(oldest="first"),
    "a version to come": _headers(newest="7-0"),
    "a ticket to come": _headers(ticket_version="7-0"),
    "a sibling outside": _headers(sibling=2),
    "a negative index": _headers(index=-1),
}


@pytest.mark.parametrize("headers", UNUSABLE_HEADERS.values(), ids=UNUSABLE_HEADERS.keys())
async def test_a_group_ends_failed_when_its_stored_message_cannot_be_read(
    open_role: OpenRole, operator: Bus, settings: Settings, headers: dict[str, str]
) -> None:
    names, node = operator.names, await open_role(Role.NODE)
    async with running(await open_role(Role.TRAINER), settings) as station:
        station.feed.allow(1)
        await node.publish(names.trajectories(WORKFLOW, "0-0-0"), b"x", headers=headers)
        for index in (3, 4):
            await store(node, f"0-{index}-0", [0, 1], group_size=2)

        cut = await station.cut(1)
        (outcome,) = await station.outcomes(1)
        (letter,) = await dead_letters(operator, 1)

        await until_stored(operator, operator.names.trajectories_stream, 2)  # the two groups of the cut
    assert [group.group_id for group in cut.groups] == ["0-3-0", "0-4-0"]
    assert (outcome.group_id, outcome.kind, outcome.num_failed_attempts) == ("0-0-0", OutcomeKind.FAILED, 1)
    assert outcome.reason.startswith("its stored message 1 cannot be read: ")
    assert (letter.stream, letter.sequence, letter.reader) == (names.trajectories_stream, 1, "trainer")
    assert station.bus.num_dead_letters == 1


async def test_what_is_kept_of_messages_that_are_none_is_bounded_and_their_number_known(
    open_role: OpenRole, operator: Bus, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.bus.dead.MAX_STORED_BYTES", 1)
    monkeypatch.setattr("areal_async.bus.dead.MAX_LETTERS", 3)
    async with running(await open_role(Role.TRAINER), settings) as station:
        for _ in range(5):
            await operator.publish(operator.names.tickets(WORKFLOW), GARBAGE)
        await until(lambda: station.bus.num_dead_letters == 5)

        letters = await dead_letters(operator, 3)

    assert [letter.data for letter in letters] == [GARBAGE, b"", b""]
    assert all(letter.reason.startswith("Ticket: ") for letter in letters)


async def until_stored(operator: Bus, stream: str, count: int) -> None:
    async def is_so() -> bool:
        return await stored_in(operator, stream) == count

    await until(is_so)


async def test_a_payload_that_belies_its_header_is_missing_from_its_cut_and_a_dead_letter(
    open_role: OpenRole, operator: Bus, settings: Settings
) -> None:
    node, names = await open_role(Role.NODE), operator.names
    lying = trajectory("0-0-0", 0, version="1-0")
    lying.sequences[0].versions[1] = 0  # of a lineage long gone
    payload, headers, _ = wire.encode_message(
        [lying, trajectory("0-0-0", 1)],
        Ticket(row={}, group_id="0-0-0", workflow=WORKFLOW, version="1-0", group_size=2),
    )
    async with running(await open_role(Role.TRAINER), settings) as station:
        station.feed.allow(1)
        await node.publish(names.trajectories(WORKFLOW, "0-0-0"), payload, headers=headers)
        await store(node, "0-1-0", [0, 1], group_size=2)

        found, missing, _ = await fetch(station.bus, slots_of(await station.cut(1)))

    assert list(missing) == [("0-0-0", 0)]
    assert len(found) == 3
    (letter,) = await dead_letters(operator, 1)
    assert "versions outside 1-0 to 1-0" in letter.reason
    assert letter.data == payload


async def test_a_node_runs_what_an_unreadable_message_does_not_show(
    open_role: OpenRole, operator: Bus, settings: Settings
) -> None:
    names = operator.names
    node, other = await open_role(Role.NODE), await open_role(Role.NODE, "1")
    await operator.put(names.weights_key(), WeightsVersion(version="1-0", path=str(MODEL)))
    await operator.publish(names.trajectories(WORKFLOW, "0-0-0"), b"x")
    await operator.publish(names.tickets(WORKFLOW), ticket("0-0-0", group_size=2))
    async with other.consume(names.tickets_stream, names.nodes_consumer) as inbox:
        (delivery,) = await fetch_all(inbox, 1)
        await delivery.nak()

    async with running_node(node, settings):
        await until_stored(operator, operator.names.trajectories_stream, 2)


# the log


async def test_controller_and_trainer_go_on_after_log_entries_that_are_none(
    open_role: OpenRole, operator: Bus, settings: Settings
) -> None:
    names = operator.names
    unusable: list[tuple[str, bytes | Record]] = [
        (names.cuts, GARBAGE),
        (names.outcomes, GARBAGE),
        (names.outcomes, Outcome(group_id="zero", kind=OutcomeKind.FAILED, lineage=1)),
        (names.outcomes, b""),
    ]
    for subject, entry in unusable:
        await operator.publish(subject, entry, headers={"Status": "404"})
    world = World(await open_role(Role.NODE), await open_role(Role.TRAINER))
    await world.hold("1-0")

    async with controlling(open_role, settings) as controller, running(world.trainer, settings) as station:
        tickets = await world.tickets(4, controller)
        await operator.publish(names.cuts, GARBAGE)  # and once more, under the trainer's hands
        foreign = Outcome(group_id=f"0-{len(ROWS)}-0", kind=OutcomeKind.FAILED, lineage=1, reason="no such prompt")
        await operator.publish(names.outcomes, foreign)
        station.feed.allow(1)
        for one in tickets[:2]:
            await store(world.node, one.group_id, [0, 1], group_size=2)
        assert len((await station.cut(1)).groups) == 2
        await world.hold("1-1")
        await world.tickets(6, controller)
        letters = await dead_letters(operator, len(unusable) + 2)
        await counted(operator, "controller", at_least=len(unusable) + 2)

    assert len(letters) == len(unusable) + 2, "one for each, however many read it"
    assert {letter.stream for letter in letters} == {names.outcomes_stream}


async def test_what_becomes_of_groups_that_nobody_admitted_changes_no_books(
    open_role: OpenRole, operator: Bus, settings: Settings
) -> None:
    world = World(await open_role(Role.NODE), await open_role(Role.TRAINER))
    await world.cut(CutKind.BEGIN, 0)
    await world.hold("1-0")
    async with controlling(open_role, settings) as controller:
        tickets = await world.tickets(4, controller)
        before = _books(controller)
        for number in range(30):  # more than end a run, were they its own
            await world.outcome(f"900-{number % len(ROWS)}-0", OutcomeKind.FAILED)
        await world.cut(CutKind.CUT, 1, ["901-0-0", "901-1-0"])
        await dead_letters(operator, 30)
        assert _books(controller) == before

        await world.outcome(tickets[0].group_id, OutcomeKind.FAILED, failed=1)
        await until(lambda: controller.report()["settled"] == 1)


def _books(controller: Controller) -> list[int]:
    report = controller.report()
    return [report[name] for name in ("admitted", "settled", "in_flight", "credits")]


async def test_a_stored_message_cannot_pass_for_the_end_of_its_stream(operator: Bus) -> None:
    names = operator.names
    for status in ("404", "204", "503", "408"):
        await operator.publish(names.outcomes, b"x", headers={"Status": status, "Description": "the end"})

    assert len(await operator.read_log(names.outcomes_stream, names.log)) == 4
    assert await operator.get_message(names.outcomes_stream, 1) is not None


@pytest.mark.both_loops
@pytest.mark.parametrize("headers", [b"NATS", b"NATS/1.0 \xff\xfe", b"\r\n\r\n\r\n", b"NATS/1.0\r\nA", b"X" * 300])
async def test_headers_that_are_none_do_not_stop_the_connection(
    open_role: OpenRole, operator: Bus, headers: bytes
) -> None:
    names, node = operator.names, await open_role(Role.NODE)
    client = operator.connection.client
    size = f"{len(headers)} {len(headers) + len(GARBAGE)}"
    command = f"HPUB {names.tickets(WORKFLOW)} {size}\r\n".encode()
    await client._send_command(command + headers + GARBAGE + b"\r\n")
    await client.flush()

    async with node.consume(names.tickets_stream, names.nodes_consumer) as inbox:
        (delivery,) = await fetch_all(inbox, 1)
        assert await node.decode(delivery, Ticket) is None
    assert node.connection.num_losses == 0
    (letter,) = await dead_letters(operator, 1)
    assert letter.data == GARBAGE
    await until_stored(operator, names.tickets_stream, 0)


# evaluation


async def test_an_evaluation_ends_though_tickets_and_results_are_none(
    open_role: OpenRole, operator: Bus, settings: Settings
) -> None:
    names = operator.names
    world = World(await open_role(Role.NODE), await open_role(Role.TRAINER))
    await world.hold("1-0")
    asked: list[tuple[int, int]] = []

    async def answer() -> None:
        """Row 0 is answered; row 1 at the second attempt; row 2's answers are never readable."""
        async with world.node.consume(names.eval_stream, names.eval_nodes_consumer) as inbox:
            while True:
                for delivery in await inbox.fetch(8, wait_s=1.0):
                    row = wire.decode(delivery.data, EvalTicket)
                    asked.append((row.index, row.attempt))
                    result: bytes | EvalResult = EvalResult(eval_id="1-0", index=row.index, reward=1.0)
                    if row.index > row.attempt:
                        result = GARBAGE
                    if row.index == 2:
                        result = wire.encode(EvalResult(eval_id="1-0", index=-1, reward=1.0))
                    await world.node.publish(names.eval_results("w"), result)
                    await delivery.ack()

    async with anyio.create_task_group() as nodes:
        nodes.start_soon(answer)
        with anyio.fail_after(RUN_DEADLINE_S):
            async with controlling(open_role, settings, held_out=ROWS[:3]):
                await until((settings.run.directory / "eval.jsonl").exists)
        nodes.cancel_scope.cancel()

    assert sorted(asked) == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
    line = msgspec.json.decode((settings.run.directory / "eval.jsonl").read_bytes())
    assert (line["accuracy"], line["num_scored"], line["num_failed"]) == (1.0, 2, 1)
    assert len(await dead_letters(operator, 4)) == 4


# keys


async def test_a_value_that_is_none_leaves_the_one_before_it_in_force(open_role: OpenRole, operator: Bus) -> None:
    controller = await open_role(Role.CONTROLLER)
    await controller.compare_and_set(ADMITTED, Admitted(total=1), 0)
    await controller.put(ADMITTED, Admitted(total=7))
    key = f"$KV.{operator.names.bucket}.{ADMITTED}"
    for data in (GARBAGE, b"", wire.encode(Admitted(total=-1))):
        await operator.publish(key, data)

    record, revision = await controller.get(ADMITTED, Admitted)
    again, _ = await controller.get(ADMITTED, Admitted)
    after = await controller.compare_and_set(ADMITTED, Admitted(total=8), revision)

    assert record == again == Admitted(total=7)
    assert await controller.get(ADMITTED, Admitted) == (Admitted(total=8), after)
    assert len(await dead_letters(operator, 3)) == controller.num_dead_letters == 3


async def test_a_key_without_any_readable_value_is_new_or_an_error_but_never_rewound(
    open_role: OpenRole, operator: Bus
) -> None:
    controller, key = await open_role(Role.CONTROLLER), f"$KV.{operator.names.bucket}.{ADMITTED}"
    await operator.publish(key, GARBAGE)
    assert (await controller.get(ADMITTED, Admitted))[0] is None

    await controller.put(ADMITTED, Admitted(total=7))
    for _ in range(16):
        await operator.publish(key, GARBAGE)

    with pytest.raises(WireError, match="16 values that cannot be read"):
        await (await open_role(Role.CONTROLLER, "1")).get(ADMITTED, Admitted)
    assert (await controller.get(ADMITTED, Admitted))[0] == Admitted(total=7), "who wrote it knows it"


async def test_nodes_and_controller_go_on_after_values_that_are_none(
    open_role: OpenRole, operator: Bus, settings: Settings
) -> None:
    names = operator.names
    world = World(await open_role(Role.NODE), await open_role(Role.TRAINER))
    for _ in range(17):
        await operator.publish(f"$KV.{names.nodes_bucket}.server.mad", GARBAGE)
    await operator.publish(f"$KV.{names.bucket}.{names.weights_key()}", GARBAGE)
    seen: list[str] = []

    async def watch() -> None:
        async for version in world.node.watch_key(names.weights_key(), WeightsVersion):
            seen.append(version.version)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        async with controlling(open_role, settings) as controller:
            await world.hold("1-0")
            await operator.publish(f"$KV.{names.bucket}.{names.weights_key()}", GARBAGE)
            await world.hold("1-1")
            await world.tickets(4, controller)
            await until(lambda: bool(seen) and seen[-1] == "1-1")
            assert list(await world.node.entries("server.", ServerState)) == [names.server_key("s")]
        tasks.cancel_scope.cancel()


# what is stored nowhere


async def test_the_controller_goes_on_after_reports_that_are_none(
    open_role: OpenRole, operator: Bus, settings: Settings
) -> None:
    world = World(await open_role(Role.NODE), await open_role(Role.TRAINER))
    async with controlling(open_role, settings) as controller:
        for data in (GARBAGE, b"", b"[]", b"1", b"[" * 100_000):
            await world.node.emit(operator.names.metrics("node", "n0"), data)
        await world.hold("1-0")

        assert len(await world.tickets(4, controller)) == 4
