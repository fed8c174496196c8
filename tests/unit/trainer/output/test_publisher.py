"""A version is announced when it can be had: with the group it is broadcast to, then from disk; never backwards."""

import os
import threading
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest
import torch
from torch import Tensor

from areal_async.bus import Bus, Role
from areal_async.config.settings import InferenceSettings, Settings
from areal_async.errors import PipelineError
from areal_async.inference.faults import StagingFault
from areal_async.inference.supervision.deltas import check_files
from areal_async.inference.supervision.swap import Staging
from areal_async.inference.weight_group import GLOO
from areal_async.protocol.evaluations import EvalRecord
from areal_async.protocol.run_state import ServerState
from areal_async.protocol.types import ADAPTER, DISK, UpdateGroup, Version, WeightsVersion
from areal_async.protocol.wire import decode
from areal_async.trainer.batch.lineage import Lineage
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.policy import FsdpEngine
from areal_async.trainer.engine.threads import BackgroundJob, EngineThread
from areal_async.trainer.output.broadcast import Broadcaster
from areal_async.trainer.output.first_evaluation import FirstEvaluation
from areal_async.trainer.output.publisher import WeightsPublisher
from areal_async.trainer.output.served import ServedWeights, sends_adapter
from areal_async.trainer.output.version_writer import VersionWriter
from tests.brokers import OpenRole
from tests.unit.trainer.models import engine_of
from tests.unit.trainer.receivers import DEADLINE_S, Receiver, are_equal, state_of

SHORT_S = 0.1

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def engine(model: Path, ranks: Ranks) -> FsdpEngine:
    return engine_of(model, ranks)


@asynccontextmanager
async def publishing(
    bus: Bus,
    directory: Path,
    engine: FsdpEngine,
    *,
    weight_transfer: str = "disk",
    disk_every: int = 0,
    start_deadline_s: float = 60.0,
    sends_adapter: bool = False,
    evaluated: Collection[str] = (),
) -> AsyncIterator[WeightsPublisher]:
    """Rank 0's publisher of a new lineage."""
    settings = InferenceSettings.model_validate(
        {"bucket_bytes": 10_000, "start_deadline_s": start_deadline_s, "weight_transfer": weight_transfer}
        | ({"disk_every": disk_every} if disk_every else {})
    )
    lineage = await Lineage.take(bus)
    broadcaster = Broadcaster(prefix=f"test-{lineage.number}", address="127.0.0.1", backend=GLOO, deadline_s=DEADLINE_S)
    weights = ServedWeights(
        engine,
        bucket_bytes=settings.bucket_bytes,
        is_adapter=sends_adapter,
        is_broadcast=weight_transfer == "distributed",
    )
    async with anyio.create_task_group() as tasks:
        yield WeightsPublisher(
            settings=settings,
            versions=VersionWriter(weights, directory / "weights", engine.dims.all),
            thread=EngineThread(torch.device("cpu")),
            writing=BackgroundJob(tasks),
            copying=BackgroundJob(tasks),
            holding=BackgroundJob(tasks),
            first_evaluation=FirstEvaluation(bus, evaluated),
            bus=bus,
            lineage=lineage,
            broadcaster=broadcaster if weight_transfer == "distributed" else None,
        )
    broadcaster.close()


class Server:
    """A server and its node, as the bus sees them."""

    def __init__(self, bus: Bus, server_id: str) -> None:
        self._bus = bus
        self.receiver = Receiver(server_id)
        self.seen: list[WeightsVersion] = []

    async def say(self, **state: Any) -> None:
        await self._bus.put(
            self._bus.names.server_key(self.receiver.server_id), state_of(self.receiver.server_id, **state)
        )

    async def run(self, *, gone_after: int = 99) -> None:
        """Receive what is announced, and note it."""
        async for announced in self._bus.watch_key(self._bus.names.weights_key(), WeightsVersion, poll_s=0.05):
            self.seen.append(announced)
            if announced.group and self.receiver.server_id in announced.group.ranks:
                self.receiver.receive(announced.group, announced.buckets, gone_after=gone_after)


async def newest(bus: Bus) -> WeightsVersion:
    announced, _ = await bus.get(bus.names.weights_key(), WeightsVersion)
    assert announced is not None
    return announced


