"""A game of numbers: reach a target from a few numbers, each used at most once; scored by working the answer out."""

from areal_async import Policy, Prompt
from rewards.countdown import target_reached


async def countdown(prompt: Prompt, policy: Policy) -> float:
    """Play one game; 1.0 when the last line of the answer comes to the target by the numbers given."""
    reply = await policy.chat([{"role": "user", "content": prompt["question"]}])
    return target_reached(reply.text, prompt["numbers"], prompt["target"])
