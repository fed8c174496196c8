"""What an engine draws and reports, and the loss makes of it, is the exact policy gradient; unless tokens are cut away.

By enumeration: one step, a small vocabulary, every draw of the engine's sampler in turn.
"""

import functools

import pytest
import torch
from torch import Tensor

from areal_async.algorithms.objective import ScoredTokens
from areal_async.algorithms.policy import PolicyLoss
from areal_async.algorithms.surrogates import importance, ppo_clip
from areal_async.inference.embedded.engine.sampling import SamplingRows, sample

LOGITS = torch.tensor([0.4, 2.0, -1.0, 1.3, 1.0])
REWARDS = torch.tensor([1.0, -0.5, 2.0, 0.3, -1.0], dtype=torch.float64)
"""Of each token, as its advantage."""
NUM_DRAWS = 40_000
"""At evenly spaced uniform numbers: the share of each token is exact to one of them."""
CLIP = functools.partial(ppo_clip, eps_clip=0.2, eps_clip_higher=0.2)


def gradient(surrogate: object, *, temperature: float, cut: bool = False) -> Tensor:
    """Return that of the mean loss over every draw, by the logits, with the trainer's own tempered logprobs [V]."""
    size = len(LOGITS)
    column = functools.partial(torch.full, (NUM_DRAWS,))
    filters = (column(size), column(0.7), column(0.0)) if cut else (None, None, None)
    uniforms_N = (torch.arange(NUM_DRAWS, dtype=torch.float64) + 0.5) / NUM_DRAWS
    drawn = sample(LOGITS.expand(NUM_DRAWS, size), SamplingRows(column(temperature), None, *filters), uniforms_N)
    logits_V = LOGITS.double().requires_grad_()
    logprobs_N = (logits_V / temperature).log_softmax(0)[drawn.ids_N]
    all_N = torch.ones(NUM_DRAWS, dtype=torch.bool)
    tokens = ScoredTokens(
        logprobs_T=logprobs_N, entropy_T=torch.zeros_like(logprobs_N), start_T=logprobs_N.detach(),
        behave_T=drawn.logprobs_N.double(), advantages_T=REWARDS[drawn.ids_N], mask_T=all_N, current_T=all_N,
    )  # fmt: skip
    (by_logits_V,) = torch.autograd.grad(PolicyLoss(surrogate=surrogate)(tokens).loss / NUM_DRAWS, logits_V)  # type: ignore[arg-type]
    return by_logits_V


def exact(*, temperature: float, kept: Tensor | None = None) -> Tensor:
    """Return the gradient of minus the expected reward; over some tokens only, as if they were all and still so likely.

    Args:
        kept: those tokens, boolean [V].
    """
    logits_V = LOGITS.double().requires_grad_()
    probs_V = (logits_V / temperature).softmax(0)
    weights_V = REWARDS if kept is None else REWARDS * kept / probs_V.detach()[kept].sum()
    (by_logits_V,) = torch.autograd.grad(-(probs_V * weights_V).sum(), logits_V)
    return by_logits_V


@pytest.mark.parametrize("surrogate", [importance, CLIP])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.5])
def test_at_any_temperature_the_gradient_is_that_of_the_expected_reward(surrogate: object, temperature: float) -> None:
    found = gradient(surrogate, temperature=temperature)

    torch.testing.assert_close(found, exact(temperature=temperature), atol=2e-4, rtol=0)


def test_what_top_p_cuts_away_is_missing_from_the_gradient_and_the_rest_is_too_large() -> None:
    likeliest = LOGITS >= LOGITS.sort(descending=True).values[1]  # 0.47 and 0.23: over 0.7 together

    found = gradient(importance, temperature=1.0, cut=True)

    torch.testing.assert_close(found, exact(temperature=1.0, kept=likeliest), atol=2e-4, rtol=0)
    assert (found - exact(temperature=1.0)).abs().max() > 0.1, "so it is refused where nobody accepts it"
