"""Maximum likelihood, for supervised fine-tuning."""

from areal_async.algorithms.objective import LossTerms, ScoredTokens
from areal_async.algorithms.sequences import masked_sum


def likelihood_loss(tokens: ScoredTokens) -> LossTerms:
    """Return the negative log likelihood of the masked tokens, summed, in nats."""
    loss = -masked_sum(tokens.logprobs_T, tokens.mask_T)
    entropy = masked_sum(tokens.entropy_T.detach(), tokens.mask_T)
    return LossTerms(loss=loss, sums={"entropy": entropy}, maxima={})
