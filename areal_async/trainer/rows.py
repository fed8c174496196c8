"""Sequences as the engine trains them: alone (``TrainRow``), and packed into one row of tensors (``PackedRow``).

Entry ``i`` of every array of a ``TrainRow`` speaks of token ``i`` itself; the shift by one, from a token to the
position that predicts it, happens here and nowhere else. Invariant: a packed row scores each trained token of
its sequences exactly once and no other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainRow:
    """One sequence with what its loss needs. All arrays [L]."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    """True on the tokens that are trained: sampled by the policy and not over age. Never on the first."""
    behave_logprobs: NDArray[np.float32]
    """The server's, of the tempered distribution; ignored where ``loss_mask`` is False."""
    advantage: float | NDArray[np.float32]
    """One for the sequence, or one per token [L]."""
    current_mask: NDArray[np.bool_]
    """True on sampled tokens of the version that the step starts from."""
    index: int = 0
    """Position in the step's whole batch, whatever rank holds the row: it alone decides the mini-batch."""

    def __post_init__(self) -> None:
        lengths = {len(self.loss_mask), len(self.behave_logprobs), len(self.current_mask), *np.shape(self.advantage)}
        if not self.num_tokens or lengths != {self.num_tokens}:
            raise ValueError(f"train row {self.index}: got arrays of {sorted(lengths)} for {self.num_tokens} tokens")
        if self.loss_mask[0]:
            raise ValueError(f"train row {self.index}: the first token is in the loss, but nothing predicts it")

    @property
    def num_tokens(self) -> int:
        """L."""
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRow:
    """Several sequences in one row. T: tokens; S: scored ones, in the order of the row."""

    lengths: list[int]
    """Of the sequences; they add up to T."""
    token_ids_T: Tensor
    position_ids_T: Tensor
    """Start anew in each sequence."""
    predicting_S: Tensor
    """Position in the row whose output predicts the scored token."""
    targets_S: Tensor
    behave_S: Tensor
    advantages_S: Tensor
    mask_S: Tensor
    """False only on the token of an empty row."""
    current_S: Tensor


def pack_rows(rows: Sequence[TrainRow], device: torch.device) -> PackedRow:
    """Lay sequences end to end and score their trained tokens.

    Raises:
        ValueError: no token of these sequences is trained.
    """
    loss_mask_T = np.concatenate([row.loss_mask for row in rows])
    scored_S = np.flatnonzero(loss_mask_T)
    if not len(scored_S):
        raise ValueError("packing: got sequences without a trained token, need at least one")
    token_ids_T = np.concatenate([row.token_ids for row in rows]).astype(np.int64)
    advantages_T = np.concatenate([np.broadcast_to(np.float32(row.advantage), row.num_tokens) for row in rows])
    return PackedRow(
        lengths=[row.num_tokens for row in rows],
        token_ids_T=torch.from_numpy(token_ids_T).to(device),
        position_ids_T=torch.from_numpy(np.concatenate([np.arange(row.num_tokens) for row in rows])).to(device),
        predicting_S=torch.from_numpy(scored_S - 1).to(device),
        targets_S=torch.from_numpy(token_ids_T[scored_S]).to(device),
        behave_S=torch.from_numpy(np.concatenate([row.behave_logprobs for row in rows])[scored_S]).to(device),
        advantages_S=torch.from_numpy(advantages_T[scored_S]).to(device),
        mask_S=torch.ones(len(scored_S), dtype=torch.bool, device=device),
        current_S=torch.from_numpy(np.concatenate([row.current_mask for row in rows])[scored_S]).to(device),
    )


def empty_row(device: torch.device) -> PackedRow:
    """Return a row of two tokens that adds nothing: for a rank that has run out while others still compute."""
    return PackedRow(
        lengths=[2],
        token_ids_T=torch.zeros(2, dtype=torch.int64, device=device),
        position_ids_T=torch.arange(2, device=device),
        predicting_S=torch.zeros(1, dtype=torch.int64, device=device),
        targets_S=torch.zeros(1, dtype=torch.int64, device=device),
        behave_S=torch.zeros(1, device=device),
        advantages_S=torch.zeros(1, device=device),
        mask_S=torch.zeros(1, dtype=torch.bool, device=device),
        current_S=torch.zeros(1, dtype=torch.bool, device=device),
    )
