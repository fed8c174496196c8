"""Grade-school word problems: one question, one answer, scored by its final number."""

from areal_async import Policy, Prompt
from rewards.math_answer import final_number_matches


async def gsm8k(prompt: Prompt, policy: Policy) -> float:
    """Answer one question; 1.0 when the final number is right."""
    reply = await policy.chat([{"role": "user", "content": prompt["question"]}])
    return await final_number_matches(reply.text, prompt["answer"])
