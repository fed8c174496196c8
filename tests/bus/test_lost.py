"""What the store of a run has lost is named before anything is declared; a run that has not begun has lost nothing."""

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from areal_async.bus import Bus, EmbeddedBroker, declare
from areal_async.bus.streams import all_streams
from areal_async.cli.main import main
from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.launch.lost import find_lost
from areal_async.launch.run_directory import RunDirectory
from areal_async.protocol.run_state import RunState
from areal_async.protocol.subjects import ADMITTED, CHECKPOINT, LINEAGE, RUN_STATE, Names
from areal_async.protocol.types import Admitted, CheckpointRecord, Cut, CutKind, LineageRecord
from tests.brokers import as_operator
from tests.bus.stored import ticket

pytestmark = pytest.mark.anyio

RUN = Names("test")
KEYS = f"KV_{RUN.bucket}"
VITAL = {
    KEYS: "how far the run has come",
    RUN.outcomes_stream: "what became of every group, and which ones each step trained",
    RUN.tickets_stream: "the prompts that are under way",
    RUN.trajectories_stream: "what was sampled and is in no checkpoint yet",
}
OTHERS = {
    RUN.eval_stream: "an evaluation that was under way is asked again",
    RUN.dead_stream: "the prompts that failed every attempt so far",
    RUN.events_stream: "what has happened so far is not told",
}


@asynccontextmanager
async def served(settings: Settings) -> AsyncIterator[Bus]:
    """The run's store, as a start finds it."""
    broker = EmbeddedBroker(settings)
    await broker.start()
    try:
        async with as_operator(broker, settings) as bus:
            yield bus
    finally:
        await broker.aclose()


@pytest.fixture
def write(settings: Settings) -> Callable[..., Awaitable[None]]:
    """Leave a store with these messages in it."""

    async def write(*, keys: bool = True, log: bool = True, prompts: bool = True) -> None:
        async with served(settings) as bus:
            await declare(bus, settings)
            if keys:
                await bus.put(ADMITTED, Admitted(total=1))
                await bus.put(LINEAGE, LineageRecord(lineage=1))
                await bus.put(CHECKPOINT, CheckpointRecord(version="1-0", path=""))
            if log:
                await bus.publish(RUN.cuts, Cut(kind=CutKind.BEGIN, lineage=1, step=0))
            if prompts:
                await bus.publish(RUN.tickets("w"), ticket("0-0-0", group_size=2))

    return write


def remove(settings: Settings, *paths: str) -> None:
    """Take folders of streams away, as a disk or a careless hand would."""
    (streams,) = (settings.run_directory / "bus" / "jetstream").rglob("streams")
    for path in paths:
        shutil.rmtree(streams / path)


async def looked(settings: Settings) -> tuple[list[str], set[str]]:
    """Return what is told of the store, and which streams it has afterwards."""
    told: list[str] = []
    async with served(settings) as bus:
        await find_lost(bus, RunDirectory(settings.run_directory), settings, notify=told.append)
        return told, set((await bus.api.ask("$JS.API.STREAM.NAMES"))["streams"] or [])


@pytest.mark.parametrize("stream", VITAL)
async def test_a_run_does_not_go_on_without_what_nothing_else_makes_up_for(
    settings: Settings, write: Callable[..., Awaitable[None]], stream: str
) -> None:
    await write()
    remove(settings, stream)

    with pytest.raises(UserError) as caught:
        await looked(settings)

    assert str(caught.value) == (
        f"run test: its store in {settings.run_directory / 'bus'} has lost {stream} ({VITAL[stream]}), and the rest "
        "does not make up for it; put it back from a copy, choose another --run.name, or give --fresh to start anew"
    )


@pytest.mark.parametrize("stream", OTHERS)
async def test_a_run_goes_on_without_the_rest_and_says_what_is_gone(
    settings: Settings, write: Callable[..., Awaitable[None]], stream: str
) -> None:
    await write()
    remove(settings, stream)

    (told,), _ = await looked(settings)

    assert told.startswith(f"run test: its store in {settings.run_directory / 'bus'} has lost {stream}, which is made")
    assert OTHERS[stream] in told


