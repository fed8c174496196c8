"""Word problems with another try: a wrong answer is told so, and the model answers again, a few times at most."""

from areal_async import Policy, Prompt
from rewards.math_answer import final_number_matches

MAX_TRIES = 3
DISCOUNT = 0.5
"""Of a reward for every try before the one that earns it: an answer that is right at once is worth most."""


async def multi_turn_math(prompt: Prompt, policy: Policy) -> dict[str, float]:
    """Answer one question until the final number is right; every try is worth the last one's reward, discounted."""
    question = prompt["question"]
    messages = [{"role": "user", "content": question}]
    tries: list[str] = []
    reward = 0.0
    while not reward and len(tries) < MAX_TRIES:
        reply = await policy.chat(messages)
        tries.append(reply.id)
        reward = await final_number_matches(reply.text, prompt["answer"])
        messages += [reply.message, {"role": "user", "content": f"That is wrong. Try again: {question}"}]
    policy.info["solved"] = reward
    policy.info["solved_at_once"] = reward if len(tries) == 1 else 0.0
    return {reply_id: reward * DISCOUNT**later for later, reply_id in enumerate(reversed(tries))}
