"""Credit of single replies: each credited reply of a trajectory has a return of its own, and an advantage of its own.

Pure, without torch. The value that a workflow gives a reply *is* its return, with whatever discount and later rewards
the workflow means by it; it is compared as an outcome is, by the rule of the run (``advantages``), with those of all
credited replies of the same role: in its group where the rule speaks of groups, in the step where it speaks of batches.
A trajectory without credits is one reply of the role "", as long as all it sampled.

Process supervision as in the GRPO paper (arXiv 2402.03300 section 4.1.3) normalises the reward of every step by mean
and deviation of all steps of the group, as here, and then adds up those of this step and all later ones. Here nothing
is added up: which later rewards belong to a reply's return is the workflow's to say, so a discounted return is
normalised after it is summed, and a reply is never praised for being followed by many.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from areal_async.algorithms.advantages import AdvantageRule, Sibling, is_informative, step_advantages
from areal_async.types import Credit, Slot


def sibling_of(slot: Slot) -> Sibling:
    """Return what the advantages of a slot are made of."""
    return Sibling(reward=slot.reward, num_tokens=slot.num_output_tokens, credits=tuple(slot.credits))


def reply_advantages(groups: Sequence[Sequence[Sibling]], rule: AdvantageRule) -> list[list[NDArray[np.float32]]]:
    """Return for every sibling of a whole training step the advantages of its replies [K], K = 1 without credits.

    What a rule takes off a long answer (``overlong``) is taken off each of its replies' returns: it comes at the end,
    after all of them. A rule that weighs by tokens counts those of the reply.

    Raises:
        ValueError: a reward is not finite.
    """
    replies = [[_replies(sibling, rule) for sibling in siblings] for siblings in groups]
    advantages = [[np.zeros(len(one), dtype=np.float32) for one in siblings] for siblings in replies]
    shaped = replace(rule, overlong=None)
    for role in sorted({one.role for siblings in replies for sibling in siblings for one in sibling}):
        places = [
            [(s, k) for s, sibling in enumerate(siblings) for k, one in enumerate(sibling) if one.role == role]
            for siblings in replies
        ]
        outcomes = [
            [Sibling(reward=replies[g][s][k].reward, num_tokens=replies[g][s][k].num_tokens) for s, k in place]
            for g, place in enumerate(places)
        ]
        for g, values in enumerate(step_advantages(outcomes, shaped)):
            for (s, k), value in zip(places[g], values, strict=True):
                advantages[g][s][k] = value
    return advantages


def has_differing_replies(siblings: Sequence[Sibling]) -> bool:
    """Say whether a group teaches anything: replies of one role that are worth different things."""
    by_role: dict[str, list[float]] = {}
    for sibling in siblings:
        for one in sibling.credits or _whole(sibling):
            by_role.setdefault(one.role, []).append(one.reward)
    return any(is_informative(rewards) for rewards in by_role.values())


def _replies(sibling: Sibling, rule: AdvantageRule) -> list[Credit]:
    penalty = rule.overlong.penalty(sibling.num_tokens) if rule.overlong is not None else 0.0
    return [Credit(one.reward + penalty, one.num_tokens, one.role) for one in sibling.credits or _whole(sibling)]


def _whole(sibling: Sibling) -> tuple[Credit, ...]:
    return (Credit(sibling.reward, sibling.num_tokens),)
