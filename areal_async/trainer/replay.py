"""Training from the archive, without inference: the recorded batches again, in their order, step by step.

Rows, ages and shards are built by the very functions of a run, so that with unchanged settings every number comes out
as it did. Advantages are computed anew from the archived rewards, within the archived groups: another algorithm may
see them otherwise. What was sampled stays what it was, so another learning rate or model trains off its own policy;
the importance weights say how far. Nothing here draws random numbers.
"""

import functools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import numpy as np

from areal_async.algorithms.advantages import advantage_rule
from areal_async.config.settings import Settings
from areal_async.config.sources import dump_settings
from areal_async.errors import UserError
from areal_async.protocol.types import Cut, CutSlot, Metrics, Version
from areal_async.protocol.types import Sequence as TokenSequence
from areal_async.trainer.batch.payloads import BatchSlot, RankShard
from areal_async.trainer.batch.step import StepResult, agree_on_batch, metrics_line
from areal_async.trainer.engine.engines import Engines, EngineThreads
from areal_async.trainer.engine.parallel.ranks import Ranks, joined_ranks
from areal_async.trainer.output.archive import MetricsFile
from areal_async.trainer.output.archive_reader import (
    ArchivedTrajectory,
    Line,
    read_recorded,
    whole_steps,
)
from areal_async.trainer.output.archived_images import read_images
from areal_async.trainer.shards import ShardTrainer