async def until(bus: Bus, condition: Callable[[WeightsVersion], bool]) -> WeightsVersion:
    """Wait until such a version is announced."""
    async for announced in bus.watch_key(bus.names.weights_key(), WeightsVersion, poll_s=0.05):
        if condition(announced):
            return announced
    raise AssertionError("the watch has ended")


@pytest.mark.parametrize("weight_transfer", ["disk", "distributed"])
async def test_without_servers_a_version_is_announced_from_disk(
    weight_transfer: str, open_role: OpenRole, tmp_path: Path, engine: FsdpEngine
) -> None:
    bus = await open_role(Role.TRAINER)
    async with publishing(bus, tmp_path, engine, weight_transfer=weight_transfer) as publisher:
        for step in range(5):
            await publisher.publish(Version(1, step))
        await publisher.announce_final()

        announced = await newest(bus)

    assert (announced.version, announced.kind, announced.final) == ("1-4", "disk", True)
    assert Path(announced.path) == tmp_path / "weights" / "1-4"
    assert announced.sha256.keys() == {"model.safetensors"}
    assert "model.norm.weight" in announced.tensors_sha256
    assert sorted(os.listdir(tmp_path / "weights")) == ["1-2", "1-3", "1-4"]


async def test_servers_get_a_lineages_first_version_once_it_is_on_disk_and_the_next_by_broadcast_alone(
    open_role: OpenRole, tmp_path: Path, engine: FsdpEngine
) -> None:
    bus, node = await open_role(Role.TRAINER), await open_role(Role.NODE)
    member, other = Server(node, "0-0"), Server(node, "0-1")
    await member.say()
    await other.say(reason="starting")
    async with publishing(bus, tmp_path, engine, weight_transfer="distributed") as publisher:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(member.run)
            tasks.start_soon(other.run)
            await publisher.publish(Version(1, 1))
            await publisher.publish(Version(1, 2))
            await publisher.finish()
            received = await anyio.to_thread.run_sync(member.receiver.finish)
            last = await newest(bus)
            await publisher.announce_final()
            tasks.cancel_scope.cancel()

        final = await newest(bus)
        messages = await bus.read_log(f"KV_{bus.names.bucket}", f"$KV.{bus.names.bucket}.{bus.names.weights_key()}")

    first = member.seen[0]
    assert (first.version, first.kind, first.on_disk) == ("1-1", "distributed", "1-1")
    assert first.group is not None
    assert first.group.ranks == {"0-0": 1}
    assert first.group.incarnations == {"0-0": "first"}
    assert (last.version, last.path, last.sha256, last.on_disk) == ("1-2", "", {}, "1-1")
    assert (final.version, final.kind, final.group, final.on_disk, final.final) == ("1-2", "disk", None, "1-2", True)
    every = [decode(message.data, WeightsVersion) for message in messages]
    assert [(one.version, bool(one.path)) for one in every] == [
        ("1-1", True),
        ("1-2", False),
        ("1-2", True),
        ("1-2", True),
    ]
    assert len({one.group.name for one in every if one.group}) == 1
    assert are_equal(received, engine.gather_weights(engine.plan_buckets(max_bytes=1 << 30)))
    member.receiver.leave()


async def test_a_version_is_announced_without_waiting_for_the_copy_of_an_older_one(
    open_role: OpenRole, tmp_path: Path, engine: FsdpEngine
) -> None:
    bus, node = await open_role(Role.TRAINER), await open_role(Role.NODE)
    member, is_written = Server(node, "0-0"), anyio.Event()
    await member.say()
    async with publishing(bus, tmp_path, engine, weight_transfer="distributed", disk_every=1) as publisher:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(member.run)
            await publisher.publish(Version(1, 1))
            await publisher.writing.finish()
            await publisher.copying.start(is_written.wait)  # a disk that takes its time
            for step in (2, 3):
                await publisher.publish(Version(1, step))
            assert [(one.version, one.on_disk) for one in [await newest(bus)]] == [("1-3", "1-1")]
            await publisher.publish(Version(1, 4), is_kept=True)
            assert (await newest(bus)).version == "1-3", "a checkpoint's version is announced once it is on disk"
            is_written.set()
            await publisher.finish()
            await anyio.to_thread.run_sync(member.receiver.finish)
            kept = await newest(bus)
            tasks.cancel_scope.cancel()

    assert (kept.version, kept.on_disk, kept.group is not None) == ("1-4", "1-4", True)
    assert sorted(os.listdir(tmp_path / "weights")) == ["1-1", "1-4"]
    member.receiver.leave()


