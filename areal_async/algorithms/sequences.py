"""Sums and means over the sequences of a packed row. T: scored tokens, ``sequence_T`` says whose each is.

Sequences are numbered from 0, and each has at least one token, so T slots are enough and no size has to be read
back from a device.
"""

import torch
from torch import Tensor


def masked(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return the values where the mask is True, 0 elsewhere [T]."""
    return torch.where(mask_T, values_T, values_T.new_zeros(()))


def masked_sum(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """Add up where the mask is True; whatever stands elsewhere, infinities too, does not matter."""
    return masked(values_T, mask_T).sum()


def masked_max(values_T: Tensor, mask_T: Tensor) -> Tensor:
    """Return the largest of these non-negative values, 0 for none."""
    return masked(values_T, mask_T).amax()


def sequence_sums(values_T: Tensor, mask_T: Tensor, sequence_T: Tensor | None) -> Tensor:
    """Return for each sequence the sum over its masked tokens; slots beyond the last sequence hold 0 [T].

    Raises:
        ValueError: it is not known which sequence a token belongs to.
    """
    kept_T = masked(values_T, mask_T)
    return torch.zeros_like(kept_T).index_add(0, _numbered(sequence_T), kept_T)


def sequence_totals(values_T: Tensor, mask_T: Tensor, sequence_T: Tensor | None) -> Tensor:
    """Give every token the sum over the masked tokens of its sequence [T]."""
    return sequence_sums(values_T, mask_T, sequence_T)[_numbered(sequence_T)]


def sequence_means(values_T: Tensor, mask_T: Tensor, sequence_T: Tensor | None) -> Tensor:
    """Give every token the mean over the masked tokens of its sequence, 0 for a sequence without any [T]."""
    counts_T = sequence_totals(torch.ones_like(values_T), mask_T, sequence_T).clamp(min=1)
    return sequence_totals(values_T, mask_T, sequence_T) / counts_T


def _numbered(sequence_T: Tensor | None) -> Tensor:
    if sequence_T is None:
        raise ValueError("policy loss: got no sequence_T, need it for what works on whole sequences; number the tokens")
    return sequence_T
