"""Three real servers with three copies of everything: what is read there is what is there, whichever server is lost."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

from areal_async.bus import Bus, EmbeddedBroker, Role, declare, open_bus
from areal_async.bus.api import JetStreamApi
from areal_async.bus.images import CHUNK_BYTES
from areal_async.bus.streams import all_streams
from areal_async.config.settings import BusSettings, RunSettings, Settings
from areal_async.doctor.preflight.broker import check_broker
from areal_async.doctor.preflight.findings import Level
from areal_async.errors import BusError, FencedError, UserError
from areal_async.protocol.subjects import ADMITTED, Names
from areal_async.protocol.types import Admitted, Cut, CutKind, Outcome, OutcomeKind
from areal_async.trainer.batch.lineage import Lineage
from tests.brokers import PATIENCE_S, running_broker, until
from tests.bus.stored import ref_of
from tests.clusters import NUM_SERVERS, Cluster, running_cluster

pytestmark = pytest.mark.anyio

QUICK_S = 0.2
NUM_READS = 20
PICTURE = bytes(CHUNK_BYTES + 1)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        run=RunSettings(name="test", directory=tmp_path),
        bus=BusSettings(url="nats://elsewhere:4222", replicas=3, operation_deadline_s=PATIENCE_S),
    )


@pytest.fixture
async def broker(anyio_backend: object, tmp_path: Path) -> AsyncIterator[EmbeddedBroker]:
    settings = Settings(run=RunSettings(name="alone", directory=tmp_path))
    async with running_broker(settings) as broker:
        yield broker


@pytest.fixture
async def cluster(anyio_backend: object, tmp_path: Path, settings: Settings) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, settings.names) as cluster:
        yield cluster


Read = Callable[[Bus], Awaitable[object]]


async def test_what_a_follower_does_not_know_yet_is_asked_of_the_leader(
    cluster: Cluster, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.bus.api.CLUSTER_TRY_S", QUICK_S)
    names, outcome = settings.names, Outcome(group_id="0-0-0", kind=OutcomeKind.TRAINED, lineage=1)

    async def read_value(bus: Bus) -> object:
        return (await bus.get(ADMITTED, Admitted))[0]

    async def read_values(bus: Bus) -> object:
        return await bus.records({ADMITTED: Admitted, "crew.": Admitted})

    async def read_message(bus: Bus) -> object:
        found = await bus.get_message(names.outcomes_stream, 2)
        return found and found.sequence

    async def read_log(bus: Bus) -> object:
        return [one.sequence for one in await bus.read_log(names.outcomes_stream, names.log)]

    async def read_state(bus: Bus) -> object:
        return (await bus.stream_state(names.outcomes_stream)).last_sequence

    reads: dict[Read, object] = {
        read_value: Admitted(total=2),
        read_values: {ADMITTED: Admitted(total=2), "crew.node-0": Admitted(total=3)},
        read_message: 2,
        read_log: [1, 2],
        read_state: 2,
    }
    async with cluster.connected(Role.OPERATOR) as operator:
        await declare(operator, settings)
        for stream in all_streams(names):
            info = await operator.api.leader_info(stream)
            assert (info["config"]["num_replicas"], len(info["cluster"]["replicas"])) == (NUM_SERVERS, NUM_SERVERS - 1)

        async def is_found_good() -> bool:
            return {one.level for one in await check_broker(cluster.seen_from(settings))} == {Level.GOOD}

        await until(is_found_good)  # a server tells of the others once it has heard from them
        await operator.put(ADMITTED, Admitted(total=1))
        await operator.publish(names.outcomes, outcome)
        leaders = {await cluster.leader_of(operator, one) for one in (f"KV_{names.bucket}", names.outcomes_stream)}
        behind = next(number for number in range(NUM_SERVERS) if number not in leaders)

    async with AsyncExitStack() as stack:
        writer = await stack.enter_async_context(cluster.connected(Role.OPERATOR, at=min(leaders)))
        readers = [await stack.enter_async_context(cluster.connected(Role.NODE, at=behind)) for _ in reads]
        stack.enter_context(cluster.cut_off(behind))
        await writer.put(ADMITTED, Admitted(total=2))
        await writer.put("crew.node-0", Admitted(total=3))
        await writer.publish(names.outcomes, outcome)

        assert await _answers_stale(readers[0], f"KV_{names.bucket}", f"$KV.{names.bucket}.{ADMITTED}")
        for bus, (read, expected) in zip(readers, reads.items(), strict=True):
            assert await read(bus) == expected


async def test_of_an_image_a_follower_has_half_the_rest_is_asked_of_the_leader(
    cluster: Cluster, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.bus.api.CLUSTER_TRY_S", QUICK_S)
    names, group_id = settings.names, "0-0-0"
    ref = ref_of(PICTURE)
    async with cluster.connected(Role.OPERATOR) as operator:
        await declare(operator, settings)
        leader = await cluster.leader_of(operator, names.images_stream)
        behind = (leader + 1) % NUM_SERVERS

    async with AsyncExitStack() as stack:
        writer = await stack.enter_async_context(cluster.connected(Role.NODE, at=leader))
        reader = await stack.enter_async_context(cluster.connected(Role.TRAINER, at=behind))
        with monkeypatch.context() as interrupted:
            interrupted.setattr("areal_async.bus.images.failpoint", _end_here)
            with pytest.raises(InterruptedError):
                await writer.images.put(group_id, ref, PICTURE)
        await until(lambda: _has(reader, names.images_stream, sequence=1))
        stack.enter_context(cluster.cut_off(behind))
        await writer.images.put(group_id, ref, PICTURE)

        await until(lambda: _has_not(reader, names.images_stream, sequence=2))
        assert await reader.images.get(group_id, ref) == PICTURE


def _end_here(point: str) -> None:
    raise InterruptedError(point)


async def _has(bus: Bus, stream: str, *, sequence: int) -> bool:
    """Say whether anybody gives a message."""
    return await _status(bus, stream, sequence) is None


async def _has_not(bus: Bus, stream: str, *, sequence: int) -> bool:
    """Say whether anybody knows nothing of a message."""
    return await _status(bus, stream, sequence) == "404"


async def _status(bus: Bus, stream: str, sequence: int) -> str | None:
    try:
        body = b'{"seq": %d}' % sequence
        return (await bus.connection.request(f"$JS.API.DIRECT.GET.{stream}", body, deadline_s=QUICK_S)).status
    except BusError:
        return "no answer"


async def test_a_follower_that_is_behind_is_not_believed(cluster: Cluster, settings: Settings) -> None:
    """Here its leader cannot reach it, and the server of who asks can: it answers a third of all direct gets."""
    names, key = settings.names, f"$KV.{settings.names.bucket}.{ADMITTED}"
    stream = f"KV_{names.bucket}"
    async with cluster.connected(Role.OPERATOR) as operator:
        await declare(operator, settings)
        await operator.put(ADMITTED, Admitted(total=1))
        leader = await cluster.leader_of(operator, stream)
    behind, third = [number for number in range(NUM_SERVERS) if number != leader]

    async with cluster.connected(Role.OPERATOR, at=leader) as writer, cluster.connected(Role.NODE, at=third) as node:
        with cluster.cut_off(behind, of=leader):
            await writer.put(ADMITTED, Admitted(total=2))
            assert await _answers_stale(node, stream, key)
            for _ in range(NUM_READS):
                assert await node.get(ADMITTED, Admitted) == (Admitted(total=2), 2)
                assert await node.records({ADMITTED: Admitted}) == {ADMITTED: Admitted(total=2)}
                assert await node.get_message(stream, 2) is not None
                assert [one.sequence for one in await node.read_log(stream, key, start_sequence=2)] == [2]


async def test_each_role_reads_what_it_needs_and_one_lineage_takes_over_from_another(
    cluster: Cluster, settings: Settings
) -> None:
    names = settings.names
    async with AsyncExitStack() as stack:
        operator, trainer, other = [
            await stack.enter_async_context(cluster.connected(role))
            for role in (Role.OPERATOR, Role.TRAINER, Role.TRAINER)
        ]
        await declare(operator, settings)
        await declare(operator, settings)
        older = await Lineage.take(trainer)
        await older.read_log()
        await older.write_begin()
        assert await older.is_newest()

        newer = await Lineage.take(other)

        assert newer.number == older.number + 1
        assert (await other.api.leader_info(names.trajectories_stream))["state"]["consumer_count"] == 1
        assert not await older.is_newest(), "although nothing stands in the journal yet"
        with pytest.raises(FencedError):
            await older.take_consumer()
        await newer.read_log()
        await newer.write_begin()
        with pytest.raises(FencedError, match="a newer trainer writes the journal"):
            await older.write_cut(Cut(kind=CutKind.CUT, lineage=older.number, step=1))
        with pytest.raises(UserError, match=r"bus.replicas: got 1, and stream .* has 3 copies.* set bus.replicas: 3"):
            await declare(operator, settings.model_copy(update={"bus": BusSettings(url=settings.bus.url)}))


async def test_more_copies_than_servers_are_refused_in_one_sentence(broker: EmbeddedBroker, settings: Settings) -> None:
    names = Names("other")
    async with open_bus(
        broker.url, names=names, role=Role.OPERATOR, credentials=broker.credentials(Role.OPERATOR)
    ) as operator:
        wanted = settings.model_copy(
            update={"run": RunSettings(name="other"), "bus": BusSettings(url=broker.url, replicas=3)}
        )
        with pytest.raises(UserError, match=r"bus.replicas: got 3, and the broker has not so many servers"):
            await declare(operator, wanted)


async def _answers_stale(bus: Bus, stream: str, subject: str) -> bool:
    """Ask anybody for a subject's newest message until one gives the first."""
    with anyio.fail_after(PATIENCE_S):
        while True:
            try:
                answer = await bus.connection.request(f"$JS.API.DIRECT.GET.{stream}.{subject}", deadline_s=0.2)
            except BusError:
                continue
            if answer.headers["Nats-Sequence"] == "1":
                return True


def test_what_was_seen_is_known_through_any_trouble() -> None:
    """An election is when an old leader may answer."""

    async def last_after_trouble() -> int:
        connection: Any = None
        api = JetStreamApi(connection, operation_deadline_s=1.0)
        api.seen.note("stream", 7)
        api.note_trouble()
        return api.seen.last("stream")

    assert anyio.run(last_after_trouble) == 7
