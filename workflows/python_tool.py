"""Questions that take a program: the model may write one, have it run in the sandbox, and answer by what it printed."""

from areal_async import Policy, Prompt
from areal_async.sandbox import python
from rewards.math_answer import final_number_matches


async def python_tool(prompt: Prompt, policy: Policy) -> float:
    """Answer one question with Python at hand; 1.0 when the final number is right."""
    done = await policy.act([{"role": "user", "content": prompt["question"]}], [python], max_turns=4)
    return await final_number_matches(done.text, prompt["answer"]) if done.is_finished else 0.0
