"""From the ``algorithm`` section to the functions it names, for the loss; ``advantages`` has its own."""

import functools
from collections.abc import Callable

from torch import Tensor

from areal_async.algorithms import corrections, surrogates
from areal_async.algorithms.aggregation import Aggregation
from areal_async.algorithms.corrections import Correction
from areal_async.algorithms.policy import PolicyLoss
from areal_async.algorithms.ratios import RATIOS
from areal_async.algorithms.surrogates import Surrogate
from areal_async.config.algorithm import AlgorithmSettings
from areal_async.config.settings import Settings


def aggregation(settings: Settings) -> Aggregation:
    """Return how the losses of tokens become one number."""
    algorithm = settings.algorithm
    constant = algorithm.aggregation_constant or settings.rollout.sampling.max_new_tokens
    return Aggregation(algorithm.aggregation, float(constant))


def policy_objective(settings: Settings) -> PolicyLoss:
    """Return the policy's loss."""
    algorithm = settings.algorithm
    return PolicyLoss(
        surrogate=SURROGATES[algorithm.loss](algorithm),
        log_ratio=RATIOS[algorithm.ratio_level],
        decoupled=settings.uses_decoupled_loss,
        correction=CORRECTIONS[algorithm.correction](algorithm),
        is_loglinear=settings.uses_decoupled_loss and algorithm.proximal == "loglinear",
        kl_coef=algorithm.kl_coef if algorithm.kl_in == "loss" else 0.0,
        kl_estimator=algorithm.kl_estimator,
        entropy_coef=algorithm.entropy_coef,
        m2_threshold=algorithm.m2_threshold if algorithm.loss == "m2po" else None,
    )


def _ppo_clip(algorithm: AlgorithmSettings) -> Surrogate:
    return functools.partial(
        surrogates.ppo_clip,
        eps_clip=algorithm.eps_clip,
        eps_clip_higher=_higher(algorithm),
        dual_clip=algorithm.dual_clip,
    )


def _cispo(algorithm: AlgorithmSettings) -> Surrogate:
    return functools.partial(surrogates.cispo, eps_clip=algorithm.eps_clip, eps_clip_higher=_higher(algorithm))


def _sapo(algorithm: AlgorithmSettings) -> Surrogate:
    return functools.partial(surrogates.sapo, tau_pos=algorithm.tau_pos, tau_neg=algorithm.tau_neg)


def _dppo_tv(algorithm: AlgorithmSettings) -> Surrogate:
    return functools.partial(surrogates.dppo_tv, divergence=algorithm.divergence)


def _higher(algorithm: AlgorithmSettings) -> float:
    return algorithm.eps_clip if algorithm.eps_clip_higher is None else algorithm.eps_clip_higher


def _capped(correction: Callable[..., Tensor]) -> Callable[[AlgorithmSettings], Correction]:
    return lambda algorithm: functools.partial(correction, cap=algorithm.behave_weight_cap)


def _between(correction: Callable[..., Tensor]) -> Callable[[AlgorithmSettings], Correction]:
    return lambda algorithm: functools.partial(
        correction, low=algorithm.behave_weight_floor, high=algorithm.behave_weight_cap
    )


SURROGATES: dict[str, Callable[[AlgorithmSettings], Surrogate]] = {
    "ppo_clip": _ppo_clip,
    "reinforce": lambda _: surrogates.reinforce,
    "importance": lambda _: surrogates.importance,
    "cispo": _cispo,
    "sapo": _sapo,
    "dppo_tv": _dppo_tv,
    "m2po": lambda _: surrogates.importance,
}
CORRECTIONS: dict[str, Callable[[AlgorithmSettings], Correction]] = {
    "none": lambda _: corrections.uncorrected,
    "truncate": _capped(corrections.truncate),
    "truncate_sequence": _capped(corrections.truncate_sequences),
    "icepop": _between(corrections.icepop),
    "reject_token": _between(corrections.reject_tokens),
    "reject_sequence": _between(corrections.reject_sequences),
}
