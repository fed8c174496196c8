"""A game of numbers: reach a target from a few numbers, each used at most once; scored by working the answer out."""

from areal_async import Policy, Prompt
from rewards.countdown import target_reached

TASK = "Use the numbers {numbers}, each at most once, with + - * / to make {target}. End with one expression."


async def countdown(prompt: Prompt, policy: Policy) -> float:
    """Play one game; 1.0 when the last line of the answer comes to the target by the numbers given."""
    numbers, target = prompt["numbers"], prompt["target"]
    task = TASK.format(numbers=" ".join(map(str, numbers)), target=target)
    reply = await policy.chat([{"role": "user", "content": task}])
    return target_reached(reply.text, numbers, target)
