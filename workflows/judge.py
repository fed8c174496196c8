"""An answer is graded by another model: a frozen one, with servers of its own, that reads it and writes a score.

The grader is the policy ``grader`` of the settings. What it says is never trained.
"""

from areal_async import Policy, Prompt
from rewards.judge import judge_score
from rewards.math_answer import final_number_matches

TEMPLATE = """Right answer:
{reference}

Answer to grade:
<answer>
{answer}
</answer>

Do both come to the same? End with "Score: N", from {low} (no) to {high} (yes)."""


async def judge(prompt: Prompt, policy: Policy, grader: Policy) -> float:
    """Answer one question; the reward is what the grader makes of it, from 0.0 to 1.0."""
    question = prompt["question"]
    reply = await policy.chat([{"role": "user", "content": question}])
    # Not trained on: where it stays behind the reward, the policy has learned to please the grader.
    policy.info["right"] = await final_number_matches(reply.text, prompt["answer"])
    return await judge_score(
        grader, question=question, answer=reply.text, reference=prompt["answer"], template=TEMPLATE
    )
