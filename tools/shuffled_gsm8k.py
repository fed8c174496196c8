"""The control: the GSM8K workflow with its rewards dealt out to the wrong trajectories.

Each trajectory gets the reward that an earlier one earned, so that rewards keep their distribution and lose their
meaning. A run with it must not get better; if it did, something else than the reward would be teaching.

    python -m areal_async run tools/shuffled_gsm8k.py --config configs/gsm8k_cpu.yaml --run.name control
"""

import random

from areal_async import Policy, Prompt
from rewards.math_answer import final_number_matches

POOL = 64
"""Rewards that wait to be dealt out."""

_earned: list[float] = []
_rng = random.Random(0)


async def shuffled_gsm8k(prompt: Prompt, policy: Policy) -> float:
    """Answer one question; return somebody else's reward."""
    reply = await policy.chat([{"role": "user", "content": prompt["question"]}])
    return somebody_elses(await final_number_matches(reply.text, prompt["answer"]))


def somebody_elses(reward: float) -> float:
    """Take in what a trajectory has earned and deal out what an earlier one has."""
    _earned.append(reward)
    if len(_earned) < POOL:
        return _rng.choice(_earned)
    return _earned.pop(_rng.randrange(len(_earned)))
