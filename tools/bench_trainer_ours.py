"""One contender of ``tools/bench_trainer.py``: a training step on the benchmark's batch, in one of three layouts.

``packed`` is the engine as a run uses it. ``dense`` and ``padded`` are a plain loop around the model as transformers
runs it with sdpa, without sharding; head, loss, optimizer and clipping are the engine's. ``dense`` trains rows that are
all of the batch's mean length: no layout can do less. ``padded`` fills every row up to the longest, behind a mask.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from areal_async.algorithms.objective import ScoredTokens
from areal_async.algorithms.presets import policy_objective
from areal_async.config.settings import AlgorithmSettings, ModelSettings, RolloutSettings, Settings, TrainerSettings
from areal_async.trainer.engine.model import PolicyModel
from areal_async.trainer.engine.optimizer import make_optimizer
from areal_async.trainer.engine.parallel.ranks import Ranks, joined_ranks
from areal_async.trainer.engine.policy import FsdpEngine
from areal_async.trainer.packing.rows import PackedRow, TrainRow, pack_rows
from tools.rounds import Clock, Stage

Step = Callable[[], float]
"""Makes one optimizer update and returns the gradient's norm."""


def main() -> None:
    """Play rounds until there is nobody to play for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layout", choices=("packed", "dense", "padded"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=Path, required=True)
    parser.add_argument("--token-budget", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    stage = Stage()
    with joined_ranks(deadline_s=600.0, num_threads=arguments.threads) as ranks:
        rows = read_rows(arguments.batch)
        if arguments.layout == "dense":
            rows = of_mean_length(rows)
        settings = settings_of(arguments.model, arguments.token_budget)
        step = _packed(settings, rows, ranks) if arguments.layout == "packed" else _plain(settings, rows)
        num_tokens = sum(int(row.loss_mask.sum()) for row in rows)
        while stage.wait():
            clock = Clock()
            grad_norm = step()
            stage.report({**clock.read(), "num_tokens": num_tokens, "grad_norm": grad_norm})


def settings_of(model: str, token_budget: int) -> Settings:
    """Return GRPO on one batch, on-policy, in float32: ratios of 1, a mean over tokens, no KL.

    The gradient is measured but not clipped, and steps are so small that every round has the same work.
    """
    return Settings(
        model=ModelSettings(path=model, dtype="float32"),
        algorithm=AlgorithmSettings(decoupled=False),
        rollout=RolloutSettings(max_staleness=0),
        trainer=TrainerSettings(lr=1e-8, token_budget=token_budget, max_grad_norm=1e9, betas=(0.9, 0.999)),
    )


def read_rows(path: Path) -> list[TrainRow]:
    """Return the batch's sequences; see ``bench_trainer.write_batch``."""
    with np.load(path) as arrays:
        tokens, prompts = arrays["token_ids"], arrays["prompt_lengths"]
        ends = np.cumsum(prompts + arrays["answer_lengths"])
        parts = zip(np.split(tokens, ends[:-1]), prompts, arrays["advantages"], strict=True)
        return [_row(ids, int(prompt), float(advantage), index) for index, (ids, prompt, advantage) in enumerate(parts)]


def of_mean_length(rows: Sequence[TrainRow]) -> list[TrainRow]:
    """Return as many rows of one length, of about as many tokens and as many trained ones."""
    prompt = round(np.mean([int((~row.loss_mask).sum()) for row in rows]))
    answer = round(np.mean([int(row.loss_mask.sum()) for row in rows]))
    tokens = np.resize(np.concatenate([row.token_ids for row in rows]), (len(rows), prompt + answer))
    return [_row(ids, prompt, float(row.advantage), row.index) for ids, row in zip(tokens, rows, strict=True)]


def _row(ids: "np.typing.NDArray[Any]", prompt: int, advantage: float, index: int) -> TrainRow:
    mask = np.arange(len(ids)) >= prompt
    return TrainRow(
        token_ids=ids.astype(np.int32),
        loss_mask=mask,
        behave_logprobs=np.zeros(len(ids), np.float32),
        advantage=advantage,
        current_mask=mask,
        index=index,
    )


def _packed(settings: Settings, rows: list[TrainRow], ranks: Ranks) -> Step:
    engine = FsdpEngine.for_run(settings, ranks)
    behaved = with_behaviour(rows, engine.logprobs(rows))
    return lambda: engine.train_step(behaved, step=1, total_steps=1).grad_norm


def with_behaviour(rows: Sequence[TrainRow], logprobs: Sequence[Tensor]) -> list[TrainRow]:
    """Return the rows as if the model had just said them."""
    return [replace(row, behave_logprobs=one.numpy()) for row, one in zip(rows, logprobs, strict=True)]


class DensePolicy(PolicyModel):
    """The policy on rows of one length, as a batch of [B, L], padded behind a mask or not padded at all."""

    lengths: Sequence[int] = ()
    """Tokens of the sequences before padding."""

    def forward(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        """Return logprob and entropy of every scored token."""
        ids_BL = row.token_ids_T.view(len(row.lengths), -1)
        length = ids_BL.shape[1]
        mask_BL = None
        if min(self.lengths) < length:
            mask_BL = (torch.arange(length) < torch.tensor(self.lengths)[:, None]).long()
        causal_lm: Any = self.decoder
        hidden_BLH = causal_lm.base_model(ids_BL, attention_mask=mask_BL, use_cache=False).last_hidden_state
        hidden_SH = hidden_BLH.flatten(0, 1).index_select(0, row.predicting_S)
        return self._score(hidden_SH, row.targets_S, row.temperature)


def _plain(settings: Settings, rows: list[TrainRow]) -> Step:
    from transformers import AutoModelForCausalLM

    longest = max(row.num_tokens for row in rows)
    size = max(1, settings.trainer.token_budget // longest)
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    policy = DensePolicy(
        AutoModelForCausalLM.from_pretrained(settings.model.path, dtype=torch.float32, attn_implementation="sdpa")
    )
    optimizer = make_optimizer(policy.parameters(), settings.trainer)
    objective = policy_objective(settings)
    num_tokens = sum(int(row.loss_mask.sum()) for row in rows)

    def step() -> float:
        for part in parts:
            packed = pack_rows([_filled_up(row, longest) for row in part], torch.device("cpu"))
            policy.lengths = [row.num_tokens for row in part]
            logprobs_S, entropy_S = policy(packed)
            terms = objective(
                ScoredTokens(
                    logprobs_T=logprobs_S,
                    entropy_T=entropy_S,
                    start_T=logprobs_S.detach(),
                    behave_T=logprobs_S.detach(),
                    advantages_T=packed.advantages_S,
                    mask_T=packed.mask_S,
                    current_T=packed.current_S,
                    sequence_T=packed.sequence_S,
                    weight_T=packed.weights_S,
                )
            )
            (terms.loss / num_tokens).backward()
        grad_norm = clip_grad_norm_(policy.parameters(), settings.trainer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(grad_norm)

    return step


def _filled_up(row: TrainRow, length: int) -> TrainRow:
    more = length - row.num_tokens
    return replace(
        row,
        token_ids=np.pad(row.token_ids, (0, more)),
        loss_mask=np.pad(row.loss_mask, (0, more)),
        behave_logprobs=np.pad(row.behave_logprobs, (0, more)),
        current_mask=np.pad(row.current_mask, (0, more)),
    )


if __name__ == "__main__":
    main()
