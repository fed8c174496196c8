"""Sequences as the engine trains them: alone (``TrainRow``), and packed into one row of tensors (``PackedRow``).

Entry ``i`` of every array of a ``TrainRow`` speaks of token ``i`` itself; the shift by one, from a token to the
position that predicts it, happens here and nowhere else. Invariant: a packed row scores each trained token of
its sequences exactly once and no other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal_async.algorithms.aggregation import TokenShare

START = "start_logprobs"
"""Column: logprobs by the weights that the step starts from."""
REFERENCE = "reference_logprobs"
"""Column: logprobs by the reference model."""
VALUES = "values"
"""Column: the critic's values, by its weights at the step's start."""
RETURNS = "returns"
"""Column: what its values are to become."""
GREEDY_BELOW = 1e-6
"""A temperature at which servers take the likeliest token, and report the logprobs of temperature 1."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainRow:
    """One sequence with what its loss needs. All arrays [L]."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    """True on the tokens that are trained: sampled by the policy and not over age. Never on the first."""
    behave_logprobs: NDArray[np.float32]
    """Logprobs of the server, of the tempered distribution, in nats; ignored where ``loss_mask`` is False."""
    advantage: float | NDArray[np.float32]
    """Advantage of the sequence, or of each token [L]."""
    current_mask: NDArray[np.bool_]
    """True on sampled tokens of the version that the step starts from, where trainer and server should agree: not on
    steered ones (``types.Sequence``)."""
    ages: NDArray[np.int64] | None = None
    """Versions between the one that sampled each token and the step's start; a log-linear proximal policy needs it."""
    columns: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    """What calls of other models say of each token, by name (``START``, ``VALUES``, ...); ignored where ``loss_mask``
    is False."""
    temperature: float | NDArray[np.float32] = 1.0
    """Temperature that the policy sampled at, 0 for greedy: one for the sequence, or one per token [L]."""
    turns: NDArray[np.int16] | None = None
    """Number of the credited reply that each token belongs to; None where the sequence is one. A ratio or a correction
    of whole sequences is then each reply's."""
    images: tuple[bytes, ...] = ()
    """PNGs of what its tokens show, in their order, in the size that the model sees; siblings may share the bytes."""
    index: int = 0
    """Position in the step's whole batch, whatever rank holds the row: it alone decides the mini-batch."""

    def __post_init__(self) -> None:
        lengths = {len(self.loss_mask), len(self.behave_logprobs), len(self.current_mask)}
        lengths |= {*np.shape(self.advantage), *np.shape(self.temperature)}
        lengths |= {len(column) for column in (self.ages, self.turns, *self.columns.values()) if column is not None}
        if not self.num_tokens or lengths != {self.num_tokens}:
            raise ValueError(f"train row {self.index}: got arrays of {sorted(lengths)} for {self.num_tokens} tokens")
        if self.loss_mask[0]:
            raise ValueError(f"train row {self.index}: the first token is in the loss, but nothing predicts it")

    @property
    def num_tokens(self) -> int:
        """Length of the sequence, L."""
        return len(self.token_ids)


def unsampled_row(token_ids: Sequence[int], loss_mask: Sequence[bool], *, index: int = 0) -> TrainRow:
    """Return a row that no server has sampled, and that has no advantage."""
    length = len(token_ids)
    return TrainRow(
        token_ids=np.array(token_ids, dtype=np.int32),
        loss_mask=np.array(loss_mask, dtype=np.bool_),
        behave_logprobs=np.zeros(length, dtype=np.float32),
        advantage=0.0,
        current_mask=np.zeros(length, dtype=np.bool_),
        index=index,
    )


