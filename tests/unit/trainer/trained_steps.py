"""Steps of PPO with a critic and a reference, on one rank or on each of several."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import torch

from areal_async.config.settings import AlgorithmSettings, ModelSettings, RunSettings, Settings, TrainerSettings
from areal_async.protocol.types import CutSlot, Slot, SlotStatus
from areal_async.trainer.batch.payloads import BatchSlot
from areal_async.trainer.batch.step import AgreedBatch
from areal_async.trainer.engine.engines import Engines, EngineThreads
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.threads import EngineThread
from areal_async.trainer.packing.rows import TrainRow
from areal_async.trainer.shards import ShardTrainer
from tests.unit.trainer.models import random_rows, tempered

NUM_STEPS = 3


class TrainedSteps:
    """Everything that trains, and its calls."""

    def __init__(self, model: Path, ranks: Ranks, *, trainer: dict[str, Any] | None = None, **algorithm: Any) -> None:
        has_critic = "critic" in AlgorithmSettings.model_validate(algorithm).needs_models
        critic = {"critic": {"lr": 1e-2}} if has_critic else {}
        self.settings = settings = Settings(
            run=RunSettings(steps=NUM_STEPS),
            model=ModelSettings(path=str(model), dtype="float32"),
            algorithm=AlgorithmSettings.model_validate(algorithm),
            trainer=TrainerSettings.model_validate({"lr": 1e-3, "token_budget": 64, **critic} | (trainer or {})),
        )
        self.engines = Engines.for_run(settings, ranks)
        threads = EngineThreads(engine=EngineThread(torch.device("cpu")), has_one=settings.trainer.compile)
        self._shards = ShardTrainer(settings, engines=self.engines, threads=threads)

    def train(self, rows: list[TrainRow], *, step: int) -> dict[str, float]:
        """Train on these rows of the batch, by ``settings`` as they are now; return everything that is reported."""
        trained = anyio.run(lambda: self._shards.run_calls(rows, batch(), step=step, settings=self.settings))
        return asdict(trained.stats) | trained.others

    def train_shares(self, *, is_first: bool) -> list[dict[str, float]]:
        """Train three steps on this rank's share of two: five rows of seven, none of them, and one."""
        rows = batch_rows()
        mine = [rows[:5], [], rows[:1]] if is_first else [rows[5:], rows, rows[1:]]
        return [self.train(part, step=step) for step, part in enumerate(mine, start=1)]

    def fingerprint(self) -> dict[str, float]:
        """Return numbers that tell the parameters of actor and critic."""
        parameters = self.engines.actor.full_parameters()
        if self.engines.critic is not None:
            parameters |= {f"critic.{name}": one for name, one in self.engines.critic.full_parameters().items()}
        return {name: float(one.double().norm()) for name, one in parameters.items()}


def batch_rows() -> list[TrainRow]:
    """Return the rows of the whole batch; a row's advantage is its trajectory's outcome."""
    return tempered(random_rows(7))


def batch() -> AgreedBatch:
    """Return the batch as every rank knows it: two groups."""
    slots = []
    for row in batch_rows():
        slot = Slot(
            sibling=row.index,
            sample_uid=str(row.index),
            status=SlotStatus.SCORED,
            reward=float(np.asarray(row.advantage)),
            num_output_tokens=int(row.loss_mask.sum()),
            oldest="1-0",
            newest="1-0",
        )
        group_id = "a" if row.index < 4 else "b"
        slots.append(
            BatchSlot(position=row.index, group_id=group_id, workflow="w", item=CutSlot(sequence=1, slot=slot))
        )
    outcomes = {placed.position: np.array([placed.item.slot.reward], dtype=np.float32) for placed in slots}
    return AgreedBatch(slots=slots, advantages=outcomes, unusable=[])


def train_together(ranks: Ranks, model: Path, algorithm: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Train on one of two ranks, write a checkpoint, and return what was seen."""
    runner = TrainedSteps(model, ranks, **algorithm)
    stats = runner.train_shares(is_first=ranks.rank == 0)
    runner.engines.save_checkpoint(directory / "checkpoint", b"ledger")
    return {"stats": stats, "fingerprint": runner.fingerprint()}