async def test_a_copy_that_is_done_after_its_version_was_superseded_is_not_announced_and_the_next_record_names_it(
    open_role: OpenRole, tmp_path: Path, engine: FsdpEngine
) -> None:
    bus, node = await open_role(Role.TRAINER), await open_role(Role.NODE)
    member = Server(node, "0-0")
    await member.say()
    async with publishing(bus, tmp_path, engine, weight_transfer="distributed", disk_every=2) as publisher:
        weights, may_write = publisher.versions.weights, threading.Event()
        write = weights.write

        def write_late(tensors: dict[str, Tensor], version: Version, directory: Path, ranks: Ranks) -> WeightsVersion:
            assert version.step == 1 or may_write.wait(DEADLINE_S)
            return write(tensors, version, directory, ranks)

        weights.write = write_late  # type: ignore[method-assign]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(member.run)
            for step in (1, 2, 3):
                await publisher.publish(Version(1, step))
            may_write.set()
            await publisher.copying.finish()
            late = await newest(bus)
            await publisher.publish(Version(1, 5))
            await anyio.to_thread.run_sync(member.receiver.finish)
            tasks.cancel_scope.cancel()
        assert [(one.version, one.path, one.on_disk) for one in (late, await newest(bus))] == [
            ("1-3", "", "1-1"), ("1-5", "", "1-2"),
        ]  # fmt: skip
    member.receiver.leave()


async def test_a_server_that_waits_gets_a_copy_on_disk_and_one_that_cannot_read_it_a_broadcast_of_its_own(
    open_role: OpenRole, tmp_path: Path, engine: FsdpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.trainer.output.publisher.REPAIR_POLL_S", 0.02)
    bus, node = await open_role(Role.TRAINER), await open_role(Role.NODE)
    member, joiner = Server(node, "0-0"), Server(node, "1-0")
    await member.say()
    async with publishing(bus, tmp_path, engine, weight_transfer="distributed") as publisher:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publisher.run_repairs)
            tasks.start_soon(member.run)
            tasks.start_soon(joiner.run)
            for step in (1, 2):
                await publisher.publish(Version(1, step))
                await publisher.writing.finish()
                await member.say(version=f"1-{step}")
            assert (await newest(bus)).path == ""
            with anyio.fail_after(DEADLINE_S):
                await joiner.say(reason="starting", wants_weights=True)
                await until(node, lambda announced: bool(announced.path))
                await joiner.say(reason="starting", wants_weights=True, unreadable="no such folder here")
                again = await until(node, lambda announced: announced.group is not None)
                await publisher.writing.finish()
                received = await anyio.to_thread.run_sync(joiner.receiver.finish)
            await joiner.say(version="1-2")
            await publisher.publish(Version(1, 3))
            await anyio.to_thread.run_sync(joiner.receiver.finish)
            last = await newest(bus)
            tasks.cancel_scope.cancel()

    assert again.group is not None
    assert last.group is not None
    assert (again.version, again.on_disk, again.group.ranks) == ("1-2", "1-2", {"1-0": 1})
    assert are_equal(received, engine.gather_weights(engine.plan_buckets(max_bytes=1 << 30)))
    assert last.group.ranks == {"0-0": 1, "1-0": 2}, "from then on it is one of them"
    for server in (member, joiner):
        server.receiver.leave()


