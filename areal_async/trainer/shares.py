"""A rank's share of a cut, and what it comes to: which of it all ranks use, and the step that trains it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from areal_async.algorithms.advantages import advantage_rule
from areal_async.config.settings import Settings
from areal_async.protocol.staleness import age_at
from areal_async.protocol.types import Cut, Trajectory, Version
from areal_async.trainer.batch.payloads import AgeStats, BatchSlot, SlotKey, build_rows
from areal_async.trainer.batch.step import AgreedBatch, agree_on_batch
from areal_async.trainer.step_calls import StepCalls, StepReport


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShard:
    """This rank's part of a cut, fetched."""

    cut: Cut
    slots: list[BatchSlot]
    """Of the whole cut."""
    mine: list[BatchSlot]
    trajectories: dict[int, Trajectory]
    missing: dict[SlotKey, str]
    """Those of ``mine`` that cannot be trained, each with why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """A batch, trained."""

    slots: list[BatchSlot]
    """This rank's."""
    trajectories: dict[int, Trajectory]
    ages: AgeStats
    trained: StepReport


def agree(part: RankShard, missing: Iterable[SlotKey], settings: Settings) -> AgreedBatch:
    """Return what every rank trains of a cut of which these slots are missing."""
    return agree_on_batch(
        part.slots,
        missing,
        min_group_size=settings.rollout.min_group_size,
        min_group_sizes={task.name: settings.rollout_of(task.name).min_group_size for task in settings.tasks},
        rule=advantage_rule(settings),
    )


def ages_in(cut: Cut, lineage: int) -> Callable[[Version], int]:
    """Return how old a version is in the step of this cut, as a lineage trains it."""
    branches = {int(number): shared for number, shared in cut.branches.items()}
    return lambda version: age_at(step=cut.step, version=version, lineage=lineage, branches=branches)


async def train_share(
    part: RankShard, batch: AgreedBatch, calls: StepCalls, *, start: Version, settings: Settings, of_step: Settings
) -> Done:
    """Train a rank's share of a batch. A collective.

    Args:
        start: the version that the step starts from, in the lineage that trains.
        of_step: the settings that this step is trained with.
    """
    used = {placed.position for placed in batch.slots}
    mine = [placed for placed in part.mine if placed.position in used]
    trajectories = {placed.position: part.trajectories[placed.position] for placed in mine}
    rows, ages = build_rows(
        trajectories,
        advantages=batch.advantages,
        start=start,
        age=ages_in(part.cut, start.lineage),
        max_staleness=part.cut.max_staleness,
        masks_stale=part.cut.masks_stale,
        temperature=settings.rollout.sampling.temperature,
    )
    trained = await calls.run(rows, batch, step=part.cut.step, settings=of_step)
    return Done(slots=mine, trajectories=trajectories, ages=ages, trained=trained)
