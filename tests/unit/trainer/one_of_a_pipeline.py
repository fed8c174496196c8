"""What each of four ranks does in ``test_pipeline.py``: it trains in three layouts, and rank 0 writes what it saw."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from areal_async.config.settings import ModelSettings, Settings, TrainerSettings
from areal_async.trainer.engine.checkpoint import TrainState
from areal_async.trainer.engine.critic import CriticEngine
from areal_async.trainer.engine.engines import Engines
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.policy import FsdpEngine, ReferenceEngine
from areal_async.trainer.packing.rows import RETURNS, VALUES, TrainRow, with_columns
from tests.unit.trainer.models import engine_of, random_rows, tempered

NUM_STEPS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "four_stages": {"pipeline_parallel": 4},
    "two_by_two": {"pipeline_parallel": 2},
    "interleaved": {"pipeline_parallel": 2, "pipeline_schedule": "interleaved"},
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "four_stages": {"entropy_coef": 0.01},
    "two_by_two": {"name": "m2po", "num_minibatches": 2},
    "interleaved": {"name": "gspo", "num_minibatches": 2},
}
"""Of the run in each layout."""
Arrays = dict[str, NDArray[Any]]


def batch_rows() -> list[TrainRow]:
    """Return the rows of the whole batch, which fill seven packed ones."""
    return tempered(random_rows(24, seed=3))


def own_rows(engine: Any, rows: Sequence[TrainRow]) -> list[TrainRow]:
    """Return those of the rows that this rank holds; of two that hold different ones, the first has a third."""
    ranks = engine.dims.data
    return [row for row in rows if ranks.size == 1 or (row.index % 3 == 0) == (ranks.rank == 0)]


def gradients(model: Path, ranks: Ranks, **layout: Any) -> Arrays:
    """Return the gradient of every parameter, unclipped: AdamW's first average without a memory."""
    engine = engine_of(model, ranks, max_grad_norm=1e9, betas=(0.0, 0.95), **layout)
    engine.train_step(own_rows(engine, batch_rows()), step=1, total_steps=1)
    _show_average(engine.trained)
    return arrays(engine.full_parameters())


def run(model: Path, ranks: Ranks, algorithm: Mapping[str, Any], **layout: Any) -> tuple[FsdpEngine, Arrays]:
    """Return what three steps reported and the parameters they led to, and the engine that made them."""
    engine = engine_of(model, ranks, algorithm=dict(algorithm), max_grad_norm=1e-2, lr=1e-3, **layout)
    return engine, train(engine, NUM_STEPS)


def train(engine: FsdpEngine, num_steps: int) -> Arrays:
    """Return what some steps reported, and the parameters they led to."""
    rows = own_rows(engine, batch_rows())
    stats = [engine.train_step(rows, step=step, total_steps=NUM_STEPS) for step in range(1, num_steps + 1)]
    told = {f"{step}.{name}": np.array(one) for step, seen in enumerate(stats) for name, one in asdict(seen).items()}
    return told | arrays(engine.full_parameters())


def others(model: Path, ranks: Ranks, **layout: Any) -> Arrays:
    """Return what a critic learned in a step, what it then expects, and what a reference says."""
    settings = Settings(
        model=ModelSettings(path=str(model), dtype="float32"),
        trainer=TrainerSettings.model_validate({"token_budget": 64, "num_ranks": ranks.size, **layout}),
    )
    critic, reference = CriticEngine(settings, ranks), ReferenceEngine(settings, ranks)
    rows = batch_rows()
    columns = {VALUES: [np.zeros(row.num_tokens, np.float32) for row in rows]}
    columns[RETURNS] = [np.full(row.num_tokens, row.advantage, np.float32) for row in rows]
    stats = critic.train_step(own_rows(critic, with_columns(rows, columns)), step=1, total_steps=1)
    return {
        "value_grad_norm": np.array(stats.value_grad_norm),
        "values": torch.cat(critic.values(rows)).numpy(),
        "reference": torch.cat(reference.base_logprobs(rows)).numpy(),
        **{f"critic.{name}": one for name, one in arrays(critic.full_parameters()).items()},
    }


def few_rows(model: Path, ranks: Ranks, **layout: Any) -> Arrays:
    """Train on a single sequence, then on none; say what one of them is worth, and what none are."""
    engine = engine_of(model, ranks, **layout)
    row = batch_rows()[0]
    for step, rows in enumerate(([row], []), start=1):
        engine.train_step(own_rows(engine, rows), step=step, total_steps=2)
    (logprobs,) = engine.logprobs([row])
    return {
        "logprobs": logprobs.numpy(),
        "none": np.array(len(engine.logprobs([]))),
        **arrays(engine.full_parameters()),
    }


def arrays(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


@torch.no_grad()
def _show_average(trained: TrainState) -> None:
    """Put AdamW's average in place of each parameter."""
    for group in trained.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.copy_(trained.optimizer.state[parameter]["exp_avg"])


def train_in_stages(ranks: Ranks, model: Path, directory: Path) -> None:
    """Train in every layout; save in one, and go on in another from what one rank saved."""
    for name, layout in LAYOUTS.items():
        engine, seen = run(model, ranks, ALGORITHMS[name], **layout)
        seen |= {f"gradient.{key}": one for key, one in gradients(model, ranks, **layout).items()}
        if name == "four_stages":
            seen |= {f"few.{key}": one for key, one in few_rows(model, ranks, **layout).items()}
            seen |= {f"others.{key}": one for key, one in others(model, ranks, **layout).items()}
        if name == "two_by_two":
            Engines(actor=engine).save_checkpoint(directory / "saved_on_four", b"four")
            engine.save_weights(directory / "weights")
            seen |= {f"next.{key}": one for key, one in train(engine, 1).items()}
        if name == "interleaved":
            engine = engine_of(model, ranks, **layout)
            Engines(actor=engine).load_checkpoint(directory / "saved_on_one")
            seen["logprobs"] = torch.cat(engine.logprobs(batch_rows())).numpy()
            seen |= {f"next.{key}": one for key, one in train(engine, 1).items()}
        if ranks.rank == 0:
            np.savez(directory / f"{name}.npz", **seen)
