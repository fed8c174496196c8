"""Training from the archive, without inference: the recorded batches again, in their order, step by step.

Rows, ages and shares are built by the very functions of a run, so that with unchanged settings every number comes out
as it did. Advantages are computed anew from the archived rewards, within the archived groups: another algorithm may
see them otherwise. What was sampled stays what it was, so another learning rate or model trains off its own policy;
the importance weights say how far. Nothing here draws random numbers.
"""

import math
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import numpy as np

from areal_async.algorithms.advantages import advantage_rule
from areal_async.config.live import settings_of_step
from areal_async.config.settings import Settings
from areal_async.config.sources import dump_settings
from areal_async.errors import UserError
from areal_async.protocol.staleness import age_at
from areal_async.protocol.types import CutSlot, Metrics, Version
from areal_async.trainer.batch.payloads import BatchSlot, build_rows, share
from areal_async.trainer.batch.step import (
    ShareStats,
    StepResult,
    add_up_info,
    agree_on_batch,
    batch_metrics,
    metrics_line,
)
from areal_async.trainer.engine.engines import Engines, EngineThreads
from areal_async.trainer.engine.parallel.ranks import Ranks, joined_ranks
from areal_async.trainer.engine.threads import EngineThread
from areal_async.trainer.output.archive import MetricsFile
from areal_async.trainer.output.archive_reader import ArchivedTrajectory, Bound, Line, read_recorded, whole_steps
from areal_async.trainer.step_calls import StepCalls

TOLERANCE = 1e-6
"""Relative, between a loss and the recorded one, where nothing was changed."""
COMPARED = ("loss", "value_loss")
SMALLEST_LOSS = 1e-3
"""A loss nearer to 0 is what is left of terms of order 1 that cancel; differences are taken relative to this then."""
RANK_DEADLINE_S = 1800.0
"""How long one rank waits for another: long enough for rank 0 to write a large model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDifference:
    """Between a replayed step and the recorded one."""

    step: int
    name: str
    recorded: float
    replayed: float

    @property
    def relative(self) -> float:
        """To the larger of the two; infinite where one of them is no number."""
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
                made = await replay.step(batch, Version.parse(str(line["weights_version"])))
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
        self._ranks = ranks
        self._changed = changed
        self._dims = engines.actor.dims
        self._thread = EngineThread()
        self._calls = StepCalls(settings, engines=engines, threads=EngineThreads.for_run(settings, ranks, self._thread))

    async def step(self, recorded: Sequence[ArchivedTrajectory], made: Version) -> Metrics:
        """Train the whole batch of the step that made version ``made``; return its metrics line. A collective.

        Args:
            recorded: of all ranks, by position.

        Raises:
            UserError: the model does not know one of the tokens, or the algorithm takes no rewards of single replies.
        """
        started = time.monotonic()
        self._refuse(recorded)
        slots = [place_recorded(one) for one in recorded]
        # Groups that had too few siblings were not trained, so they are not archived.
        batch = agree_on_batch(slots, (), min_group_size=1, rule=advantage_rule(self._settings))
        mine = share(
            slots,
            rank=self._dims.data.rank,
            num_ranks=self._dims.data.size,
            flops=self._engines.actor.flops,
            num_minibatches=self._settings.algorithm.num_minibatches,
        )
        positions = {placed.position for placed in mine}
        trajectories = {one.position: one.trajectory for one in recorded if one.position in positions}
        bound = recorded[0].bound if recorded else Bound(max_staleness=0, masks_stale=False, branches={})

        def age(version: Version) -> int:
            return age_at(step=made.step, version=version, lineage=made.lineage, branches=bound.branches)

        rows, ages = build_rows(
            trajectories,
            advantages=batch.advantages,
            start=Version(made.lineage, made.step - 1),
            age=age,
            max_staleness=bound.max_staleness,
            masks_stale=bound.masks_stale,
            temperature=self._settings.rollout.sampling.temperature,
        )
        lr, numbers = (recorded[0].lr, recorded[0].numbers) if recorded else (0.0, {})
        settings = settings_of_step(
            self._settings,
            lr=0.0 if "trainer.lr" in self._changed else lr,
            numbers={name: value for name, value in numbers.items() if name not in self._changed},
        )
        train_since = time.monotonic()
        trained = await self._calls.run(rows, batch, step=made.step, settings=settings)
        train_s = time.monotonic() - train_since
        own = ShareStats()
        if self._dims.is_reporting_rank:
            own = ShareStats(ages=ages, info=add_up_info(one.info for one in trajectories.values()))
        shares = await self._thread.run(lambda: self._ranks.gather_bytes(msgspec.json.encode(own)))
        result = StepResult(
            version=made,
            batch={
                **batch_metrics(
                    batch,
                    [msgspec.json.decode(one, type=ShareStats) for one in shares],
                    workflows=[task.name for task in self._settings.tasks],
                    age=age,
                ),
                **trained.others,
            },
            stats=trained.stats,
            started=started,
            wait_s=0.0,
            train_s=train_s,
        )
        return metrics_line(result, weights_s=0.0, checkpoint_s=0.0, dropped_stale=0, failed=0)

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
        if settings.algorithm.one_reward_for and any(one.trajectory.slot.credits for one in recorded):
            raise UserError(
                f"{settings.algorithm.one_reward_for}: got a run with rewards for single replies, need one for each "
                "trajectory; choose another algorithm"
            )


def place_recorded(recorded: ArchivedTrajectory) -> BatchSlot:
    """Return a recorded trajectory's place in its batch."""
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
