"""How many things are in an image; scored by the number that the answer settles on."""

from areal_async import Policy, Prompt
from rewards.count import count_matches

PLACEHOLDER = "<image>"
"""Stands in the rows' question for the image, which is a part of its own here."""


async def clevr_count(prompt: Prompt, policy: Policy) -> float:
    """Count the things in one image; 1.0 when the number is right."""
    question = prompt["problem"].replace(PLACEHOLDER, "").strip()
    parts = [{"type": "image", "image": prompt["images"][0]}, {"type": "text", "text": question}]
    reply = await policy.chat([{"role": "user", "content": parts}])
    return count_matches(reply.text, prompt["answer"])