TOLERANCE = 1e-6
"""Relative, between a loss and the recorded one, where nothing was changed."""
COMPARED = ("loss", "value_loss")
SMALLEST_LOSS = 1e-3
"""A loss nearer to 0 is what is left of terms of order 1 that cancel; differences are taken relative to this then."""
RANK_DEADLINE_S = 1800.0
"""How long one rank waits for another: long enough for rank 0 to write a large model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDifference:
    """Difference of one metric between a replayed step and the recorded one."""

    step: int
    name: str
    recorded: float
    replayed: float

    @property
    def relative(self) -> float:
        """Difference relative to the larger of the two; infinite where one of them is no number."""
        if not (math.isfinite(self.recorded) and math.isfinite(self.replayed)):
            return 0.0 if str(self.recorded) == str(self.replayed) else math.inf
        scale = max(abs(self.recorded), abs(self.replayed), SMALLEST_LOSS)
        return abs(self.recorded - self.replayed) / scale


def run_replay(settings: Settings, recorded: Path, *, num_steps: int, changed: Collection[str]) -> list[StepDifference]:
    """Replay the first steps of the run in ``recorded`` as one rank of however many the environment names.

    Rank 0 writes the run directory of ``settings`` and returns how its losses differ; the others return nothing.

    Args:
        changed: names of settings that are otherwise than in the recorded run. Of the others each step has what it was
            recorded with, which may have been changed on the way.

    Raises:
        UserError: the archive is not whole, or does not go with the model or the algorithm.
    """
    with joined_ranks(deadline_s=RANK_DEADLINE_S, num_threads=settings.trainer.num_threads) as ranks:
        engines = Engines.for_run(settings, ranks)
        replay = Replay(settings, engines=engines, ranks=ranks, changed=changed)
        differences: list[StepDifference] = []
        file = _begin(settings) if ranks.rank == 0 else None

        async def train() -> None:
            for line, paths in whole_steps(recorded)[:num_steps]:
                batch = await anyio.to_thread.run_sync(read_recorded, paths)
                version = Version.parse(str(line["weights_version"]))
                made = await replay.step(batch, version, functools.partial(read_images, recorded, version))
                if file is not None:
                    file.append(made)
                    differences.extend(compare(line, made))

        anyio.run(train, backend_options={"use_uvloop": True})
        engines.actor.export(settings.run_directory)
        return differences


def compare(recorded: Line, replayed: Metrics) -> Iterator[StepDifference]:
    """Yield how the losses of a step differ from the recorded ones."""
    for name in COMPARED:
        if name in recorded and name in replayed:
            yield StepDifference(
                step=int(replayed["step"]),
                name=name,
                recorded=float(recorded[name]),
                replayed=float(replayed[name]),
            )


class Replay:
    """One rank that trains recorded batches."""

    def __init__(self, settings: Settings, *, engines: Engines, ranks: Ranks, changed: Collection[str] = ()) -> None:
        self._settings = settings
        self._engines = engines
        self._changed = changed
        threads = EngineThreads.for_run(settings, ranks)
        self._shards = ShardTrainer(settings, engines=engines, threads=threads)

    async def step(
        self,
        recorded: Sequence[ArchivedTrajectory],
        made: Version,
        images_of: Callable[[Collection[str]], dict[str, bytes]] = lambda _: {},
    ) -> Metrics:
        """Train the whole batch of the step that made version ``made``; return its metrics line. A collective.

        Args:
            recorded: of all ranks, by position.
            images_of: returns the PNGs of these hashes; asked for those of this rank alone.

        Raises:
            UserError: the model does not know one of the tokens, or sees images otherwise; an image is not there; or
                the algorithm takes no rewards of single replies.
        """
        started = time.monotonic()
        self._refuse(recorded)
        slots = [slot_of(one) for one in recorded]
        # Groups that had too few siblings were not trained, so they are not archived.
        batch = agree_on_batch(slots, (), advantage_rule(self._settings))
        mine = self._shards.own_slots(slots)
        positions = {slot.position for slot in mine}
        trajectories = {one.position: one.trajectory for one in recorded if one.position in positions}
        shown = {sha256 for one in trajectories.values() for sha256 in one.images}
        shard = RankShard(
            cut=self._cut_of(recorded, made),
            slots=slots,
            mine=mine,
            trajectories=trajectories,
            missing={},
            images=await anyio.to_thread.run_sync(images_of, shown) if shown else {},
        )
        train_since = time.monotonic()
        trained = await self._shards.train(shard, batch, start=Version(made.lineage, made.step - 1))
        train_s = time.monotonic() - train_since
        result = StepResult(
            version=made,
            batch=await self._shards.metrics(batch, trained, lineage=made.lineage),
            stats=trained.report.stats,
            started=started,
            wait_s=0.0,
            train_s=train_s,
        )
        return metrics_line(result)

    def _cut_of(self, recorded: Sequence[ArchivedTrajectory], made: Version) -> Cut:
        """Return the cut of the recorded step without its groups; what was changed since stands in no cut."""
        if not recorded:
            return Cut(lineage=made.lineage, step=made.step)
        cut = recorded[0].cut
        return msgspec.structs.replace(
            cut,
            lr=0.0 if "trainer.lr" in self._changed else cut.lr,
            numbers={name: value for name, value in cut.numbers.items() if name not in self._changed},
        )

    def _refuse(self, recorded: Sequence[ArchivedTrajectory]) -> None:
        settings = self._settings
        parts = [part for one in recorded for part in one.trajectory.sequences]
        largest = max((int(np.max(part.token_ids)) for part in parts), default=0)
        known = self._engines.actor.vocab_size
        if largest >= known:
            raise UserError(
                f"model.path: got {settings.model.path} with {known} tokens, need at least {largest + 1}; "
                "choose a model with the tokenizer of the recorded run"
            )
        self._refuse_images(parts)
        if settings.algorithm.one_reward_for and any(one.trajectory.slot.credits for one in recorded):
            raise UserError(
                f"{settings.algorithm.one_reward_for}: got a run with rewards for single replies, need one for each "
                "trajectory; choose another algorithm"
            )

    def _refuse_images(self, parts: Iterable[TokenSequence]) -> None:
        vision, path = self._engines.actor.vision, self._settings.model.path
        for part in parts:
            if not part.images:
                continue
            if vision is None:
                raise UserError(
                    f"model.path: got {path}, which does not see, need a model that does: the recorded run has shown "
                    "images; choose one of the family of its model"
                )
            sizes = [(one.width, one.height) for one in part.images]
            fits = all(side % vision.factor == 0 for size in sizes for side in size) and np.count_nonzero(
                part.token_ids == vision.image_token_id
            ) == sum(vision.num_tokens(vision.grid_of(*size)) for size in sizes)
            if not fits:
                raise UserError(
                    f"model.path: got {path}, which makes other tokens of the recorded images, need a model of the "
                    "family of the recorded run's"
                )


def slot_of(recorded: ArchivedTrajectory) -> BatchSlot:
    """Return the slot of a recorded trajectory in its batch."""
    return BatchSlot(
        position=recorded.position,
        group_id=recorded.group_id,
        workflow=recorded.workflow,
        item=CutSlot(slot=recorded.trajectory.slot, sequence=0),
    )


def _begin(settings: Settings) -> MetricsFile:
    directory = settings.run_directory
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.yaml").write_text(dump_settings(settings))
    (directory / "metrics.jsonl").unlink(missing_ok=True)
    return MetricsFile(directory / "metrics.jsonl")
