"""Workflows for measuring: as many tokens as a heavy-tailed draw says, with and without waiting for a slow tool.

The draw is a function of the prompt alone, so two runs of one seed do the same work.
"""

import itertools
import math
import os
import random
import zlib
from collections import defaultdict

import anyio

from areal_async import Policy, Prompt

SHORTEST_TOKENS = 8
LONGEST_TOKENS = 192
TAIL_EXPONENT = 1.1
"""Shape of the Pareto distribution: a few answers are many times as long as most."""
TOOL_MEAN_S = 1.0
SAME_TOKENS = 24
MEDIAN_TOKENS = 20
P99_TOKENS = 20 * MEDIAN_TOKENS
"""Of the log-normal draw; its longest fit the tiny model's 512 positions beside the prompt."""
SIGMA = math.log(P99_TOKENS / MEDIAN_TOKENS) / 2.3263
JUMP = "AREAL_JUMP"
"""Environment variable: the file from which on ``jumping`` is slow."""
MOST_TURNS = 6
TURN_TOKENS = 12
TURN_TOOL_S = 0.2


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


async def long_tail(prompt: Prompt, policy: Policy) -> float:
    """Generate a log-normal number of tokens, of which one in a hundred is 20 times the median or more.

    It is drawn for each trajectory of a group.
    """
    drawn = MEDIAN_TOKENS * random.Random(_key(prompt, next(_NTH[prompt.epoch, prompt.index]))).lognormvariate(0, SIGMA)
    reply = await policy.complete(
        prompt["question"], max_new_tokens=max(1, min(P99_TOKENS, round(drawn))), ignore_eos=True
    )
    return float(zlib.crc32(bytes(token % 256 for token in reply.token_ids)) % 2)


async def jumping(prompt: Prompt, policy: Policy) -> float:
    """Answer, and wait for a tool that takes ten times as long from when there is a file; see JUMP."""
    has_jumped = await anyio.Path(os.environ[JUMP]).exists()
    await anyio.sleep(tool_s(prompt) * (1.0 if has_jumped else 0.1))
    return await same_length(prompt, policy)


async def turns(prompt: Prompt, policy: Policy) -> float:
    """Talk to a tool for one to six turns, of which each waits for it."""
    draw = random.Random(_key(prompt, next(_NTH[prompt.epoch, prompt.index])))
    messages = [{"role": "user", "content": prompt["question"]}]
    for _ in range(draw.randint(1, MOST_TURNS)):
        reply = await policy.chat(messages, max_new_tokens=TURN_TOKENS, ignore_eos=True)
        await anyio.sleep(draw.expovariate(1 / TURN_TOOL_S))
        messages += [reply.message, {"role": "user", "content": "Go on."}]
    return float(zlib.crc32(bytes(token % 256 for token in reply.token_ids)) % 2)


async def same_length(prompt: Prompt, policy: Policy) -> float:
    """Generate the same number of tokens for every prompt."""
    reply = await policy.complete(prompt["question"], max_new_tokens=SAME_TOKENS, ignore_eos=True)
    return float(zlib.crc32(bytes(token % 256 for token in reply.token_ids)) % 2)


_NTH: defaultdict[tuple[int, int], "itertools.count[int]"] = defaultdict(itertools.count)
"""(epoch, row) -> which of its trajectories is next."""


def _key(prompt: Prompt, nth: int = 0) -> int:
    return 1_000_003 * prompt.epoch + prompt.index + 1_000_000_007 * nth
