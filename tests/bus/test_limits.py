"""Whatever a node's key may write has a limit of its own: who fills it all keeps nobody else from writing."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from areal_async.bus import Bus, Delivery, Message, Role, declare
from areal_async.bus.streams import (
    MAX_NODES_KEYS,
    MAX_NODES_VALUE_BYTES,
    all_streams,
    forget_nodes,
    reserved_bytes,
    stream_configs,
)
from areal_async.config.settings import MIN_IMAGE_STREAM_BYTES, BusSettings, RolloutSettings, RunSettings, Settings
from areal_async.controller.evaluation import Evaluator
from areal_async.controller.tasks import Tasks
from areal_async.errors import StreamFullError, UserError
from areal_async.protocol.evaluations import EvalRecord, EvalResult, EvalTicket
from areal_async.protocol.run_state import Holder, RunState, ServerState
from areal_async.protocol.subjects import ADMITTED, CHECKPOINT, CONTROL, LAUNCHER, LINEAGE, RUN_STATE, Names
from areal_async.protocol.types import Admitted, DeadLetter, LineageRecord, Outcome, OutcomeKind, Version
from areal_async.protocol.wire import decode, encode
from areal_async.trainer.batch.feed import store_outcome
from tests.brokers import PATIENCE_S, OpenRole, fetch_all, until

pytestmark = pytest.mark.anyio

RUN = Names("test")
MAX_BYTES = 1 << 20
MAX_KEYS = 32
ROOM_BYTES = 24 << 20
LARGE = bytes(MAX_BYTES // 8)
SIZES = (len(LARGE), 1 << 13, 1 << 9)
NUM_TIMES = 2048
"""More than everything that is written in one go may take of the disk."""
BUCKETS = [f"KV_{RUN.bucket}", f"KV_{RUN.nodes_bucket}"]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A disk with a little more room than what nodes may fill."""
    monkeypatch.setattr("areal_async.bus.streams.MAX_EVAL_BYTES", MAX_BYTES)
    monkeypatch.setattr("areal_async.bus.streams.MAX_DEAD_BYTES", MAX_BYTES)
    monkeypatch.setattr("areal_async.bus.streams.MAX_NODES_KEYS", MAX_KEYS)
    monkeypatch.setattr("areal_async.bus.streams.ROOM_BYTES", ROOM_BYTES)
    return Settings(
        run=RunSettings(name="test", directory=tmp_path),
        rollout=RolloutSettings(
            max_stream_bytes=MAX_BYTES, max_trajectory_bytes=1 << 15, max_image_stream_bytes=MIN_IMAGE_STREAM_BYTES
        ),
        bus=BusSettings(operation_deadline_s=60.0, max_disk_bytes=64 << 20),
    )


def server(server_id: str, **said: Any) -> ServerState:
    return ServerState(server_id=server_id, node_id="n", url="", version="1-0", **said)


def result(index: int, *, error: str = "") -> EvalResult:
    return EvalResult(eval_id="1-0", index=index, reward=1.0, error=error, oldest="1-0", newest="1-0")


async def flood(thief: Bus, subject: str, *sizes: int) -> None:
    """Publish under ever new names until the broker takes no more, not even of the last size."""
    for size in sizes or SIZES:
        for number in range(NUM_TIMES):
            try:
                await thief.publish(subject.replace("*", f"x{size}-{number}"), bytes(size))
            except StreamFullError:
                break
        else:
            raise AssertionError(f"{subject}: nothing refuses it")


