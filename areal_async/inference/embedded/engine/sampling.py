"""Sampling one token for every row of a batch, each row by its own parameters.

Letters: N rows, V vocabulary.

Every row draws by inverting its cumulative distribution at one uniform number, and that number is a hash of the
request's seed and the token's index. So a seeded request gives the same tokens in any company, interrupted or not, and
the whole batch needs one random number per row instead of one per row and vocabulary entry.

Returned log-probabilities are those of softmax(logits / temperature) over the whole vocabulary, before top-k, top-p and
min-p cut it (SGLang's default); greedy rows use temperature 1. The logits are the steered ones, where they are.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_UNIT = 2.0**-52
"""52 bits, so that a uniform number times any total stays strictly below that total."""

_IMPOSSIBLE = torch.finfo(torch.float32).min
"""Log-probability of a token that cannot come, as SGLang writes it; JSON has no infinity."""

UInt64s = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The parameters of N rows. Fields that no row uses are None, which skips their work."""

    temperatures_N: torch.Tensor | None
    is_greedy_N: torch.Tensor | None
    top_k_N: torch.Tensor | None
    """Together with ``top_p_N`` and ``min_p_N``: all None or all set."""
    top_p_N: torch.Tensor | None
    min_p_N: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Drawn:
    """What came of a batch. K likeliest tokens each, where anybody asked for them."""

    ids_N: torch.Tensor
    logprobs_N: torch.Tensor
    top_logprobs_NK: torch.Tensor | None = None
    top_ids_NK: torch.Tensor | None = None


def uniforms(seeds: UInt64s, indexes: UInt64s) -> npt.NDArray[np.float64]:
    """Hash (seed, token index) pairs to numbers in [0, 1) (splitmix64's finalizer, twice)."""
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds + _GOLDEN) + (indexes + np.uint64(1)) * _GOLDEN)
    return (mixed >> np.uint64(12)).astype(np.float64) * _UNIT


def _mix(values: UInt64s) -> UInt64s:
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def sample(logits_NV: torch.Tensor, rows: SamplingRows, uniforms_N: torch.Tensor | None, *, num_top: int = 0) -> Drawn:
    """Draw one token for every row.

    Args:
        uniforms_N: float64 in [0, 1); None when every row is greedy.
        num_top: how many of the likeliest tokens to name as well.
    """
    logits_NV = logits_NV.float()
    if rows.temperatures_N is not None:
        logits_NV = logits_NV / rows.temperatures_N[:, None]
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    if uniforms_N is None:
        ids_N = logprobs_NV.argmax(dim=-1)
    else:
        ids_N = _draw(logprobs_NV, rows, uniforms_N)
        if rows.is_greedy_N is not None:
            ids_N = torch.where(rows.is_greedy_N, logprobs_NV.argmax(dim=-1), ids_N)
    logprobs_N = logprobs_NV.gather(1, ids_N[:, None])[:, 0]
    if not num_top:
        return Drawn(ids_N, logprobs_N)
    top_NK = logprobs_NV.topk(min(num_top, logprobs_NV.shape[-1]), dim=-1)
    return Drawn(ids_N, logprobs_N, top_NK.values.clamp(min=_IMPOSSIBLE), top_NK.indices)


def _draw(logprobs_NV: torch.Tensor, rows: SamplingRows, uniforms_N: torch.Tensor) -> torch.Tensor:
    probs_NV = logprobs_NV.exp()
    if rows.top_k_N is None or rows.top_p_N is None or rows.min_p_N is None:
        return _invert(probs_NV, uniforms_N)
    sorted_NV, order_NV = probs_NV.sort(dim=-1, descending=True)
    before_NV = sorted_NV.cumsum(dim=-1) - sorted_NV
    rank_V = torch.arange(sorted_NV.shape[-1], device=sorted_NV.device)
    is_cut_NV = (
        (rank_V >= rows.top_k_N[:, None])
        | (before_NV > rows.top_p_N[:, None])
        | (sorted_NV < sorted_NV[:, :1] * rows.min_p_N[:, None])
    )
    picked_N = _invert(sorted_NV.masked_fill(is_cut_NV, 0.0), uniforms_N)
    return order_NV.gather(1, picked_N[:, None])[:, 0]


def _invert(weights_NV: torch.Tensor, uniforms_N: torch.Tensor) -> torch.Tensor:
    # float64: over a large vocabulary a float32 running sum loses the tail. The first entry whose running sum exceeds
    # the target has a positive weight, so a token of probability zero is never drawn.
    sums_NV = weights_NV.cumsum(dim=-1, dtype=torch.float64)
    targets_N1 = uniforms_N[:, None] * sums_NV[:, -1:]
    picked_N = torch.searchsorted(sums_NV, targets_N1, right=True)[:, 0]
    # Only a row of NaN can point past the end; the caller sees its NaN log-probability.
    return picked_N.clamp_(max=weights_NV.shape[-1] - 1)