async def test_a_store_that_is_gone_whole_is_missed_by_what_the_run_has_written_beside_it(
    settings: Settings, write: Callable[..., Awaitable[None]]
) -> None:
    await write()
    remove(settings, *all_streams(RUN))
    assert await looked(settings) == ([], set()), "no file of the run says that it has begun"

    folder = settings.run_directory / "checkpoints" / "1-20"
    folder.mkdir(parents=True)
    with pytest.raises(UserError, match=r"has lost all that it held, and .*; export --run test first has .* 20$"):
        await looked(settings)
    folder.rmdir()
    (settings.run_directory / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="has lost all that it held"):
        await looked(settings)


@pytest.mark.parametrize("stream", [KEYS, RUN.outcomes_stream])
async def test_a_stream_without_its_messages_is_as_good_as_none(
    settings: Settings, write: Callable[..., Awaitable[None]], stream: str
) -> None:
    await write()
    remove(settings, f"{stream}/msgs")

    with pytest.raises(UserError, match=stream):
        await looked(settings)


@pytest.mark.parametrize("key", [ADMITTED, CHECKPOINT, LINEAGE])
async def test_a_key_that_every_run_has_is_missed_by_itself(
    settings: Settings, write: Callable[..., Awaitable[None]], key: str
) -> None:
    await write()
    async with served(settings) as bus:
        await bus.api.ask(f"$JS.API.STREAM.PURGE.{KEYS}", {"filter": f"$KV.{RUN.bucket}.{key}"})

    with pytest.raises(UserError, match=f"has lost the key {key} of AREAL_test, and the rest does not make up for it"):
        await looked(settings)


async def test_a_start_that_came_to_nothing_has_lost_nothing(
    settings: Settings, write: Callable[..., Awaitable[None]]
) -> None:
    """Killed between two declarations, or before the trainer has begun its lineage."""
    await write(keys=False, log=False, prompts=False)
    remove(settings, KEYS)
    assert (await looked(settings))[0] == []

    await write(keys=False, log=False, prompts=False)
    async with served(settings) as bus:
        await bus.put(RUN_STATE, RunState())
    assert (await looked(settings))[0] == []


async def test_what_a_node_stores_before_anything_is_admitted_does_not_make_a_run_of_a_start(
    settings: Settings, write: Callable[..., Awaitable[None]]
) -> None:
    """Its key would else keep the run from ever starting again."""
    await write(keys=False, log=False, prompts=False)
    async with served(settings) as bus:
        await bus.put(RUN_STATE, RunState())
        await bus.publish(RUN.trajectories("w", "0-0-0"), b"x")
    assert (await looked(settings))[0] == []

    remove(settings, RUN.tickets_stream)
    with pytest.raises(UserError, match=f"has lost {RUN.tickets_stream} "):
        await looked(settings)


@pytest.mark.parametrize("verb", ["status", "dead"])
def test_who_looks_into_a_stopped_run_is_told_what_is_lost(
    settings: Settings, write: Callable[..., Awaitable[None]], verb: str, capfd: pytest.CaptureFixture[str]
) -> None:
    anyio.run(write)
    directory = RunDirectory(settings.run_directory)
    directory.write_settings(settings)
    directory.write_bus_url("nats://127.0.0.1:1")
    assert main([verb, "--run", str(settings.run_directory)]) == 0
    before = capfd.readouterr()

    remove(settings, KEYS)
    status = main([verb, "--run", str(settings.run_directory)])

    after = capfd.readouterr()
    assert before.err == ""
    assert (status, after.out) == (2, "")
    assert after.err.count("\n") == 1
    assert f"has lost {KEYS} ({VITAL[KEYS]}), and the rest does not make up for it; put it back" in after.err
