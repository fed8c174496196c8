"""A whole run on three real servers, each stream's leader killed in turn, one server cut off: 0 lost, 0 twice.

The reads: ``tests/bus/test_cluster.py``.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from areal_async.bus import Role, declare, move_streams
from areal_async.bus.streams import _wait_copied, all_streams
from areal_async.config.settings import RunSettings, Settings
from areal_async.errors import FencedError
from areal_async.protocol.subjects import ADMITTED, Names
from areal_async.protocol.types import Admitted
from areal_async.trainer.batch.lineage import Lineage
from tests.brokers import as_operator, running_broker, until
from tests.clusters import NUM_SERVERS, Cluster, running_cluster
from tests.e2e.test_run import Run, assert_accounts, collect, events, said_by

pytestmark = [pytest.mark.timeout(900), pytest.mark.whole_runs, pytest.mark.nightly]

CUT_S = 30.0
NAMES = Names("copies")


@contextmanager
def cluster_at(folder: Path) -> Iterator[tuple[BlockingPortal, Cluster]]:
    """Three servers in a thread of their own, as this one waits for the run."""
    folder.mkdir()
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(running_cluster(folder, NAMES)) as cluster,
    ):
        yield portal, cluster


async def kill_leader(cluster: Cluster, stream: str) -> None:
    """Kill it, start it again once another one leads, and return when it has all that the others have."""
    async with cluster.connected(Role.OPERATOR) as operator:
        number = await cluster.leader_of(operator, stream)
        await cluster.kill(number)

        async def is_led_anew() -> bool:
            return await cluster.leader_of(operator, stream) != number

        await until(is_led_anew)
        await cluster.start(number)
        await _wait_copied(operator, all_streams(NAMES), NUM_SERVERS)


async def cut_off_leader(cluster: Cluster, stream: str) -> None:
    async with cluster.connected(Role.OPERATOR) as operator:
        number = await cluster.leader_of(operator, stream)
        with cluster.cut_off(number):
            await anyio.sleep(CUT_S)
        await _wait_copied(operator, all_streams(NAMES), NUM_SERVERS)


async def take_two_lineages(cluster: Cluster) -> list[int | None]:
    """Have two trainers take over while the leaders of their keys and of their stream are gone; return who did."""
    taken: list[int | None] = []

    async def take() -> None:
        async with cluster.connected(Role.TRAINER) as trainer:
            try:
                lineage = await Lineage.take(trainer)
                await lineage.read_log()
                await lineage.write_begin()
                taken.append(lineage.number)
            except FencedError:
                taken.append(None)

    async with cluster.connected(Role.OPERATOR) as operator:
        number = await cluster.leader_of(operator, f"KV_{NAMES.bucket}")
        await cluster.kill(number)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(take)
            tasks.start_soon(take)
        await cluster.start(number)
        await _wait_copied(operator, all_streams(NAMES), NUM_SERVERS)
    return taken


def test_a_run_outlives_the_loss_of_each_streams_leader_and_of_a_server_that_is_cut_off(tmp_path: Path) -> None:
    with cluster_at(tmp_path / "cluster") as (portal, cluster):
        run = Run(
            tmp_path, "copies", run__steps=1000, eval__limit=8,
            bus__url=cluster.url, bus__replicas=NUM_SERVERS, bus__credentials=cluster.keys,
        )  # fmt: skip
        process = run.start("--no-display")
        run.wait_for_step(1, process)

        for stream in all_streams(NAMES):
            portal.call(kill_leader, cluster, stream)
            run.wait_for_step(len(run.lines) + 1, process)
        portal.call(cut_off_leader, cluster, NAMES.outcomes_stream)
        run.wait_for_step(len(run.lines) + 1, process)
        process.send_signal(signal.SIGTERM)
        ended = collect(process)

        assert ended.returncode in (0, 143), ended.stdout
        num_steps = len(run.lines)
        assert_accounts(run, num_steps=num_steps, max_staleness=2)
        assert not events(run, "controller", "server.disowned")
        examined = said_by("doctor", run.directory)
        assert examined.returncode == 0, examined.stdout
        taken = portal.call(take_two_lineages, cluster)
        assert sorted(one is None for one in taken) == [False, True], taken


async def raise_copies(cluster: Cluster, settings: Settings) -> None:
    """Have a run that keeps one copy of everything keep three, and kill who had it."""
    async with cluster.connected(Role.OPERATOR) as operator:
        await declare(operator, cluster.seen_from(settings, replicas=1))
        await operator.put(ADMITTED, Admitted(total=1))
        await operator.publish(NAMES.tickets("w"), b"x")

        await declare(operator, cluster.seen_from(settings))

        number = await cluster.leader_of(operator, f"KV_{NAMES.bucket}")
        await cluster.kill(number)
        assert (await operator.get(ADMITTED, Admitted))[0] == Admitted(total=1)
        await operator.put(ADMITTED, Admitted(total=2))
        await cluster.start(number)
        await _wait_copied(operator, all_streams(NAMES), NUM_SERVERS)
        await cluster.kill(await cluster.leader_of(operator, NAMES.tickets_stream))
        assert await operator.num_unsettled(NAMES.tickets_stream, NAMES.nodes_consumer) == 1


def test_one_copy_becomes_three_at_the_next_start(tmp_path: Path) -> None:
    settings = Settings(run=RunSettings(name=NAMES.run, directory=tmp_path))
    with cluster_at(tmp_path / "cluster") as (portal, cluster):
        portal.call(raise_copies, cluster, settings)


async def move_here(cluster: Cluster, settings: Settings) -> None:
    """Have a run of one broker's at three, then kill who leads its keys."""
    async with (
        running_broker(settings) as broker,
        as_operator(broker, settings) as source,
        cluster.connected(Role.OPERATOR) as target,
    ):
        await declare(source, settings)
        for number in range(20):
            await source.put(ADMITTED, Admitted(total=number))
            await source.publish(NAMES.tickets("w"), b"x", msg_id=f"t{number}")

        moved = await move_streams(source, target, cluster.seen_from(settings))

        assert [one.name for one in moved] == all_streams(NAMES)
        before = await source.get(ADMITTED, Admitted)
        await cluster.kill(await cluster.leader_of(target, f"KV_{NAMES.bucket}"))
        assert await target.get(ADMITTED, Admitted) == before
        assert await target.num_unsettled(NAMES.tickets_stream, NAMES.nodes_consumer) == 20


def test_a_run_of_its_own_broker_is_moved_to_three_copies(tmp_path: Path) -> None:
    settings = Settings(run=RunSettings(name=NAMES.run, directory=tmp_path))
    with cluster_at(tmp_path / "cluster") as (portal, cluster):
        portal.call(move_here, cluster, settings)
