"""An answer is scored by a reward model, which was trained on pairs of answers of which one was preferred.

The reward model is ``reward_model`` of the settings: frozen, with servers of its own. It sees the conversation alone,
never the right answer.
"""

from areal_async import Policy, Prompt, RewardModel
from rewards.math_answer import final_number_matches


async def preference(prompt: Prompt, policy: Policy, reward_model: RewardModel) -> float:
    """Answer one question; the reward is the reward model's score of the conversation."""
    question = {"role": "user", "content": prompt["question"]}
    reply = await policy.chat([question])
    # Not trained on: where it stays behind the reward, the policy has learned to please the reward model.
    policy.info["right"] = await final_number_matches(reply.text, prompt["answer"])
    return await reward_model.score([question, reply.message])
