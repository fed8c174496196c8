"""The tensors of one running batch, built when its members change and advanced in place between.

Invariant: every member's cache holds all its tokens but the last; decoding feeds that one.
"""

from collections.abc import Sequence

import numpy as np
import torch

from areal_async.inference.embedded.engine.compute.bands import Band
from areal_async.inference.embedded.engine.sampling import Drawn, SamplingRows, sample, uniforms
from areal_async.inference.embedded.engine.sequence import RunningSequence
from areal_async.inference.embedded.engine.steering import LogitSteering


class DecodeBatch:
    """Inputs and sampling parameters of N sequences, in the order of their slots."""

    def __init__(
        self, sequences: Sequence[RunningSequence], vocab_size: int, device: torch.device, bands: Sequence[Band] = ()
    ) -> None:
        """Take sequences as they are now.

        Args:
            bands: of their slots, with the longest of each, its last token included; not needed to sample alone.
        """
        params = [sequence.params for sequence in sequences]
        last_ids = [(sequence.output_ids or sequence.prompt_ids)[-1] for sequence in sequences]
        lengths = [sequence.num_tokens for sequence in sequences]
        self._device = device
        self.ids_N = torch.tensor(last_ids, device=device)
        self.positions_N = torch.tensor(lengths, device=device) - 1
        deltas = [0 if sequence.images is None else sequence.images.delta for sequence in sequences]
        self.deltas_N = self._column(deltas, skip=not any(deltas))
        """What a token's number lacks of its position, where a prompt shows images."""
        self.bands = bands
        self._indexes = np.array([len(sequence.output_ids) for sequence in sequences], dtype=np.uint64)
        self._seeds = np.array([sequence.seed for sequence in sequences], dtype=np.uint64)
        self._is_all_greedy = all(p.is_greedy for p in params)
        is_unfiltered = not any(p.has_filter for p in params)
        self._rows = SamplingRows(
            temperatures_N=self._column([p.divisor for p in params], skip=all(p.divisor == 1.0 for p in params)),
            is_greedy_N=self._column([p.is_greedy for p in params], skip=not any(p.is_greedy for p in params)),
            top_k_N=self._column([p.top_k if p.top_k > 0 else 2**31 for p in params], skip=is_unfiltered),
            top_p_N=self._column([p.top_p for p in params], skip=is_unfiltered),
            min_p_N=self._column([p.min_p for p in params], skip=is_unfiltered),
        )
        self._num_top_logprobs = max(sequence.num_top_logprobs for sequence in sequences)
        is_steered = any(p.is_steered for p in params)
        self._steering = LogitSteering(sequences, vocab_size, device) if is_steered else None

    def _column(self, values: Sequence[float], *, skip: bool) -> torch.Tensor | None:
        return None if skip else torch.tensor(values, device=self._device)

    def sample(self, logits_NV: torch.Tensor) -> Drawn:
        """Draw the next token of every sequence. May change the logits in place."""
        logits_NV = logits_NV.float()
        if self._steering is not None:
            self._steering.apply(logits_NV, self._indexes)
        uniforms_N = None
        if not self._is_all_greedy:
            uniforms_N = torch.from_numpy(uniforms(self._seeds, self._indexes)).to(self._device)
        return sample(logits_NV, self._rows, uniforms_N, num_top=self._num_top_logprobs)

    def advance(self, ids_N: torch.Tensor) -> None:
        """Make the tokens just sampled the next inputs."""
        self.ids_N = ids_N
        self.positions_N += 1
        self._indexes += np.uint64(1)
        self.bands = [Band(band.end, band.num_positions + 1) for band in self.bands]
        if self._steering is not None:
            self._steering.advance(ids_N)