def with_columns(
    rows: Sequence[TrainRow], columns: Mapping[str, Sequence[Any]], *, advantages: Sequence[Any] | None = None
) -> list[TrainRow]:
    """Return the rows with these columns, each a list of arrays by row, and their advantages replaced.

    Raises:
        ValueError: a list is not as long as the rows.
    """
    named = [*columns.items(), *([("advantages", advantages)] if advantages is not None else [])]
    for name, values in named:
        if len(values) != len(rows):
            raise ValueError(f"{name}: got {len(values)} for {len(rows)} rows, need one for each, in their order")
    return [
        replace(
            row,
            columns={**row.columns, **{name: np.asarray(column[place]) for name, column in columns.items()}},
            advantage=row.advantage if advantages is None else advantages[place],
        )
        for place, row in enumerate(rows)
    ]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedImages:
    """What the tokens of a packed row show. T: its tokens, I of which show a part of an image each."""

    patches: Sequence[Tensor]
    """Patches of each image that is shown, once, in host memory: [number of patches, values of one]."""
    grids_N3: Tensor
    """Patches of each image in time, height and width, in host memory."""
    position_ids_4T: Tensor
    """``PackedRow.position_ids_T``, and in time, height and width, where an image's tokens stand side by side."""
    at_I: Tensor
    """Positions in the row of the tokens that show."""
    shown_I: Tensor
    """What each shows: its number among the tokens of all ``patches``."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRow:
    """Several sequences in one row. T: tokens; S: scored ones, in the order of the row."""

    lengths: list[int]
    """Tokens of each sequence; they add up to T."""
    token_ids_T: Tensor
    position_ids_T: Tensor
    """Positions [T], which start anew in each sequence."""
    predicting_S: Tensor
    """Position in the row whose output predicts the scored token."""
    targets_S: Tensor
    behave_S: Tensor
    advantages_S: Tensor
    mask_S: Tensor
    """False only on the token of an empty row."""
    current_S: Tensor
    sequence_S: Tensor
    """Number of each token's sequence in the row, or of its credited reply, from 0; each number has a token."""
    weights_S: Tensor
    """What each token counts in the loss (``algorithms.aggregation``)."""
    units_S: Tensor
    """What each token adds to the loss's denominator; 0 on the token of an empty row."""
    temperature: float | Tensor = 1.0
    """Divides the logits: one for all scored tokens, or each one's [S] where they differ. Greedy is 1."""
    ages_S: Tensor | None = None
    columns_S: Mapping[str, Tensor] = field(default_factory=dict)
    """The columns that all of its sequences have."""
    images: PackedImages | None = None
    """None where no row of the call shows any, on any rank (``images``)."""


def pack_rows(rows: Sequence[TrainRow], device: torch.device, shares: Sequence[TokenShare] | None = None) -> PackedRow:
    """Lay sequences end to end and score their trained tokens.

    Args:
        shares: by row; None counts every token once.

    Raises:
        ValueError: no token of these sequences is trained.
    """
    loss_mask_T = np.concatenate([row.loss_mask for row in rows])
    scored_S = np.flatnonzero(loss_mask_T)
    if not len(scored_S):
        raise ValueError("packing: got sequences without a trained token, need at least one")
    token_ids_T = np.concatenate([row.token_ids for row in rows]).astype(np.int64)
    advantages_T = np.concatenate([np.broadcast_to(np.float32(row.advantage), row.num_tokens) for row in rows])
    row_S = np.repeat(np.arange(len(rows)), [row.num_tokens for row in rows])[scored_S]
    shares_N2 = np.array(shares or [TokenShare()] * len(rows), dtype=np.float64)
    ages = [row.ages for row in rows if row.ages is not None]
    columns = {
        name: np.concatenate([row.columns[name] for row in rows]).astype(np.float32)[scored_S]
        for name in rows[0].columns
        if all(name in row.columns for row in rows)
    }
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
        sequence_S=torch.from_numpy(_numbered(rows)).to(device),
        weights_S=torch.from_numpy(shares_N2[row_S, 0].astype(np.float32)).to(device),
        units_S=torch.from_numpy(shares_N2[row_S, 1]).to(device),
        temperature=_temperature(rows, scored_S, device),
        ages_S=torch.from_numpy(np.concatenate(ages)[scored_S]).to(device) if len(ages) == len(rows) else None,
        columns_S={name: torch.from_numpy(column_S).to(device) for name, column_S in columns.items()},
    )


def _temperature(rows: Sequence[TrainRow], scored_S: NDArray[np.int64], device: torch.device) -> float | Tensor:
    """Return what divides the logits of the scored tokens: a single number where it is the same for all."""
    laid_out = [np.broadcast_to(np.float32(row.temperature), row.num_tokens) for row in rows]
    each_S = np.concatenate(laid_out)[scored_S]
    each_S = np.where(each_S < GREEDY_BELOW, np.float32(1.0), each_S)
    return float(each_S[0]) if (each_S == each_S[0]).all() else torch.from_numpy(each_S).to(device)


def _numbered(rows: Sequence[TrainRow]) -> NDArray[np.int64]:
    """Number what a ratio of whole sequences is taken of: each sequence, or each of its credited replies [S]."""
    numbers: list[NDArray[np.int64]] = []
    count = 0
    for row in rows:
        turns = row.turns if row.turns is not None else np.zeros(row.num_tokens, dtype=np.int16)
        present, inverse = np.unique(turns[row.loss_mask], return_inverse=True)
        numbers.append(count + inverse.astype(np.int64))
        count += len(present)
    return np.concatenate(numbers)


def empty_row(device: torch.device, columns: Sequence[str] = ()) -> PackedRow:
    """Return a row of two tokens that adds nothing: for a rank that has run out while others still compute."""
    row = pack_rows([unsampled_row([0, 0], [False, True])], device)
    nothing: dict[str, Any] = {
        name: torch.zeros_like(getattr(row, name)) for name in ("mask_S", "weights_S", "units_S")
    }
    return replace(
        row,
        **nothing,
        ages_S=torch.zeros(1, dtype=torch.int64, device=device),
        columns_S={name: torch.zeros(1, device=device) for name in columns},
    )
