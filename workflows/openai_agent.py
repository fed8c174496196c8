"""An agent that knows nothing of this library: a program of its own that speaks OpenAI's API, and is trained as it is.

The program (``openai_agent_program.py``) is given an address, a key and a question, as it would be anywhere else. Any
other program that speaks OpenAI's or Anthropic's API can stand in its place.
"""

import os
import sys
from asyncio import Semaphore
from pathlib import Path

import anyio

from areal_async import Policy, Prompt
from rewards.math_answer import final_number_matches

PROGRAM = Path(__file__).with_name("openai_agent_program.py")
MAX_PROCESSES = 2 * (os.cpu_count() or 1)
"""Programs that run at once: each is a Python of its own."""
MAX_ERROR_CHARACTERS = 500

_places = Semaphore(MAX_PROCESSES)


async def openai_agent(prompt: Prompt, policy: Policy) -> float:
    """Have the program answer one question; 1.0 when the final number is right."""
    environment = {
        "PATH": os.environ.get("PATH", ""),
        "OPENAI_BASE_URL": policy.base_url,
        "OPENAI_API_KEY": policy.api_key,
    }
    async with _places:
        command = [sys.executable, "-I", str(PROGRAM)]
        question = str(prompt["question"]).encode()
        done = await anyio.run_process(command, input=question, env=environment, check=False)
    if done.returncode != 0:
        error = done.stderr.decode(errors="replace")[-MAX_ERROR_CHARACTERS:]
        raise RuntimeError(f"the agent ended with status {done.returncode}: {error}")
    return await final_number_matches(done.stdout.decode(errors="replace"), prompt["answer"])
