"""An agent that knows nothing of this library: written for OpenAI's service with its own SDK, and trained as it is.

The agent (``openai_agent_program.py``) is given a client and a question, as it would be anywhere else. Any other that
speaks OpenAI's or Anthropic's API can stand in its place, in this process or in one of its own: all it takes is an
address and a key.
"""

import ssl

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from areal_async import Policy, Prompt
from rewards.math_answer import final_number_matches
from workflows.openai_agent_program import answer

TLS = ssl.create_default_context()
"""Read once: it takes a client 50 ms, and each trajectory has a client of its own."""


async def openai_agent(prompt: Prompt, policy: Policy) -> float:
    """Have the agent answer one question; 1.0 when the final number is right."""
    connections = DefaultAsyncHttpxClient(verify=TLS)
    async with AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key, http_client=connections) as client:
        text = await answer(prompt["question"], client)
    return await final_number_matches(text, prompt["answer"])
