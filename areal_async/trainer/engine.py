"""The engine: rows in, one weights version further out.

Invariant: whatever the number of ranks and whichever of them holds a row, a step computes the gradient that one
rank with all rows would compute. Loss denominators are counts over all ranks; ranks that run out of rows go
on with empty ones, so that the collectives inside the model meet. Nothing here draws random numbers.

Every public method is a collective unless it says otherwise: all ranks call it, in the same order, from one thread
each.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self, cast

import structlog
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from areal_async.algorithms.aggregation import TOKEN_MEAN, Aggregation
from areal_async.algorithms.corrections import second_moment_cutoff
from areal_async.algorithms.objective import Objective, ScoredTokens
from areal_async.algorithms.policy import PolicyLoss
from areal_async.algorithms.presets import aggregation, policy_objective
from areal_async.hub import local_model
from areal_async.settings import ModelSettings, Settings, TrainerSettings
from areal_async.trainer import checkpoint, weights
from areal_async.trainer.distributed import Ranks
from areal_async.trainer.model import DTYPES, load_policy
from areal_async.trainer.optimizer import learning_rate, make_optimizer
from areal_async.trainer.pack import pack
from areal_async.trainer.rows import PackedRow, TrainRow, empty_row, pack_rows
from areal_async.trainer.stats import StepStats, Tally

__all__ = ["FsdpEngine", "StepStats"]

log = structlog.get_logger()


class FsdpEngine:
    """A policy sharded over the ranks (FSDP2), its optimizer and its loss. World size 1 is no special case."""

    def __init__(
        self,
        *,
        model: ModelSettings,
        trainer: TrainerSettings,
        ranks: Ranks,
        objective: Objective,
        temperature: float = 1.0,
        num_minibatches: int = 1,
        aggregation: Aggregation = TOKEN_MEAN,
    ) -> None:
        self._source = local_model(model.path)
        self._dtype = DTYPES[model.dtype]
        self._trainer = trainer
        self._ranks = ranks
        self._objective = objective
        self._num_minibatches = num_minibatches
        self._aggregation = aggregation
        self._policy = load_policy(
            self._source,
            ranks,
            dtype=self._dtype,
            temperature=temperature,
            activation_checkpointing=trainer.activation_checkpointing,
        )
        self._optimizer = make_optimizer(self._policy.parameters(), trainer)

    @classmethod
    def for_run(cls, settings: Settings, ranks: Ranks) -> Self:
        """Load ``settings.model`` and make the engine that ``algorithm`` and ``trainer`` describe."""
        return cls(
            model=settings.model,
            trainer=settings.trainer,
            ranks=ranks,
            objective=policy_objective(settings),
            temperature=settings.rollout.sampling.temperature,
            num_minibatches=settings.algorithm.num_minibatches,
            aggregation=aggregation(settings),
        )

    def train_step(self, rows: Sequence[TrainRow], *, step: int, total_steps: int) -> StepStats:
        """Train on this rank's rows; ranks may hold different numbers of them, even none.

        Args:
            step: counts from 1; decides the learning rate.
            total_steps: length of the learning rate's schedule.
        """
        lr = learning_rate(step, total_steps=total_steps, trainer=self._trainer)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        minibatches = [
            self._pack([row for row in rows if row.index % self._num_minibatches == turn and row.loss_mask.any()])
            for turn in range(self._num_minibatches)
        ]
        # With a single update the weights of the step's start are those being trained: no second forward pass.
        needs_starts = len(minibatches) > 1 and not self._is_loglinear
        starts = [self._packed_logprobs(minibatch) if needs_starts else None for minibatch in minibatches]
        tally = Tally()
        for minibatch, start in zip(minibatches, starts, strict=True):
            self._update(minibatch, start, tally)
        if tally.num_skipped:
            log.warning("update.skipped", step=step, num_skipped=tally.num_skipped, reason="gradient is not finite")
        return tally.stats(self._ranks, lr=lr)

    @torch.no_grad()
    def logprobs(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return for each row the logprob of every token in its loss, given those before it; 0 elsewhere [L]."""
        results = [torch.zeros(row.num_tokens) for row in rows]
        scored = [place for place, row in enumerate(rows) if row.loss_mask.any()]
        packs = pack([rows[place].num_tokens for place in scored], token_budget=self._trainer.token_budget)
        packed = self._padded([pack_rows([rows[scored[i]] for i in members], self._ranks.device) for members in packs])
        for number, row in enumerate(packed):
            logprobs_S = self._policy(row)[0].cpu()
            for member in packs[number] if number < len(packs) else []:
                place = scored[member]
                count = int(rows[place].loss_mask.sum())
                results[place][torch.from_numpy(rows[place].loss_mask)] = logprobs_S[:count]
                logprobs_S = logprobs_S[count:]
        return results

    @property
    def vocab_size(self) -> int:
        """Of the model's embedding."""
        return int(cast(Any, self._policy.causal_lm).config.vocab_size)

    def full_parameters(self) -> dict[str, Tensor]:
        """Return a copy of every parameter, whole, in float32, on the CPU of rank 0; nothing elsewhere."""
        buckets = weights.plan(self._policy.causal_lm, torch.float32, max_bytes=0)
        return weights.gather(self._policy.causal_lm, buckets, self._ranks)

    def save_weights(self, directory: Path) -> dict[str, str]:
        """Write a Hugging Face folder atomically; return {safetensors file: sha256}, equal on every rank."""
        buckets = self.plan_buckets(max_bytes=0)
        return weights.save(self._policy.causal_lm, buckets, directory, source=self._source, ranks=self._ranks)

    def plan_buckets(self, *, max_bytes: int) -> list[weights.Bucket]:
        """Return how the weights, as they are served, are divided for ``gather_weights``. No collective."""
        return weights.plan(self._policy.causal_lm, self._dtype, max_bytes=max_bytes)

    def gather_weights(
        self, buckets: Sequence[weights.Bucket], *, send: Callable[[Tensor], None] | None = None
    ) -> dict[str, Tensor]:
        """Return copies of the weights, as they are served, on the CPU of rank 0; nothing elsewhere.

        Args:
            send: takes each bucket's bytes on rank 0's device. It may block, shorter than a collective may take.
        """
        return weights.gather(self._policy.causal_lm, buckets, self._ranks, send=send)

    def write_weights(self, tensors: dict[str, Tensor], directory: Path) -> dict[str, str]:
        """Write what ``gather_weights`` returned, as ``save_weights`` does. Rank 0's alone, from any thread."""
        config = cast(Any, self._policy.causal_lm).config
        return weights.write(tensors, directory, source=self._source, config=config)

    def save_checkpoint(self, directory: Path, ledger: bytes) -> None:
        """Write model, optimizer and ledger atomically. ``ledger`` counts on rank 0."""
        checkpoint.save(self._policy.causal_lm, self._optimizer, directory, ledger=ledger, ranks=self._ranks)

    def load_checkpoint(self, directory: Path) -> bytes:
        """Restore model and optimizer, written by any number of ranks, and return the ledger on every rank."""
        return checkpoint.load(self._policy.causal_lm, self._optimizer, directory, ranks=self._ranks)

    def _pack(self, rows: Sequence[TrainRow]) -> list[PackedRow]:
        # A trajectory's rows share its position, and are together on one rank and in one mini-batch.
        lengths = Counter[int]()
        for row in rows:
            lengths[row.index] += int(row.loss_mask.sum())
        shares = [self._aggregation.share(lengths[row.index]) for row in rows]
        packs = pack([row.num_tokens for row in rows], token_budget=self._trainer.token_budget)
        return self._padded(
            [
                pack_rows([rows[i] for i in members], self._ranks.device, [shares[i] for i in members])
                for members in packs
            ]
        )

    def _padded(self, packed: list[PackedRow]) -> list[PackedRow]:
        """Append empty rows until every rank has as many as the one with the most."""
        count = torch.tensor([len(packed)], device=self._ranks.device)
        most = int(self._ranks.reduce(count, dist.ReduceOp.MAX).item())
        return packed + [empty_row(self._ranks.device)] * (most - len(packed))

    @torch.no_grad()
    def _packed_logprobs(self, minibatch: Iterable[PackedRow]) -> list[Tensor]:
        return [self._policy(row)[0] for row in minibatch]

    def _update(self, minibatch: Sequence[PackedRow], starts_S: Sequence[Tensor] | None, tally: Tally) -> None:
        """Make one optimizer update from the gradients of all these rows on all ranks."""
        units = torch.stack([row.units_S.sum() for row in minibatch]).sum() if minibatch else torch.zeros(())
        denominator = self._ranks.reduce(units.double().to(self._ranks.device), dist.ReduceOp.SUM).item()
        if not denominator:
            return
        keeps_S = self._kept(minibatch)
        for number, row in enumerate(minibatch):
            # Gradients are summed locally and cross the ranks once, with the last row.
            cast(FSDPModule, self._policy).set_requires_gradient_sync(number == len(minibatch) - 1)
            logprobs_S, entropy_S = self._policy(row)
            terms = self._objective(
                ScoredTokens(
                    logprobs_T=logprobs_S,
                    entropy_T=entropy_S,
                    start_T=starts_S[number] if starts_S else logprobs_S.detach(),
                    behave_T=row.behave_S,
                    advantages_T=row.advantages_S,
                    mask_T=row.mask_S,
                    current_T=row.current_S,
                    sequence_T=row.sequence_S,
                    weight_T=row.weights_S,
                    age_T=row.ages_S,
                    keep_T=keeps_S[number] if keeps_S else None,
                )
            )
            # FSDP takes the mean over ranks, and the loss is a mean over those of all ranks: undo the former.
            (terms.loss * (self._ranks.size / denominator)).backward()
            tally.add(terms, row)
        grad_norm = self._clip_gradients()
        tally.add_update(grad_norm)
        if math.isfinite(grad_norm):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    @property
    def _is_loglinear(self) -> bool:
        return isinstance(self._objective, PolicyLoss) and self._objective.is_loglinear

    def _kept(self, minibatch: Sequence[PackedRow]) -> list[Tensor] | None:
        """Return which tokens M2PO keeps, row by row: its threshold speaks of all tokens of the mini-batch at once."""
        threshold = self._objective.m2_threshold if isinstance(self._objective, PolicyLoss) else None
        if threshold is None:
            return None
        squares_S = [
            (logprobs_S - row.behave_S).double().square()
            for logprobs_S, row in zip(self._packed_logprobs(minibatch), minibatch, strict=True)
        ]
        trained = [squares[row.mask_S] for squares, row in zip(squares_S, minibatch, strict=True)]
        cutoff = second_moment_cutoff(self._of_all_ranks(torch.cat(trained)), threshold=threshold)
        return [squares < cutoff for squares in squares_S]

    def _of_all_ranks(self, values_N: Tensor) -> Tensor:
        """Return the values of every rank, of which each may hold another number."""
        if self._ranks.size == 1:
            return values_N
        count = torch.tensor([len(values_N)], device=values_N.device)
        most = int(self._ranks.reduce(count, dist.ReduceOp.MAX).item())
        padded = torch.cat([values_N, values_N.new_full((most - len(values_N),), math.nan)])
        parts = [torch.empty_like(padded) for _ in range(self._ranks.size)]
        dist.all_gather(parts, padded)
        every = torch.cat(parts)
        return every[~every.isnan()]

    def _clip_gradients(self) -> float:
        """Scale the gradients down to ``max_grad_norm``; return the norm they had over all ranks."""
        gradients = [_local(p.grad) for p in self._policy.parameters() if p.grad is not None]
        square = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        grad_norm = math.sqrt(self._ranks.reduce(square, dist.ReduceOp.SUM).item())
        if math.isfinite(grad_norm) and grad_norm > self._trainer.max_grad_norm:
            torch._foreach_mul_(gradients, self._trainer.max_grad_norm / (grad_norm + 1e-6))
        return grad_norm


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
