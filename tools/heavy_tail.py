"""Workflows for measuring: as many tokens as a heavy-tailed draw says, with and without waiting for a slow tool.

The draw is a function of the prompt alone, so two runs of one seed do the same work.
"""

import random
import zlib

import anyio

from areal_async import Policy, Prompt

SHORTEST_TOKENS = 8
LONGEST_TOKENS = 192
TAIL_EXPONENT = 1.1
"""Shape of the Pareto distribution: a few answers are many times as long as most."""
TOOL_MEAN_S = 1.0
SAME_TOKENS = 24


def num_tokens(prompt: Prompt) -> int:
    """Return the answer's length, heavy-tailed over prompts."""
    draw = random.Random(_key(prompt)).paretovariate(TAIL_EXPONENT)
    return min(LONGEST_TOKENS, int(SHORTEST_TOKENS * draw))


def tool_s(prompt: Prompt) -> float:
    """Return how long the prompt's tool takes, exponentially distributed."""
    return random.Random(_key(prompt) + 1).expovariate(1 / TOOL_MEAN_S)


async def heavy_tail(prompt: Prompt, policy: Policy) -> float:
    """Generate that many tokens; the reward is as good as random, but the same for the same answer."""
    reply = await policy.complete(prompt["question"], max_new_tokens=num_tokens(prompt), ignore_eos=True)
    return float(zlib.crc32(bytes(token % 256 for token in reply.token_ids)) % 2)


async def slow_tool(prompt: Prompt, policy: Policy) -> float:
    """The same, after waiting for a tool, as an agent does."""
    await anyio.sleep(tool_s(prompt))
    return await heavy_tail(prompt, policy)


async def same_length(prompt: Prompt, policy: Policy) -> float:
    """Generate the same number of tokens for every prompt."""
    reply = await policy.complete(prompt["question"], max_new_tokens=SAME_TOKENS, ignore_eos=True)
    return float(zlib.crc32(bytes(token % 256 for token in reply.token_ids)) % 2)


def _key(prompt: Prompt) -> int:
    return 1_000_003 * prompt.epoch + prompt.index
