"""Credit of single replies: each credited reply of a trajectory has an advantage of its own.

Pure, without torch. What the value is that a workflow gives a reply, the rule says (``AdvantageRule.credit``):

``returns``   It *is* the reply's return, with whatever discount and later rewards the workflow means by it. It is
              compared as an outcome is, by the rule of the run (``advantages``), with those of all credited replies of
              the same role: in its group where the rule speaks of groups, in the step where it speaks of batches. So a
              discounted return is normalised after it is summed, and no reply is praised for being followed by many.
``process``   The reward of a step, as a process reward model gives it: normalised by mean and deviation of all steps
              of the role in the group, and then added up from each step on (GRPO with process supervision).
``turns``     The reward of a turn: the turn's return, of its reward and the discounted later ones, is compared with
              those of the same turn of the siblings that have one.

A trajectory without credits is one reply of the role "", as long as all it sampled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from areal_async.algorithms.advantages import (
    AdvantageRule,
    Sibling,
    is_informative,
    process_advantages,
    step_advantages,
    turn_advantages,
)
from areal_async.protocol.types import ReplyReward, Slot

_Replies = list[tuple[int, ReplyReward]]
"""Replies of one role in one group, in their order: place of the sibling, and the reply."""


def sibling_of(slot: Slot) -> Sibling:
    """Return what the advantages of a slot are made of."""
    return Sibling(reward=slot.reward, num_tokens=slot.num_output_tokens, credits=tuple(slot.credits))


def reply_advantages(groups: Sequence[Sequence[Sibling]], rule: AdvantageRule) -> list[list[NDArray[np.float32]]]:
    """Return for every sibling of a whole training step the advantages of its replies [K], K = 1 without credits.

    What a rule takes off a long answer (``overlong``) comes at the end, after all replies, so it is taken off the
    return of each: off every one where values are returns, else off the last of each role, whose reward all returns
    hold. A rule that weighs by tokens counts those of the reply.

    Raises:
        ValueError: a reward is not finite.
    """
    replies = [[_replies(sibling, rule) for sibling in siblings] for siblings in groups]
    advantages = [[np.zeros(len(one), dtype=np.float32) for one in siblings] for siblings in replies]
    shaped = replace(rule, overlong=None)
    compare = _by_outcome if rule.credit == "returns" else _by_step
    for role in sorted({one.role for siblings in replies for sibling in siblings for one in sibling}):
        places = [
            [(s, k) for s, sibling in enumerate(siblings) for k, one in enumerate(sibling) if one.role == role]
            for siblings in replies
        ]
        compared = compare([[(s, replies[g][s][k]) for s, k in place] for g, place in enumerate(places)], shaped)
        for g, values in enumerate(compared):
            for (s, k), value in zip(places[g], values, strict=True):
                advantages[g][s][k] = value
    return advantages


def _by_outcome(groups: Sequence[_Replies], rule: AdvantageRule) -> list[NDArray[np.float32]]:
    """Compare returns: each reply is as an outcome of its own."""
    outcomes = [[Sibling(reward=one.reward, num_tokens=one.num_tokens) for _, one in replies] for replies in groups]
    return step_advantages(outcomes, rule)


def _by_step(groups: Sequence[_Replies], rule: AdvantageRule) -> Iterator[NDArray[np.float32]]:
    """Compare the rewards of steps or turns, sibling by sibling in their order."""
    for replies in groups:
        siblings = sorted({s for s, _ in replies})
        rewards = [[one.reward for s, one in replies if s == sibling] for sibling in siblings]
        if rule.credit == "process":
            values = process_advantages(rewards)
        else:
            values = turn_advantages(rewards, gamma=rule.gamma, std=rule.std == "group")
        yield np.concatenate(values) if values else np.zeros(0, dtype=np.float32)


def has_differing_replies(siblings: Sequence[Sibling]) -> bool:
    """Say whether a group teaches anything: replies of one role that are worth different things."""
    by_role: dict[str, list[float]] = {}
    for sibling in siblings:
        for one in sibling.credits or _whole(sibling):
            by_role.setdefault(one.role, []).append(one.reward)
    return any(is_informative(rewards) for rewards in by_role.values())


def _replies(sibling: Sibling, rule: AdvantageRule) -> list[ReplyReward]:
    replies = sibling.credits or _whole(sibling)
    penalty = rule.overlong.penalty(sibling.num_tokens) if rule.overlong is not None else 0.0
    last = {one.role: place for place, one in enumerate(replies)}
    return [
        ReplyReward(one.reward + penalty, one.num_tokens, one.role)
        if rule.credit == "returns" or last[one.role] == place
        else one
        for place, one in enumerate(replies)
    ]


def _whole(sibling: Sibling) -> tuple[ReplyReward, ...]:
    return (ReplyReward(sibling.reward, sibling.num_tokens),)
