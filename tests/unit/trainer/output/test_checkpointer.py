"""A checkpoint holds up a step only while it is copied; what is written is what was copied; one goes on at a time."""

import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from anyio.lowlevel import checkpoint as yield_once

from areal_async.errors import PipelineError
from areal_async.process.atomic_folders import finish
from areal_async.protocol.types import Version
from areal_async.telemetry import wait_graph
from areal_async.trainer.engine import checkpoint
from areal_async.trainer.engine.checkpoint import ACTOR, CheckpointWriter
from areal_async.trainer.engine.engines import Engines
from areal_async.trainer.engine.host_copies import ALIGNMENT_BYTES
from areal_async.trainer.engine.parallel.dims import local_shard
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.threads import BackgroundJob, EngineThread
from areal_async.trainer.output.checkpointer import Checkpointer
from tests.unit.trainer.models import engine_of, parameters_differ, random_rows

pytestmark = pytest.mark.anyio


class Station:
    """A checkpointer of one rank, whose writing ends when it is told to."""

    def __init__(self, model: Path, ranks: Ranks, directory: Path) -> None:
        self.directory = directory
        self.engine = engine_of(model, ranks)
        self.writer = CheckpointWriter(ranks)
        self.may_end = threading.Event()
        self.is_archived = anyio.Event()

    def train(self, step: int) -> None:
        self.engine.train_step(random_rows(4, seed=step), step=step, total_steps=9)

    def finish(self, partial: Path, directory: Path) -> None:
        assert self.may_end.wait(20.0)
        finish(partial, directory)

    @asynccontextmanager
    async def open(self, *, is_async: bool = True) -> AsyncIterator[Checkpointer]:
        async with anyio.create_task_group() as tasks:
            archiving = BackgroundJob(tasks)
            await archiving.start(self.is_archived.wait)
            yield Checkpointer(
                directory=self.directory,
                engines=Engines(actor=self.engine),
                thread=EngineThread(torch.device("cpu")),
                writer=self.writer if is_async else None,
                archiving=archiving,
                writing=BackgroundJob(tasks),
                feed=None,
            )
            self.is_archived.set()

    def folders(self) -> list[str]:
        return sorted(path.name for path in (self.directory / "checkpoints").glob("[!.]*"))