async def flood_all(thief: Bus) -> None:
    """Fill whatever a node may write to."""
    for subject in (
        "areal.test.trajectories.w.*", "areal.test.images.w.*", "areal.test.eval.results.*", RUN.undecodable,
    ):  # fmt: skip
        await flood(thief, subject)
    for keys in ("server.*", "node.x.*"):
        await flood(thief, f"$KV.{RUN.nodes_bucket}.{keys}", MAX_NODES_VALUE_BYTES // 2)
    for _ in range(20 << 20 >> 15):  # the newest 16 MB are kept
        await thief.emit(RUN.event("server.fenced", "node", "x"), bytes(1 << 15))
    await thief.api.ask("$JS.API.INFO")


@asynccontextmanager
async def answering(node: Bus, *, error: str = "") -> AsyncIterator[None]:
    """A good node."""

    async def answer(delivery: Delivery) -> None:
        ticket = decode(delivery.data, EvalTicket)
        said = result(ticket.index, error=error)
        await node.publish_patiently(RUN.eval_results(ticket.workflow), said, msg_id=f"{ticket.index}")
        await delivery.ack()

    async def run() -> None:
        inbox = node.consume(RUN.eval_stream, RUN.eval_nodes_consumer)
        async with inbox, anyio.create_task_group() as answers:
            while True:
                for delivery in await inbox.fetch(8, wait_s=2.0):
                    answers.start_soon(answer, delivery)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        yield
        tasks.cancel_scope.cancel()


async def evaluate(bus: Bus, settings: Settings, num_rows: int, *, question: str = "") -> list[EvalRecord]:
    rows: list[dict[str, Any]] = [{"question": f"{question}{index}"} for index in range(num_rows)]
    evaluator = Evaluator(bus, Tasks([("w", rows)]), file=settings.run.directory / "eval.jsonl")
    return await evaluator.evaluate(Version.parse("1-0"), due_step=0, on_result=int)


async def test_a_nodes_key_that_fills_all_it_may_leaves_the_others_their_room(
    open_role: OpenRole, settings: Settings
) -> None:
    buses = {role: await open_role(role) for role in Role}
    operator, controller, trainer = buses[Role.OPERATOR], buses[Role.CONTROLLER], buses[Role.TRAINER]
    node, thief = buses[Role.NODE], await open_role(Role.NODE, "thief")
    await node.put(RUN.server_key("s0"), server("s0"))
    await node.put(RUN.node_key("n0"), Holder(holder_id="a", host="h", pid=1, since=""))

    await flood_all(thief)

    sizes = {stream: (await operator.stream_state(stream)).num_bytes for stream in all_streams(RUN)}
    assert sum(sizes.values()) <= reserved_bytes(settings), sizes
    for number in range(64):  # 8 MB
        await controller.publish(RUN.tickets("w"), LARGE)
        await trainer.publish(RUN.outcomes, Outcome(group_id=f"0-{number}-0", kind=OutcomeKind.TRAINED, lineage=1))
    await trainer.publish(RUN.cuts, b"x")
    await controller.put(ADMITTED, Admitted(total=7))
    await controller.put(RUN_STATE, RunState())
    await controller.put("eval.1.w", Admitted())
    for key in (LINEAGE, CHECKPOINT, RUN.weights_key()):
        await trainer.put(key, LineageRecord(lineage=1))
    for key in (LAUNCHER, CONTROL, RUN.crew_key("node-0"), RUN.fleet_key("n0")):
        await operator.put(key, Admitted())
    assert await controller.get(ADMITTED, Admitted) != (None, 0)
    assert len(await trainer.read_log(RUN.outcomes_stream, RUN.log)) == 65
    assert len(await node.read_log(RUN.trajectories_stream, RUN.all_trajectories)) > 0

    servers = await controller.entries("server.", ServerState)
    assert {key: state for key, (state, _) in servers.items()} == {RUN.server_key("s0"): server("s0")}
    _, revision = servers[RUN.server_key("s0")]
    fenced = server("s0", fenced=True, reason="its node is gone")
    await controller.compare_and_set(RUN.server_key("s0"), fenced, revision)
    await node.put(RUN.server_key("s0"), server("s0", reason="x" * 1000))
    await node.put(RUN.node_key("n0"), Holder(holder_id="b", host="h", pid=1, since=""))
    with pytest.raises(StreamFullError, match="maximum messages exceeded"):
        await node.put(RUN.server_key("s1"), server("s1"))

    await forget_nodes(operator)
    await node.put(RUN.server_key("s1"), server("s1"))
    assert await operator.keys("server.") == [RUN.server_key("s1")]


@pytest.mark.parametrize("readable", [True, False])
async def test_as_many_keys_as_nodes_may_have_can_be_read(open_role: OpenRole, readable: bool) -> None:
    """The broker refuses to tell the newest values of more than 1024 subjects."""
    node, controller, operator = [await open_role(role) for role in (Role.NODE, Role.CONTROLLER, Role.OPERATOR)]
    stream = BUCKETS[1]
    config = (await operator.api.ask(f"$JS.API.STREAM.INFO.{stream}"))["config"]
    await operator.api.ask(f"$JS.API.STREAM.UPDATE.{stream}", {**config, "max_msgs": MAX_NODES_KEYS})
    await node.put(RUN.server_key("s0"), server("s0"))
    data = encode(server("other")) if readable else b"none"
    async with anyio.create_task_group() as storing:
        for number in range(MAX_NODES_KEYS - 1):
            storing.start_soon(node.publish, f"$KV.{RUN.nodes_bucket}.server.x{number}", data)

    assert (await operator.stream_state(stream)).num_messages == MAX_NODES_KEYS
    with capture_logs():
        servers = await controller.entries("server.", ServerState)

    assert len(servers) == (MAX_NODES_KEYS if readable else 1)
    assert servers[RUN.server_key("s0")][0] == server("s0")


async def test_an_evaluation_makes_room_for_itself_in_a_stream_that_is_full_of_what_nobody_asked(
    open_role: OpenRole, settings: Settings
) -> None:
    controller, node, thief = [await open_role(role) for role in (Role.CONTROLLER, Role.NODE, Role.NODE)]
    await thief.publish(RUN.eval_results("w"), result(2), msg_id="one that was asked of it")
    await flood(thief, "areal.test.eval.results.*")

    with anyio.fail_after(PATIENCE_S), capture_logs() as logs:
        async with answering(node):
            (record,) = await evaluate(controller, settings, 8)

    assert (record.num_scored, record.num_failed, record.accuracy) == (8, 0, 1.0)
    assert "evaluation.waits_for_room" in [one["event"] for one in logs]
    assert (await controller.get("eval.0.w", EvalRecord))[0] == record
    assert (await controller.stream_state(RUN.eval_stream)).num_messages == 0


async def test_results_that_are_more_than_the_stream_holds_come_one_after_another(
    open_role: OpenRole, settings: Settings
) -> None:
    controller, node = await open_role(Role.CONTROLLER), await open_role(Role.NODE)
    num_rows, error = 12, "x" * (MAX_BYTES // 4)

    with anyio.fail_after(PATIENCE_S):
        async with answering(node, error=error):
            (record,) = await evaluate(controller, settings, num_rows)

    assert (record.num_scored, record.num_failed) == (0, num_rows)


async def test_tickets_that_are_more_than_the_stream_holds_leave_room_for_their_results(
    open_role: OpenRole, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.controller.evaluation.TICKETS_BYTES", MAX_BYTES // 16)
    controller, node = await open_role(Role.CONTROLLER), await open_role(Role.NODE)
    num_rows, question = 4 * MAX_BYTES // 2000, "x" * 2000

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_watch_room, controller)
            async with answering(node, error="x" * 1500):
                (record,) = await evaluate(controller, settings, num_rows, question=question)
            tasks.cancel_scope.cancel()

    assert (record.num_scored, record.num_failed) == (0, num_rows)


async def _watch_room(bus: Bus) -> None:
    while True:
        state = await bus.stream_state(RUN.eval_stream)
        assert state.num_bytes < 0.9 * MAX_BYTES, "a result has to find room"
        await anyio.sleep(0.01)


async def test_those_who_wait_for_room_are_let_in_in_the_order_in_which_they_came(open_role: OpenRole) -> None:
    node, thief, operator = [await open_role(role) for role in (Role.NODE, Role.NODE, Role.OPERATOR)]
    await flood(thief, "areal.test.eval.results.*")

    async with anyio.create_task_group() as waiting:
        for index in range(4):
            waiting.start_soon(_publish, node, index)
            await until(lambda before=index: _is_waiting(node, before))  # type: ignore[misc]
        await operator.api.ask(f"$JS.API.STREAM.PURGE.{RUN.eval_stream}")

    stored = await operator.read_log(RUN.eval_stream, RUN.eval_results("w"))
    assert [decode(one.data, EvalResult).index for one in stored] == [0, 1, 2, 3]


def _is_waiting(node: Bus, num_before: int) -> bool:
    turn = node._full_turn.statistics()
    return turn.locked and turn.tasks_waiting == num_before


async def _publish(node: Bus, index: int) -> None:
    await node.publish_patiently(RUN.eval_results("w"), result(index, error="x" * 2000), msg_id=str(index))


async def test_no_flood_of_dead_letters_displaces_the_first_or_keeps_a_group_from_its_outcome(
    open_role: OpenRole,
) -> None:
    node, trainer, operator = [await open_role(role) for role in (Role.NODE, Role.TRAINER, Role.OPERATOR)]
    first = Message(RUN.tickets_stream, 7, RUN.tickets("w"), {}, b"what it could not read")
    await node.dead_letter(first, "it is none")
    await flood(node, RUN.undecodable, *SIZES, 1 << 6)

    dead = Outcome(group_id="0-1-0", kind=OutcomeKind.DEAD, lineage=1, reason="it broke")
    with capture_logs() as logs:
        await store_outcome(trainer, dead)
        await trainer.dead_letter(first._replace(sequence=8), "it is none, either")

    (outcome,) = await operator.read_log(RUN.outcomes_stream, RUN.outcomes)
    assert decode(outcome.data, Outcome) == dead
    (letter, *_) = await operator.read_log(RUN.dead_stream, RUN.undecodable)
    assert decode(letter.data, DeadLetter).data == first.data
    assert trainer.num_dead_letters == 1
    assert {"dead_letter.no_room", "message.buried"} <= {one["event"] for one in logs}


async def test_the_store_of_an_earlier_version_that_holds_more_gets_the_limits_and_loses_nothing(
    open_role: OpenRole, settings: Settings
) -> None:
    operator, node = await open_role(Role.OPERATOR), await open_role(Role.NODE)
    await _undo_limits(operator, settings)
    for number in range(16):
        await operator.publish(RUN.eval_results("w"), LARGE, msg_id=str(number))
        await operator.publish(RUN.undecodable, LARGE, msg_id=str(number))
    await operator.publish(f"$KV.{RUN.bucket}.server.old", b"{}")
    await operator.put(ADMITTED, Admitted(total=7))

    await declare(operator, settings)

    for stream in (RUN.eval_stream, RUN.dead_stream):
        state = await operator.stream_state(stream)
        assert (state.num_messages, state.max_bytes) == (16, MAX_BYTES)
        assert state.num_bytes > MAX_BYTES
    for subject in (RUN.eval_results("w"), RUN.undecodable):
        with pytest.raises(StreamFullError, match="maximum bytes exceeded"):
            await node.publish(subject, b"x")
    async with operator.consume(RUN.eval_stream, RUN.eval_controller_consumer) as inbox:
        await operator.settle(await fetch_all(inbox, 16))
    await node.publish(RUN.eval_results("w"), b"x")
    await node.put(RUN.server_key("s0"), server("s0"))
    assert await operator.keys("server.") == [RUN.server_key("s0")], "what nodes said elsewhere is not looked for"

    await forget_nodes(operator)

    assert await operator.keys(ADMITTED, "server.") == [ADMITTED]
    assert await operator.get_last(BUCKETS[0], f"$KV.{RUN.bucket}.server.old") is None


async def _undo_limits(operator: Bus, settings: Settings) -> None:
    """Make the streams what they were before they had limits."""
    await operator.api.ask(f"$JS.API.STREAM.DELETE.{BUCKETS[1]}")
    configs = {config["name"]: config for config in stream_configs(settings)}
    for stream in (RUN.eval_stream, RUN.dead_stream):
        await operator.api.ask(f"$JS.API.STREAM.UPDATE.{stream}", {**configs[stream], "max_bytes": -1})
    events = configs[RUN.events_stream]
    subjects = [subject for subject in events["subjects"] if BUCKETS[1] not in subject]
    await operator.api.ask(f"$JS.API.STREAM.UPDATE.{RUN.events_stream}", {**events, "subjects": subjects})


async def test_another_number_of_keys_takes_effect_in_a_store_that_holds_more(
    open_role: OpenRole, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, node = await open_role(Role.OPERATOR), await open_role(Role.NODE)
    for server_id in ("s0", "s1", "s2"):
        await node.put(RUN.server_key(server_id), server(server_id))
    monkeypatch.setattr("areal_async.bus.streams.MAX_NODES_KEYS", 2)

    await declare(operator, settings)

    await node.put(RUN.server_key("s0"), server("s0", fenced=True))
    with pytest.raises(StreamFullError):
        await node.put(RUN.server_key("s3"), server("s3"))
    assert await operator.keys("server.") == [RUN.server_key(server_id) for server_id in ("s0", "s1", "s2")]


async def test_a_disk_that_nodes_could_fill_is_refused(open_role: OpenRole, settings: Settings) -> None:
    operator = await open_role(Role.OPERATOR)
    need = reserved_bytes(settings) + ROOM_BYTES
    tight = settings.model_copy(update={"bus": settings.bus.model_copy(update={"max_disk_bytes": need - 1})})

    with pytest.raises(UserError, match=rf"bus\.max_disk_bytes: got {need - 1}, need at least {need} .*; raise it"):
        await declare(operator, tight)