async def test_the_last_version_stays_the_last_whoever_is_given_it_meanwhile(
    open_role: OpenRole, tmp_path: Path, engine: FsdpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.trainer.output.publisher.REPAIR_POLL_S", 0.02)
    bus, node = await open_role(Role.TRAINER), await open_role(Role.NODE)
    joiner, is_asked, may_ask = Server(node, "1-0"), anyio.Event(), anyio.Event()
    async with publishing(bus, tmp_path, engine, weight_transfer="distributed") as publisher:
        await publisher.publish(Version(1, 1))
        await publisher.finish()
        open_group = publisher._open_group

        async def open_late(servers: dict[str, tuple[ServerState, int]]) -> UpdateGroup | None:
            is_asked.set()
            await may_ask.wait()
            return await open_group(servers)

        monkeypatch.setattr(publisher, "_open_group", open_late)
        await joiner.say(reason="starting", wants_weights=True, unreadable="no such folder here")
        with anyio.fail_after(DEADLINE_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(joiner.run)
                tasks.start_soon(publisher.run_repairs)
                await is_asked.wait()
                tasks.start_soon(publisher.announce_final)
                while not publisher._publishing.statistics().tasks_waiting and not (await newest(bus)).final:
                    await anyio.lowlevel.checkpoint()
                may_ask.set()
                await until(bus, lambda announced: announced.group is not None)
                await publisher.close()
                await anyio.to_thread.run_sync(joiner.receiver.finish)
                tasks.cancel_scope.cancel()

    assert (await newest(bus)).final
    joiner.receiver.leave()


async def test_nothing_is_written_for_a_server_once_a_publisher_is_closed(
    open_role: OpenRole, tmp_path: Path, engine: FsdpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peers are about to leave: they would take no part."""
    monkeypatch.setattr("areal_async.trainer.output.publisher.REPAIR_POLL_S", 0.02)
    bus, node = await open_role(Role.TRAINER), await open_role(Role.NODE)
    member, joiner = Server(node, "0-0"), Server(node, "1-0")
    await member.say()
    async with publishing(bus, tmp_path, engine, weight_transfer="distributed") as publisher:
        num_looks, look = 0, publisher._servers

        async def counted() -> dict[str, tuple[ServerState, int]]:
            nonlocal num_looks
            num_looks += 1
            return await look()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(member.run)
            for step in (1, 2):
                await publisher.publish(Version(1, step))
            await member.say(version="1-2")
            await joiner.say(reason="starting", wants_weights=True)
            await publisher.close()
            monkeypatch.setattr(publisher, "_servers", counted)
            tasks.start_soon(publisher.run_repairs)
            with anyio.fail_after(DEADLINE_S):
                while num_looks < 4:
                    await anyio.lowlevel.checkpoint()
            await publisher.copying.finish()
            tasks.cancel_scope.cancel()

    assert os.listdir(tmp_path / "weights") == ["1-1"]
    member.receiver.leave()


def test_files_that_are_damaged_or_gone_when_they_are_to_be_broadcast_are_named(
    engine: FsdpEngine, tmp_path: Path, ranks: Ranks
) -> None:
    weights = ServedWeights(engine, bucket_bytes=10_000, is_broadcast=True)
    weights.write(weights.gather(), Version(1, 1), tmp_path, ranks)
    file = tmp_path / "1-1" / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(PipelineError, match="1-1 cannot be read to be broadcast: .*; a trainer that starts again"):
        weights.send(tmp_path / "1-1", lambda _: None)

    file.unlink()
    with pytest.raises(PipelineError, match="1-1 cannot be read to be broadcast: No such file"):
        weights.send(tmp_path / "1-1", lambda _: None)


async def test_a_member_that_is_fenced_before_it_joins_holds_nobody_up(
    open_role: OpenRole, tmp_path: Path, engine: FsdpEngine
) -> None:
    bus, node = await open_role(Role.TRAINER), await open_role(Role.NODE)
    server = Server(node, "0-0")
    await server.say()
    async with publishing(bus, tmp_path, engine, weight_transfer="distributed") as publisher:
        with anyio.fail_after(DEADLINE_S / 2):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(publisher.publish, Version(1, 1))
                async for announced in node.watch_key(node.names.weights_key(), WeightsVersion, poll_s=0.05):
                    assert announced.kind == "distributed"
                    await server.say(reason="ended with status -9")
                    break
            await publisher.finish()

        assert (await newest(bus)).path == str(tmp_path / "weights" / "1-1")
        await publisher.publish(Version(1, 2))
        await publisher.finish()
        assert (await newest(bus)).version == "1-2"


async def test_a_member_that_dies_in_the_middle_leaves_the_version_to_the_disk(
    open_role: OpenRole, tmp_path: Path, engine: FsdpEngine
) -> None:
    bus, node = await open_role(Role.TRAINER), await open_role(Role.NODE)
    server, dying = Server(node, "0-0"), Server(node, "0-1")
    async with publishing(bus, tmp_path, engine, weight_transfer="distributed") as publisher:
        await publisher.publish(Version(1, 0))
        await publisher.finish()
        await server.say()
        await dying.say()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.run)
            tasks.start_soon(lambda: dying.run(gone_after=1))
            with anyio.fail_after(DEADLINE_S / 2):
                await publisher.publish(Version(1, 1))
                await publisher.finish()
            assert (await newest(bus)).kind == "disk"
            await anyio.to_thread.run_sync(server.receiver.finish)
            await server.say(version="1-1")  # repaired
            await dying.say(reason="ended with status -9")

            await publisher.publish(Version(1, 2))
            await publisher.finish()

            received = await anyio.to_thread.run_sync(server.receiver.finish)
            tasks.cancel_scope.cancel()
    assert are_equal(received, engine.gather_weights(engine.plan_buckets(max_bytes=1 << 30)))
    groups = {one.group.name: one.group.ranks for one in server.seen if one.group}
    assert groups == {"test-1-1": {"0-0": 1, "0-1": 2}, "test-1-2": {"0-0": 1}}
    server.receiver.leave()


async def test_servers_that_never_hold_a_version_end_the_wait_by_name(
    open_role: OpenRole, tmp_path: Path, engine: FsdpEngine
) -> None:
    bus, node = await open_role(Role.TRAINER), await open_role(Role.NODE)
    for server_id, state in (("0-0", {"version": "1-7"}), ("0-1", {"version": "1-6"}), ("0-2", {"reason": "it broke"})):
        await Server(node, server_id).say(**state)
    async with publishing(bus, tmp_path, engine, start_deadline_s=SHORT_S) as publisher:
        with pytest.raises(PipelineError, match=r"weights 1-7: .*: 0-1 \(holds 1-6\), 0-2 \(it broke\); see"):
            await publisher.wait_until_held(Version(1, 7), should_stop=lambda: False)

        await publisher.wait_until_held(Version(1, 7), should_stop=lambda: True)
        await Server(node, "0-1").say(version="1-7")
        await publisher.wait_until_held(Version(1, 7), should_stop=lambda: False)


async def test_adapters_are_announced_alone_or_merged(
    open_role: OpenRole, tmp_path: Path, model: Path, ranks: Ranks
) -> None:
    bus, engine = await open_role(Role.TRAINER), engine_of(model, ranks, lora={"rank": 2})
    async with publishing(bus, tmp_path, engine, sends_adapter=True) as publisher:
        await publisher.publish(Version(1, 1))
        await publisher.finish()
        alone = await newest(bus)
    async with publishing(bus, tmp_path, engine) as publisher:
        await publisher.publish(Version(2, 1))
        await publisher.finish()
        merged = await newest(bus)

    assert (alone.kind, merged.kind) == (ADAPTER, DISK)
    assert alone.sha256.keys() == {"adapter_config.json", "adapter_model.safetensors"}
    assert merged.sha256.keys() == {"model.safetensors"}
    await Staging().stage(alone)
    (Path(alone.path) / "adapter_config.json").write_text("{}")
    with pytest.raises(StagingFault, match="adapter_config.json has hash"):
        await Staging().stage(alone)


async def test_trainer_ends_where_a_server_cannot_read_files_that_are_damaged_and_not_where_they_are_whole(
    open_role: OpenRole, tmp_path: Path, engine: FsdpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.trainer.output.publisher.REPAIR_POLL_S", 0.02)
    bus, server = await open_role(Role.TRAINER), Server(await open_role(Role.NODE), "0-0")
    await server.say(unreadable="not visible here")
    async with publishing(bus, tmp_path, engine) as publisher:
        for step in (1, 2):
            await publisher.publish(Version(1, step))
            await publisher.finish()
            with anyio.move_on_after(0.5):
                await publisher.run_repairs()
        (tmp_path / "weights" / "1-2" / "model.safetensors").write_bytes(b"")

        with pytest.raises(PipelineError, match=r"1-2/model.safetensors has hash .*; a trainer that starts again"):
            await publisher.run_repairs()


async def test_files_that_were_whole_at_one_complaint_are_looked_at_again_at_the_next(
    open_role: OpenRole, tmp_path: Path, engine: FsdpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.trainer.output.publisher.REPAIR_POLL_S", 0.02)
    is_seen_whole = anyio.Event()

    def look(weights: WeightsVersion) -> None:
        check_files(weights)
        anyio.from_thread.run_sync(is_seen_whole.set)

    monkeypatch.setattr("areal_async.trainer.output.publisher.check_files", look)
    bus, server = await open_role(Role.TRAINER), Server(await open_role(Role.NODE), "0-0")
    await server.say(unreadable="not visible here")

    async def damage() -> None:
        await is_seen_whole.wait()
        (tmp_path / "weights" / "1-1" / "model.safetensors").write_bytes(b"")
        await server.say(unreadable="it has another hash")

    async with publishing(bus, tmp_path, engine) as publisher:
        await publisher.publish(Version(1, 1))
        await publisher.finish()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(damage)
            with anyio.fail_after(20), pytest.raises(PipelineError, match=r"1-1/model.safetensors has hash"):
                await publisher.run_repairs()


@pytest.mark.parametrize(
    ("given", "is_sent"),
    [
        ({"rank": 0, "transfer": "adapter"}, False),
        ({"rank": 4}, True),
        ({"rank": 4, "transfer": "merged"}, False),
        ({"rank": 4, "backend": "sglang"}, False),
        ({"rank": 4, "weight_transfer": "distributed"}, False),
    ],
)
async def test_adapters_travel_alone_where_the_servers_can_merge_them(given: dict[str, Any], is_sent: bool) -> None:
    lora = {name: given[name] for name in ("rank", "transfer") if name in given}
    inference = {"backend": "embedded"} | {name: value for name, value in given.items() if name not in lora}
    settings = Settings.model_validate({"trainer": {"lora": lora}, "inference": inference})

    assert sends_adapter(settings) == is_sent


@pytest.mark.parametrize("weight_transfer", ["disk", "distributed"])
async def test_what_the_first_step_made_is_announced_when_what_was_there_before_is_evaluated(
    weight_transfer: str, open_role: OpenRole, tmp_path: Path, engine: FsdpEngine
) -> None:
    bus, controller = await open_role(Role.TRAINER), await open_role(Role.CONTROLLER)
    server = Server(await open_role(Role.NODE), "0-0")
    await server.say()
    record = EvalRecord(
        eval_id="1-0", step=0, workflow="a", num_scored=1, num_failed=0, accuracy=1.0, oldest="1-0", newest="1-0"
    )
    async with (
        publishing(bus, tmp_path, engine, weight_transfer=weight_transfer, evaluated=("a", "b")) as publisher,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(server.run)
        await publisher.publish(Version(1, 0))
        await publisher.finish()
        await publisher.publish(Version(1, 1))  # nobody is held up: the step is over
        assert publisher.writing.is_idle  # a server that lacks the newest version can be given it

        await controller.put(bus.names.evaluation_key(0, "a"), record)
        await anyio.sleep(0.3)
        assert (await newest(bus)).version == "1-0"
        await controller.put(bus.names.evaluation_key(0, "b"), record)
        with anyio.fail_after(20):
            await publisher.publish(Version(1, 2))
            await publisher.finish()
            await until(bus, lambda announced: announced.version == "1-2")
        tasks.cancel_scope.cancel()

    assert [one.version for one in server.seen][:2] == ["1-0", "1-1"]
    server.receiver.leave()


async def test_a_trainer_that_stops_waits_for_no_evaluation(
    open_role: OpenRole, tmp_path: Path, engine: FsdpEngine
) -> None:
    bus = await open_role(Role.TRAINER)
    async with publishing(bus, tmp_path, engine, evaluated=("a",)) as publisher:
        await publisher.publish(Version(1, 0))
        await publisher.publish(Version(1, 1))
        publisher.first_evaluation.give_up()
        with anyio.fail_after(20):
            await publisher.finish()

        assert (await newest(bus)).version == "1-1"


@pytest.mark.parametrize("first_step", [1, 3])
async def test_a_trainer_that_goes_on_from_a_step_waits_for_no_evaluation(
    first_step: int, open_role: OpenRole, tmp_path: Path, engine: FsdpEngine
) -> None:
    bus = await open_role(Role.TRAINER)
    async with publishing(bus, tmp_path, engine, evaluated=("a",)) as publisher:
        with anyio.fail_after(20):
            for step in (first_step, first_step + 1):
                await publisher.publish(Version(1, step))
            await publisher.finish()

        assert (await newest(bus)).version == f"1-{first_step + 1}"