@pytest.fixture
def station(model: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Station:
    station = Station(model, ranks, tmp_path)
    monkeypatch.setattr(checkpoint, "finish", station.finish)
    return station


async def test_steps_go_on_while_a_checkpoint_of_an_earlier_one_is_written(
    station: Station, model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    station.train(1)
    station.engine.save_weights(tmp_path / "first")
    station.is_archived.set()
    async with station.open() as checkpointer:
        await checkpointer.start(Version(1, 1), b"of step 1")
        station.train(2)
        await yield_once()
        assert station.folders() == []
        station.may_end.set()
        await checkpointer.finish()

    assert station.folders() == ["1-1"]
    loaded = engine_of(model, ranks)
    assert Engines(actor=loaded).load_checkpoint(tmp_path / "checkpoints" / "1-1") == b"of step 1"
    assert parameters_differ(loaded, engine_of(tmp_path / "first", ranks)) == 0
    assert parameters_differ(loaded, station.engine) > 0
    again = loaded.train_step(random_rows(4, seed=2), step=2, total_steps=9)
    assert again.num_updates == 1
    assert parameters_differ(loaded, station.engine) == 0, "the moments were to be those of step 1 too"


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc")
async def test_what_was_freed_between_what_lives_on_goes_with_a_checkpoint(station: Station) -> None:
    station.is_archived.set()
    station.may_end.set()
    del_first = np.ones(31 << 20, dtype=np.uint8)
    del del_first  # from here on glibc takes what is smaller from its heap
    blocks, between = [], []
    for _ in range(256):
        blocks.append(np.ones(512 << 10, dtype=np.uint8))
        between.append(np.ones(512 << 10, dtype=np.uint8))  # as large: else older gaps might take them all
    blocks.clear()
    before = _resident_mb()
    async with station.open() as checkpointer:
        await checkpointer.start(Version(1, 1), b"")
        await checkpointer.finish()

    assert before - _resident_mb() > 100


def _resident_mb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) >> 10


async def test_the_next_checkpoint_waits_for_the_one_before_and_says_so(station: Station) -> None:
    station.is_archived.set()
    async with station.open() as checkpointer:
        await checkpointer.start(Version(1, 1), b"")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(checkpointer.start, Version(1, 2), b"")
            await anyio.wait_all_tasks_blocked()
            told = wait_graph.report(wait_graph.TRAINER).records
            station.may_end.set()
        await checkpointer.finish()

    assert [(one.waiter, one.what, one.on) for one in told] == [("trainer", "the writing of", "checkpoint 1")]
    assert station.folders() == ["1-1", "1-2"]
    assert checkpointer.take_held_up_s() > 0
    assert checkpointer.take_held_up_s() == 0


async def test_nothing_is_written_before_the_batches_are_archived(station: Station) -> None:
    station.may_end.set()
    async with station.open() as checkpointer:
        await checkpointer.start(Version(1, 1), b"")
        await anyio.wait_all_tasks_blocked()
        assert not (station.directory / "checkpoints").exists()
        station.is_archived.set()
        await checkpointer.finish()

    assert station.folders() == ["1-1"]


async def test_a_checkpoint_that_cannot_be_written_ends_the_trainer_with_its_cause(station: Station) -> None:
    (station.directory / "checkpoints").write_text("in the way")
    station.is_archived.set()

    async def make() -> None:
        async with station.open() as checkpointer:
            await checkpointer.start(Version(1, 1), b"")
            await checkpointer.finish()

    with pytest.raises(ExceptionGroup) as raised:
        await make()

    (error,) = raised.value.exceptions
    assert isinstance(error, PipelineError)
    assert "1-1 could not be written: NotADirectoryError" in str(error)


async def test_without_copies_a_step_waits_for_the_whole_writing(station: Station) -> None:
    station.is_archived.set()
    station.may_end.set()
    async with station.open(is_async=False) as checkpointer:
        await checkpointer.start(Version(1, 1), b"")

        assert station.folders() == ["1-1"]


async def test_the_same_step_is_checkpointed_once(station: Station) -> None:
    station.is_archived.set()
    station.may_end.set()
    async with station.open() as checkpointer:
        checkpointer.restored(3)
        await checkpointer.start(Version(2, 3), b"")
        await checkpointer.finish()

    assert station.folders() == []


async def test_copies_are_made_once_and_filled_again(station: Station) -> None:
    station.train(1)
    station.writer.stage({ACTOR: station.engine.trained})
    first = {name: copy.data_ptr() for name, copy in station.writer._copies.items()}
    station.train(2)

    station.writer.stage({ACTOR: station.engine.trained})

    assert {name: copy.data_ptr() for name, copy in station.writer._copies.items()} == first
    held = {name: copy for name, copy in station.writer._copies.items() if name.startswith("exp_avg.")}
    assert held
    shards = checkpoint.tensors_of({ACTOR: station.engine.trained})
    assert all(bool((local_shard(shards[name]) == copy).all()) for name, copy in held.items())


async def test_copies_are_cut_from_one_buffer_as_large_as_what_is_copied(station: Station) -> None:
    """An allocator that rounds each of many sizes up to a power of two, as that of pinned memory, wastes up to half."""
    station.writer.stage({ACTOR: station.engine.trained})

    copies = station.writer._copies.values()
    begins, ends = (sorted(one.data_ptr() + size * one.nbytes for one in copies) for size in (0, 1))
    assert all(end <= begin < end + ALIGNMENT_BYTES for begin, end in zip(begins[1:], ends, strict=False))
    num_bytes = sum(local_shard(one).nbytes for one in checkpoint.tensors_of({ACTOR: station.engine.trained}).values())
    assert num_bytes == sum(one.nbytes for one in copies)
