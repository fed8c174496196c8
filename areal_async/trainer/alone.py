"""A process beside a rank that trains parts of a cut by itself, to find out what fails.

    python -m areal_async.trainer.alone RUN_DIRECTORY

Several ranks meet in collectives, and one that has raised is missed in them: nothing more can be tried there. Here the
whole cut is on one rank, with the model that the run began from. Nothing that happens in it ends anything else, and
after a failure a new process takes its place.

It reads lines of JSON from its standard input, first ``Material``, then lists of groups, and answers each of these with
why they cannot be trained, an empty text where they can.
"""

import functools
import os
import signal
import sys
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self

import anyio
import anyio.abc
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from areal_async.config.settings import Settings
from areal_async.config.sources import load_settings
from areal_async.process.children import open_child
from areal_async.process.host import RENDEZVOUS
from areal_async.process.interpreter import module_command
from areal_async.process.parent_death import die_with_parent
from areal_async.protocol.types import Cut, Version
from areal_async.protocol.wire import decode_slot, encode_trajectory
from areal_async.trainer.batch.culprits import NoRoomError
from areal_async.trainer.batch.payloads import RankShard, SlotKey, slots_of
from areal_async.trainer.engine.engines import Engines, EngineThreads
from areal_async.trainer.engine.parallel.ranks import joined_ranks
from areal_async.trainer.shards import ShardTrainer

DEADLINE_S = 600.0
"""Seconds that each of its own collectives may take; they wait for nobody."""
_ENDED = (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError, OSError)
"""What is raised by the pipes of a process that is no more."""
OUT_OF_MEMORY = "OutOfMemoryError"
"""What torch raises for want of memory of a GPU."""
MAX_ANSWER_BYTES = 1 << 20
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", RENDEZVOUS)
"""What makes a process one of several ranks."""


class Material(msgspec.Struct):
    """A cut, as a lineage trains it."""

    cut: Cut
    start: str
    """The version that its step starts from."""
    missing: list[SlotKey]
    """Slots that no rank has."""
    payloads: dict[int, bytes]
    """Encoded trajectories of the other slots, by position."""
    images: dict[str, bytes]
    """SHA-256 -> each image that they show, a PNG."""

    @classmethod
    def of(cls, shard: RankShard, missing: Sequence[SlotKey], *, start: Version) -> Self:
        """Take a shard that is the whole of a cut."""
        payloads = {position: encode_trajectory(one) for position, one in shard.trajectories.items()}
        return cls(cut=shard.cut, start=str(start), missing=list(missing), payloads=payloads, images=shard.images)

    def shard(self) -> RankShard:
        """Return what ``of`` was given."""
        slots = slots_of(self.cut)
        trajectories = {}
        for slot in slots:
            if (payload := self.payloads.get(slot.position)) is not None:
                header = msgspec.structs.replace(slot.header, crc32=zlib.crc32(payload), index=0)
                trajectories[slot.position] = decode_slot([memoryview(payload)], header)
        return RankShard(
            cut=self.cut, slots=slots, mine=slots, trajectories=trajectories, missing={}, images=self.images
        )


class Alone:
    """The near end. Close it with ``aclose``."""

    def __init__(self, run_directory: Path, material: Material) -> None:
        self._command = module_command(__name__, str(run_directory), str(os.getpid()))
        self._material = msgspec.json.encode(material)
        self._process: anyio.abc.Process | None = None

    async def attempt(self, groups: Sequence[str]) -> str:
        """Train some groups alone; return why that fails, nothing where it does not.

        Raises:
            NoRoomError: the GPU, which the rank has as well, had too little memory for one rank with all of it.
        """
        process = self._process or await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            await process.stdin.send(msgspec.json.encode(list(groups)) + b"\n")
            answer = await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", MAX_ANSWER_BYTES)
            reason = msgspec.json.decode(answer, type=str)
        except _ENDED:
            reason = f"a process that trained it ended with status {await process.wait()}"
        if reason:
            await self.aclose()
        if reason.startswith(OUT_OF_MEMORY):
            raise NoRoomError(reason)
        return reason

    async def aclose(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            with anyio.CancelScope(shield=True):
                with suppress(ProcessLookupError):
                    process.kill()
                await process.aclose()

    async def _start(self) -> anyio.abc.Process:
        environment = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
        process = self._process = await open_child(self._command, stderr=None, env=environment)
        assert process.stdin is not None
        with suppress(*_ENDED):  # it has ended: the next question will show it
            await process.stdin.send(self._material + b"\n")
        return process


def _settings_alone(settings: Settings) -> Settings:
    """Return the settings for a single rank, which divides nothing."""
    whole = {"pipeline_parallel": 1, "tensor_parallel": 1, "replicas": 1}
    trainer = settings.trainer
    roles = {name: getattr(trainer, name).model_copy(update=whole) for name in ("critic", "reference")}
    alone = {"num_ranks": 1, "num_hosts": 1, "pipeline_schedule": "1f1b"} | whole | roles
    return settings.model_copy(update={"trainer": trainer.model_copy(update=alone)})


def serve(settings: Settings, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until nobody asks."""
    material = msgspec.json.decode(requests.readline(), type=Material)
    shard, start = material.shard(), Version.parse(material.start)
    with joined_ranks(deadline_s=DEADLINE_S, num_threads=settings.trainer.num_threads) as ranks:
        engines = Engines.for_run(settings, ranks)
        trainer = ShardTrainer(settings, engines=engines, threads=EngineThreads.for_run(settings, ranks))
        for request in requests:
            groups = msgspec.json.decode(request, type=list[str])
            reason = anyio.run(functools.partial(trainer.attempt, shard, material.missing, groups, start=start))
            answers.write(msgspec.json.encode(reason) + b"\n")
            answers.flush()


def main() -> None:
    """Serve the process that started this one."""
    die_with_parent(int(sys.argv[2]), by=signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a user's call prints is no answer
    settings = load_settings(Path(sys.argv[1]) / "config.yaml", use_environment=False)
    serve(_settings_alone(settings), sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
