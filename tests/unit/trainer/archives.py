"""Runs made by hand: archived steps of one group each, and their lines of metrics."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from areal_async.protocol.types import (
    NOT_SAMPLED,
    Cut,
    CutSlot,
    ImageRef,
    Sequence,
    Slot,
    SlotStatus,
    Trajectory,
    Version,
)
from areal_async.trainer.batch.payloads import BatchSlot
from areal_async.trainer.batch.step import AgeStats, StepReport, TrainedShard
from areal_async.trainer.engine.stats import StepStats
from areal_async.trainer.output.archive import write_archive
from areal_async.trainer.packing.rows import TrainRow
from tests.unit.trainer.models import rows_as_trained
from tests.unit.trainer.seeing import png, seeing_row, size_of

REWARDS = (1.0, 0.0, 0.0, 3.0)
ADVANTAGES = tuple((np.array(REWARDS) - 1.0) / (np.std(REWARDS, ddof=1) + 1e-6))
LENGTH, PROMPT = 12, 4
NUM_STEERED = 4
"""Tokens at the end of the last sibling's answer."""
VOCAB = 61


def temperatures_of(sibling: int) -> NDArray[np.float32] | None:
    """Return what was recorded of it: of the first nothing, of the others what changed in the middle of the answer."""
    return None if sibling == 0 else np.repeat(np.array([1.0, 0.5 + sibling], np.float32), LENGTH // 2)


def trajectory(step: int, sibling: int) -> Trajectory:
    """Return one of two versions: the first half of the answer is of the one before the newest, as after a swap."""
    random = np.random.default_rng((step, sibling))
    old, new = Version(1, max(0, step - 2)), Version(1, step - 1)
    versions = [NOT_SAMPLED] * PROMPT + [old.pack()] * 4 + [new.pack()] * 4
    slot = Slot(
        sibling=sibling,
        sample_uid=f"{step}-{sibling}",
        status=SlotStatus.SCORED,
        reward=REWARDS[sibling],
        num_tokens=LENGTH,
        num_output_tokens=LENGTH - PROMPT,
        oldest=str(old),
        newest=str(new),
    )
    sequence = Sequence(
        token_ids=random.integers(0, VOCAB, LENGTH).astype(np.int32),
        loss_mask=np.arange(LENGTH) >= PROMPT,
        logprobs=np.where(np.arange(LENGTH) >= PROMPT, random.normal(-4.1, 0.3, LENGTH), 0).astype(np.float32),
        versions=np.array(versions, dtype=np.int64),
        temperatures=temperatures_of(sibling),
        steered=np.arange(LENGTH) >= LENGTH - NUM_STEERED if sibling == len(REWARDS) - 1 else None,
    )
    return Trajectory(slot=slot, sequences=[sequence], info={"num_turns": 1.0})


def archive_shard(
    directory: Path,
    *,
    made: Version,
    cut: Cut,
    slots: list[BatchSlot],
    trajectories: dict[int, Trajectory],
    advantages: Mapping[int, NDArray[np.float32]],
    rows: list[TrainRow],
    images: Mapping[str, bytes] | None = None,
) -> None:
    """Archive the shard of the only rank; of the numbers of its step nothing is asked."""
    report = StepReport(stats=cast(StepStats, None), others={}, rows=rows)
    shard = TrainedShard(cut=cut, slots=slots, trajectories=trajectories, ages=AgeStats(), report=report)
    write_archive(directory, shard, made=made, rank=0, advantages=advantages, images=images)


def archive_step(
    directory: Path, step: int, *, lineage: int = 1, max_staleness: int = 2, masks_stale: bool = False, **more: Any
) -> dict[int, Trajectory]:
    """Archive the batch of one step; return its trajectories by position."""
    trajectories = {place: trajectory(step, place) for place in range(len(REWARDS))}
    cut = Cut(lineage=lineage, step=step, max_staleness=max_staleness, masks_stale=masks_stale, **more)
    archive_group(directory, cut, trajectories)
    return trajectories


def archive_seeing_step(directory: Path, step: int, *, lineage: int = 1) -> list[TrainRow]:
    """Archive the batch of one step of a model of ``seeing``, of which two siblings show the same; return its rows."""
    shown = [[png(0), png(1, width=32)], [png(0)], [], [png(step + 1), png(0)]]
    rows = [seeing_row(images, index=index) for index, images in enumerate(shown)]
    return archive_seen_rows(directory, step, rows, lineage=lineage)


def archive_seen_rows(directory: Path, step: int, rows: list[TrainRow], *, lineage: int = 1) -> list[TrainRow]:
    """Archive rows with images, one for each of ``REWARDS``; return them with the advantages that these give."""
    rows = [replace(row, advantage=float(np.float32(ADVANTAGES[row.index]))) for row in rows]
    start = Version(lineage, step - 1)
    trajectories = {row.index: _seen(row, start) for row in rows}
    images = {hashlib.sha256(one).hexdigest(): one for row in rows for one in row.images}
    archive_group(directory, Cut(lineage=lineage, step=step, max_staleness=2), trajectories, images=images)
    return rows


def _seen(row: TrainRow, version: Version) -> Trajectory:
    """Return the trajectory that is trained as this row."""
    slot = Slot(
        sibling=row.index,
        sample_uid=f"{version}-{row.index}",
        status=SlotStatus.SCORED,
        reward=REWARDS[row.index],
        num_tokens=row.num_tokens,
        num_output_tokens=int(row.loss_mask.sum()),
        oldest=str(version),
        newest=str(version),
    )
    refs = [
        ImageRef(sha256=hashlib.sha256(one).hexdigest(), num_bytes=len(one), width=width, height=height)
        for one in row.images
        for width, height in [size_of(one)]
    ]
    sequence = Sequence(
        token_ids=row.token_ids,
        loss_mask=row.loss_mask,
        logprobs=row.behave_logprobs,
        versions=np.where(row.loss_mask, version.pack(), NOT_SAMPLED),
        images=refs or None,
    )
    return Trajectory(slot=slot, sequences=[sequence])


def archive_group(
    directory: Path, cut: Cut, trajectories: dict[int, Trajectory], *, images: Mapping[str, bytes] | None = None
) -> None:
    archive_shard(
        directory / "trajectories",
        made=Version(cut.lineage, cut.step),
        cut=cut,
        slots=[
            BatchSlot(position=place, group_id=f"0-{cut.step}-0", workflow="w", item=CutSlot(slot=one.slot, sequence=1))
            for place, one in trajectories.items()
        ],
        trajectories=trajectories,
        advantages={place: np.float32([value]) for place, value in enumerate(ADVANTAGES)},
        rows=rows_as_trained(trajectories, dict(enumerate(ADVANTAGES))),
        images=images,
    )


def write_lines(directory: Path, *lines: dict[str, object]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def line(step: int, *, lineage: int = 1, **more: object) -> dict[str, object]:
    return {"step": step, "weights_version": f"{lineage}-{step}", "num_trajectories": len(REWARDS), **more}
