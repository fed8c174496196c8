"""Maximum likelihood, for supervised fine-tuning."""

import torch

from areal_async.algorithms.objective import LossTerms, ScoredTokens


def likelihood_loss(tokens: ScoredTokens) -> LossTerms:
    """Return the negative log likelihood of the masked tokens, summed, in nats."""
    zero = tokens.logprobs_T.new_zeros(())
    loss = -torch.where(tokens.mask_T, tokens.logprobs_T, zero).sum()
    entropy = torch.where(tokens.mask_T, tokens.entropy_T.detach(), zero).sum()
    return LossTerms(loss=loss, sums={"entropy": entropy}, maxima={})
