"""Which settings of the loss have an effect only beside others, and what is said to who sets them without. Pure.

A setting that nothing in the run looks at would be taken, and would change nothing: anyone who gives one is told. What
a preset sets is never refused, nor what a resolved file has, which holds every setting there is. Nor is what an earlier
source gives, as the file, where a later one, as the command line, has chosen otherwise: the later source wins.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from areal_async.config.algorithm import PRESETS, AlgorithmSettings
from areal_async.config.settings import Settings
from areal_async.config.tree import text_of, value_at


class Need(NamedTuple):
    """What a setting has an effect with."""

    of: tuple[str, ...]
    """The settings that decide it."""
    holds: Callable[[Settings], bool]
    wanted: str


def _all(*needs: Need) -> Need:
    return Need(
        tuple(dict.fromkeys(name for need in needs for name in need.of)),
        lambda settings: all(need.holds(settings) for need in needs),
        ", and ".join(need.wanted for need in needs),
    )


def _choice(name: str, *values: str) -> Need:
    return Need(
        ("algorithm.name", f"algorithm.{name}"),
        lambda settings: getattr(settings.algorithm, name) in values,
        f"{name}={' or '.join(values)}",
    )


TRUNCATE, LEAVE_OUT = ("truncate", "truncate_sequence"), ("icepop", "reject_token", "reject_sequence")
"""Corrections, by what becomes of a token that they are about."""
CLIPS = _choice("loss", "ppo_clip", "cispo")
IS_SAPO = _choice("loss", "sapo")
IS_DECOUPLED = Need(
    ("algorithm.name", "algorithm.decoupled", "rollout.max_staleness"),
    lambda settings: settings.uses_decoupled_loss,
    "decoupled=true, or null with max_staleness over 0",
)
HAS_CRITIC = _choice("advantage_baseline", "critic")
HAS_REFERENCE = Need(("algorithm.kl_coef",), lambda settings: settings.algorithm.kl_coef > 0, "kl_coef over 0")
HAS_CACHE = Need(
    ("algorithm.name", "algorithm.overlong_cache"),
    lambda settings: settings.algorithm.overlong_cache != 0,
    "overlong_cache=null or over 0",
)
DISCOUNTS = Need(
    ("algorithm.name", "algorithm.advantage_baseline", "algorithm.credit"),
    lambda settings: HAS_CRITIC.holds(settings) or settings.algorithm.credit == "turns",
    "advantage_baseline=critic or credit=turns",
)
NEEDS = {
    "algorithm.eps_clip": CLIPS,
    "algorithm.eps_clip_higher": CLIPS,
    "algorithm.dual_clip": _choice("loss", "ppo_clip"),
    "algorithm.tau_pos": IS_SAPO,
    "algorithm.tau_neg": IS_SAPO,
    "algorithm.divergence": _choice("loss", "dppo_tv"),
    "algorithm.m2_threshold": _choice("loss", "m2po"),
    "algorithm.proximal": IS_DECOUPLED,
    "algorithm.correction": IS_DECOUPLED,
    "algorithm.behave_weight_cap": _all(IS_DECOUPLED, _choice("correction", *TRUNCATE, *LEAVE_OUT)),
    "algorithm.behave_weight_floor": _all(IS_DECOUPLED, _choice("correction", *LEAVE_OUT)),
    "algorithm.aggregation_constant": _choice("aggregation", "constant"),
    "algorithm.kl_in": HAS_REFERENCE,
    "algorithm.kl_estimator": HAS_REFERENCE,
    "algorithm.overlong_max": HAS_CACHE,
    "algorithm.overlong_factor": HAS_CACHE,
    "algorithm.gamma": DISCOUNTS,
    "algorithm.gae_lambda": HAS_CRITIC,
    "algorithm.value_clip": HAS_CRITIC,
}
"""Setting -> what it has an effect with; those that are not here always have one."""
NAMES = tuple(dict.fromkeys((*NEEDS, *(name for need in NEEDS.values() for name in need.of))))
"""What ``idle`` asks about."""


def missing(settings: Settings, key: str) -> str:
    """Return why a setting has no effect in a run: ``got X, need Y``; empty where it has one."""
    need = NEEDS.get(key)
    if need is None or need.holds(settings):
        return ""
    facts = ", ".join(f"{name}={text_of(value_at(settings, name.split('.')))}" for name in need.of)
    return f"{facts}, need {need.wanted}"


def idle(settings: Settings, rank_of: Mapping[str, int]) -> tuple[str, str] | None:
    """Return the first setting that was given and has no effect, with a sentence about it; None where all have one.

    Args:
        rank_of: of those of ``NAMES`` that were given, which source gave each: the higher wins.
    """
    name, decoupled = settings.algorithm.name, "algorithm.decoupled"
    if decoupled in rank_of and PRESETS[name].get("decoupled") and not settings.uses_decoupled_loss:
        value = text_of(settings.algorithm.decoupled)
        return decoupled, f"{decoupled}: got {value} with algorithm.name={name}, need true; {name} corrects that loss"
    otherwise = AlgorithmSettings(name=name)
    for key, need in NEEDS.items():
        value = value_at(settings, key.split("."))
        # No correction is what a loss without one has.
        is_as_before = value in (getattr(otherwise, key.removeprefix("algorithm.")), "none")
        is_overruled = any(rank_of.get(other, 0) > rank_of.get(key, 0) for other in need.of)
        if key in rank_of and not is_as_before and not is_overruled and (why := missing(settings, key)):
            return key, f"{key}: got {text_of(value)} with {why}; leave it out, or choose that"
    return None
