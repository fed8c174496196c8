"""Write a program: a task in words, tests that it must pass, run in the sandbox where no expected answer ever is."""

import json

from areal_async import Policy, Prompt
from rewards.code_tests import passes_all

TASK = "{task}\nAnswer with the whole program in one block of Python."


async def coding(prompt: Prompt, policy: Policy) -> float:
    """Solve one task; 1.0 when the program passes every test of the row.

    The tests are a text of JSON: a column of a data set holds values of one type, and tests hold any.
    """
    reply = await policy.chat([{"role": "user", "content": TASK.format(task=prompt["task"])}])
    return await passes_all(reply.text, json.loads(prompt["tests"]))
