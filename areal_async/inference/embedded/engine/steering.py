"""What requests ask to be done to the model's own logits: penalties, grammars, biases, no end before its time.

In SGLang's order: penalties that are added, the one that divides, grammars, biases. Penalties count over the answer
alone. All of it is read from the sequences when a batch is built, so that one that was retracted goes on as if it had
not been.

Letters: N rows, V vocabulary, K (row, token) pairs.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from areal_async.inference.embedded.engine.sequence import RunningSequence

_NEVER = float("-inf")


class LogitSteering:
    """Of a batch in which somebody asks for it; the others' logits stay as they are."""

    def __init__(self, sequences: Sequence[RunningSequence], vocab_size: int, device: torch.device) -> None:
        self._penalties = None
        if any(sequence.params.has_penalty for sequence in sequences):
            self._penalties = _Penalties(sequences, vocab_size, device)
        self._grammars = [(row, one.grammar) for row, one in enumerate(sequences) if one.grammar is not None]
        biases = [(row, id, bias) for row, one in enumerate(sequences) for id, bias in one.params.logit_bias.items()]
        self._biased = _pairs(((row, id) for row, id, _ in biases), device)
        self._biases_K = torch.tensor([bias for _, _, bias in biases], device=device)
        ends = [
            (row, id, one.params.min_new_tokens)
            for row, one in enumerate(sequences)
            if one.params.min_new_tokens > len(one.output_ids)
            for id in one.end_token_ids
        ]
        self._ends = np.array(ends, dtype=np.int64).reshape(-1, 3)
        """(row, token that ends an answer, index of the first one that may)."""
        self._device = device

    def apply(self, logits_NV: torch.Tensor, indexes_N: npt.NDArray[np.uint64]) -> None:
        """Change the logits in place.

        Args:
            indexes_N: of the tokens to come, from 0.
        """
        if self._penalties is not None:
            self._penalties.add(logits_NV)
        if len(self._ends):
            self._ends = self._ends[self._ends[:, 2] > indexes_N[self._ends[:, 0]].astype(np.int64)]
            logits_NV[_pairs(self._ends[:, :2], self._device)] = _NEVER
        if self._penalties is not None:
            self._penalties.divide(logits_NV)
        if self._grammars:
            self._grammars[0][1].mask(logits_NV, self._grammars)
        if len(self._biases_K):
            logits_NV.index_put_(self._biased, self._biases_K, accumulate=True)

    def advance(self, ids_N: torch.Tensor) -> None:
        """Count the tokens just sampled."""
        if self._penalties is not None:
            self._penalties.count(ids_N)


class _Penalties:
    def __init__(self, sequences: Sequence[RunningSequence], vocab_size: int, device: torch.device) -> None:
        params = [sequence.params for sequence in sequences]
        self._frequency_N1 = torch.tensor([[p.frequency_penalty] for p in params], device=device)
        self._presence_N1 = torch.tensor([[p.presence_penalty] for p in params], device=device)
        self._repetition_N1 = torch.tensor([[p.repetition_penalty] for p in params], device=device)
        counts = [np.bincount(np.array(one.output_ids, dtype=np.int64), minlength=vocab_size) for one in sequences]
        self._counts_NV = torch.tensor(np.array(counts), dtype=torch.float32, device=device)

    def add(self, logits_NV: torch.Tensor) -> None:
        logits_NV -= self._frequency_N1 * self._counts_NV + self._presence_N1 * (self._counts_NV > 0)

    def divide(self, logits_NV: torch.Tensor) -> None:
        factors_NV = torch.where(self._counts_NV > 0, self._repetition_N1, 1.0)
        logits_NV.copy_(torch.where(logits_NV < 0, logits_NV * factors_NV, logits_NV / factors_NV))

    def count(self, ids_N: torch.Tensor) -> None:
        ones_N1 = torch.ones((len(ids_N), 1), device=ids_N.device)
        self._counts_NV.scatter_add_(1, ids_N[:, None], ones_N1)


def _pairs(pairs: Iterable[Iterable[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (row, token) pairs as the two indices of a tensor [N, V]."""
    rows_K, ids_K = np.array([*map(tuple, pairs)], dtype=np.int64).reshape(-1, 2).T
    return torch.from_numpy(rows_K.copy()).to(device), torch.from_numpy(ids_K.copy()).to(device)
