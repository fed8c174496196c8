"""Decoders of a few thousand parameters and rows to train them on, for the engine's tests."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from areal_async.config.settings import AlgorithmSettings, ModelSettings, RolloutSettings, Settings, TrainerSettings
from areal_async.protocol.types import Trajectory
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.policy import FsdpEngine
from areal_async.trainer.packing.rows import TrainRow

VOCAB = 61
FAMILIES = ("qwen2", "qwen3", "llama")


def save_model(
    directory: Path,
    *,
    family: str = "qwen3",
    seed: int = 0,
    tied: bool = True,
    num_layers: int = 2,
    vocab_size: int = VOCAB,
    **given: Any,
) -> Path:
    """Write a random decoder with grouped-query attention and the files that stand beside weights."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family, vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=num_layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=tied, max_position_embeddings=128,
        initializer_range=0.2, bos_token_id=None, eos_token_id=1, pad_token_id=0, **given,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def engine_of(
    model: Path,
    ranks: Ranks,
    *,
    dtype: str = "float32",
    algorithm: dict[str, Any] | None = None,
    max_staleness: int = 2,
    **trainer: Any,
) -> FsdpEngine:
    """Make an engine with a learning rate that shows."""
    settings = Settings(
        model=ModelSettings.model_validate({"path": str(model), "dtype": dtype}),
        algorithm=AlgorithmSettings.model_validate(algorithm or {}),
        rollout=RolloutSettings(max_staleness=max_staleness),
        trainer=TrainerSettings.model_validate({"lr": 1e-2, "token_budget": 64, "num_ranks": ranks.size, **trainer}),
    )
    return FsdpEngine.for_run(settings, ranks)


def random_rows(count: int = 10, *, seed: int = 0) -> list[TrainRow]:
    """Make rows of 2 to 24 tokens with behaviour logprobs near those of a random model."""
    random = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        length = int(random.integers(2, 25))
        mask = np.arange(length) >= random.integers(1, length)
        mask[-1] = True
        rows.append(
            TrainRow(
                token_ids=random.integers(0, VOCAB, length).astype(np.int32),
                loss_mask=mask,
                behave_logprobs=random.normal(-4.1, 0.3, length).astype(np.float32),
                advantage=float(random.normal()),
                current_mask=mask & (random.random(length) < 0.5),
                index=index,
            )
        )
    return rows


def tempered(rows: list[TrainRow]) -> list[TrainRow]:
    """Return the rows, of which every second was sampled at several temperatures, some tokens greedily."""
    choices = np.array([0.6, 1.4, 0.0], dtype=np.float32)
    return [replace(row, temperature=choices[np.arange(row.num_tokens) % 3]) if row.index % 2 else row for row in rows]


def parameters_differ(left: FsdpEngine, right: FsdpEngine) -> float:
    """Return the largest absolute difference between two engines' parameters."""
    theirs = right.full_parameters()
    return max(float((value - theirs[name]).abs().max()) for name, value in left.full_parameters().items())


def rows_as_trained(trajectories: Mapping[int, Trajectory], advantages: Mapping[int, Any]) -> list[TrainRow]:
    """Return the rows of some trajectories, by position, with these advantages: one, or one for each token."""
    return [
        TrainRow(
            token_ids=sequence.token_ids,
            loss_mask=sequence.loss_mask,
            behave_logprobs=sequence.logprobs,
            advantage=advantages[position],
            current_mask=sequence.loss_mask,
            temperature=1.0 if sequence.temperatures is None else sequence.temperatures,
            index=position,
        )
        for position, trajectory in trajectories.items()
        for sequence in trajectory.sequences
    ]
