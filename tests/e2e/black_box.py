"""A workflow whose agent is the program that its row names, in an interpreter of that row: it knows nothing of this."""

import asyncio
import json
import os
import random
from asyncio.subprocess import PIPE, Process

from areal_async import Policy, Prompt

MANY = os.path.join("tests", "unit", "rollout", "endpoint", "agents", "many.py")
MAX_LINE_BYTES = 1 << 20

_processes: dict[str, Process] = {}
_turns: dict[str, asyncio.Lock] = {}


async def black_box(prompt: Prompt, policy: Policy) -> float:
    """Have the program ask in all its modes; a reward that tells siblings apart, and no more."""
    address = {
        "OPENAI_BASE_URL": f"{policy.base_url}/v1",
        "OPENAI_API_KEY": policy.api_key,
        "ANTHROPIC_BASE_URL": policy.base_url,
        "ANTHROPIC_API_KEY": policy.api_key,
    }
    program = prompt["program"]
    async with _turns.setdefault(program, asyncio.Lock()):  # one at a time: its address is in its environment
        told = await _ask(program, prompt["python"], prompt["environment"], address)
    policy.info["modes"] = len(told)
    return random.random()


async def _ask(program: str, python: str, environment: dict[str, str], address: dict[str, str]) -> dict[str, object]:
    if program not in _processes:
        _processes[program] = await asyncio.create_subprocess_exec(
            python, MANY, program, env=environment, stdin=PIPE, stdout=PIPE, limit=MAX_LINE_BYTES
        )
    process = _processes[program]
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(address).encode() + b"\n")
    line = await process.stdout.readline()
    if not line:
        del _processes[program]
        raise RuntimeError(f"{program} ended with status {await process.wait()}; see the node's log")
    told: dict[str, object] = json.loads(line)
    return told
