"""From the ``algorithm`` section to the functions it names, for the loss; ``advantages`` has its own."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from areal_async.algorithms import corrections, surrogates
from areal_async.algorithms.aggregation import Aggregation
from areal_async.algorithms.policy import PolicyLoss
from areal_async.algorithms.ratios import RATIOS
from areal_async.config.algorithm import AlgorithmSettings
from areal_async.config.settings import Settings

Choice = tuple[Callable[..., Any], Mapping[str, str]]
"""A function, and the settings that its parameters are taken from."""


def aggregation(settings: Settings) -> Aggregation:
    """Return how the losses of tokens become one number."""
    algorithm = settings.algorithm
    constant = algorithm.aggregation_constant or settings.rollout.sampling.max_new_tokens
    return Aggregation(algorithm.aggregation, float(constant))


def policy_objective(settings: Settings) -> PolicyLoss:
    """Return the policy's loss."""
    algorithm = settings.algorithm
    return PolicyLoss(
        surrogate=_chosen(SURROGATES[algorithm.loss], algorithm),
        log_ratio=RATIOS[algorithm.ratio_level],
        decoupled=settings.uses_decoupled_loss,
        correction=_chosen(CORRECTIONS[algorithm.correction], algorithm),
        is_loglinear=settings.uses_decoupled_loss and algorithm.proximal == "loglinear",
        kl_coef=algorithm.kl_coef if algorithm.kl_in == "loss" else 0.0,
        kl_estimator=algorithm.kl_estimator,
        entropy_coef=algorithm.entropy_coef,
        m2_threshold=algorithm.m2_threshold if algorithm.loss == "m2po" else None,
    )


def _chosen(choice: Choice, algorithm: AlgorithmSettings) -> Callable[..., Any]:
    function, parameters = choice
    given = {parameter: getattr(algorithm, setting) for parameter, setting in parameters.items()}
    if "eps_clip_higher" in given and given["eps_clip_higher"] is None:
        given["eps_clip_higher"] = algorithm.eps_clip
    return functools.partial(function, **given)


_CLIPS = {"eps_clip": "eps_clip", "eps_clip_higher": "eps_clip_higher"}
_CAP, _BETWEEN = {"cap": "behave_weight_cap"}, {"low": "behave_weight_floor", "high": "behave_weight_cap"}
SURROGATES: dict[str, Choice] = {
    "ppo_clip": (surrogates.ppo_clip, _CLIPS | {"dual_clip": "dual_clip"}),
    "reinforce": (surrogates.reinforce, {}),
    "importance": (surrogates.importance, {}),
    "cispo": (surrogates.cispo, _CLIPS),
    "sapo": (surrogates.sapo, {"tau_pos": "tau_pos", "tau_neg": "tau_neg"}),
    "dppo_tv": (surrogates.dppo_tv, {"divergence": "divergence"}),
    "m2po": (surrogates.importance, {}),
}
CORRECTIONS: dict[str, Choice] = {
    "none": (corrections.uncorrected, {}),
    "truncate": (corrections.truncate, _CAP),
    "truncate_sequence": (corrections.truncate_sequences, _CAP),
    "icepop": (corrections.icepop, _BETWEEN),
    "reject_token": (corrections.reject_tokens, _BETWEEN),
    "reject_sequence": (corrections.reject_sequences, _BETWEEN),
}
