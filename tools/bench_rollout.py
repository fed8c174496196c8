"""What a rollout costs a node: its processor time for one streamed turn, beside httpx over aiohttp alone.

    python -m tools.bench_rollout [--rounds 5] [--trajectories 512]

Every reply has 64 tokens in 8 events (`tools.turn_server`, on a core of its own) and there are as many requests under
way in each arm, which take turns in one process:

- ``httpx``: an `httpx.AsyncClient` over `httpx_aiohttp`'s transport sends the request and reads the bytes. Nothing is
  decoded.
- ``client``: this project's client alone; each event decoded, each token with its version.
- ``turn``: what a node does with tickets, but that the broker acknowledges at once: a workflow that streams one reply
  as text, every token recorded, the trajectory encoded.
- ``act``: the same with `policy.act` and a tool that is called in all turns but the last.

Prints milliseconds of processor a turn, the median round of each, and the ratio to ``httpx`` of the same round. Exits
with status 1 where ``turn`` or ``act`` misses `MAX_TURN_RATIO` or `MAX_ACT_MS`, or anything fails.
"""

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import structlog
import uvloop
from httpx_aiohttp import AiohttpTransport

from areal_async.api import Policy
from areal_async.bus import Bus, Delivery
from areal_async.config.settings import InferenceSettings, RunSettings, SamplingSettings, Settings
from areal_async.inference.client import InferenceClient
from areal_async.inference.pool import ServerPool
from areal_async.process.gc_pauses import spare_pauses
from areal_async.protocol.types import Prompt, Ticket
from areal_async.rollout.group import run_ticket
from areal_async.rollout.node_context import NodeContext
from areal_async.rollout.policy.text import TextCodec
from tests.unit.rollout.chat_templates import codec_with
from tools.bench_turns import GROUP_SIZE, QUESTION, Broker, Lease, add, turn_server, write_script
from tools.turn_server import VERSION

MAX_TURN_RATIO = 1.6
MAX_ACT_MS = 1.6
REPLY_TOKENS = 64
EVENT_S = 0.02
AT_ONCE = 64
ACT_TURNS = 4
SAMPLING = SamplingSettings(max_new_tokens=2 * REPLY_TOKENS)


class Workload:
    """How many trajectories, of how many turns, against which server."""

    def __init__(self, url: str, codec: TextCodec, folder: str, num_trajectories: int) -> None:
        self.url = url
        self.codec = codec
        self.folder = folder
        self.num_trajectories = num_trajectories

    async def spread(self, run_one: Callable[[int], Awaitable[object]], number: int, at_once: int) -> None:
        """Keep so many under way until all have ended."""
        numbers = iter(range(number))

        async def work() -> None:
            for one in numbers:
                await run_one(one)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(work())

    def prompt_ids(self, number: int) -> list[int]:
        """Return the prompt of a conversation of one turn, with an end of turn for the server to count."""
        messages = [{"role": "user", "content": f"{number // GROUP_SIZE}: {QUESTION}"}]
        return self.codec.encode(self.codec.render(messages, []))


async def run_httpx(load: Workload) -> int:
    """Send the requests and read the bytes."""
    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(transport=AiohttpTransport(limits=limits), timeout=60.0) as client:

        async def run_one(number: int) -> None:
            body = {
                "input_ids": load.prompt_ids(number),
                "sampling_params": {"temperature": 1.0, "max_new_tokens": SAMPLING.max_new_tokens},
                "return_logprob": True,
                "stream": True,
            }
            async with client.stream("POST", f"{load.url}/generate", content=msgspec.json.encode(body)) as response:
                num_bytes = 0
                async for data in response.aiter_raw():
                    num_bytes += len(data)
                assert num_bytes

        await load.spread(run_one, load.num_trajectories, AT_ONCE)
    return load.num_trajectories


async def run_client(load: Workload) -> int:
    """Have our client receive the same."""
    params = {"temperature": 1.0, "max_new_tokens": SAMPLING.max_new_tokens}
    async with _client(load.url) as client:

        async def run_one(number: int) -> None:
            turn, _ = await client.generate(load.prompt_ids(number), params)
            assert len(turn.output_ids) == REPLY_TOKENS

        await load.spread(run_one, load.num_trajectories, AT_ONCE)
    return load.num_trajectories


async def stream_one(prompt: Prompt, policy: Policy) -> float:
    """Stream one reply."""
    text = ""
    async with policy.stream([{"role": "user", "content": prompt["question"]}]) as stream:
        async for piece in stream:
            text += piece
    assert text
    return 1.0


async def act(prompt: Prompt, policy: Policy) -> float:
    """Call a tool in every turn but the last."""
    done = await policy.act([{"role": "user", "content": prompt["question"]}], [add], max_turns=ACT_TURNS)
    assert [result.text for result in done.results] == ["5"] * (ACT_TURNS - 1)
    return 1.0


async def run_tickets(load: Workload, workflow: Callable[..., Any], num_turns: int) -> int:
    """Be a node."""
    settings = Settings(run=RunSettings(name="bench", directory=Path(load.folder)))
    rollout = settings.rollout.model_copy(update={"group_size": GROUP_SIZE, "sampling": SAMPLING})
    settings = settings.model_copy(update={"rollout": rollout})
    async with _client(load.url) as client:
        node = NodeContext(
            settings=settings, bus=cast(Bus, Broker(settings)), node_id="0", generator=client, codec=load.codec,
            workflows={"w": workflow},
        )  # fmt: skip

        async def run_one(number: int) -> None:
            row = {"question": f"{number}: {QUESTION}"}
            ticket = Ticket(group_id=f"0-{number}-0", workflow="w", row=row, group_size=GROUP_SIZE, version=VERSION)
            await run_ticket(node, ticket, cast(Delivery, Lease()))

        await load.spread(run_one, load.num_trajectories // GROUP_SIZE, AT_ONCE // GROUP_SIZE)
    if node.counts.num_failed:
        raise SystemExit(f"bench: {node.counts.num_failed} failed, the last one: {node.counts.last_failure}")
    return node.counts.num_scored * num_turns


def _client(url: str) -> InferenceClient:
    pool = ServerPool(["s0"], deadline_s=60.0)
    pool.admit(pool.servers["s0"], url=url, version=VERSION)
    return InferenceClient(pool, InferenceSettings(), max_streams=AT_ONCE, vocab_size=1 << 20)


ARMS: dict[str, Callable[[Workload], Awaitable[int]]] = {
    "httpx": run_httpx,
    "client": run_client,
    "turn": lambda load: run_tickets(load, stream_one, 1),
    "act": lambda load: run_tickets(load, act, ACT_TURNS),
}


async def measure(arm: Callable[[Workload], Awaitable[int]], load: Workload) -> float:
    """Return the milliseconds of this process's processor time that a turn took."""
    started_s = time.process_time()
    num_turns = await arm(load)
    return 1e3 * (time.process_time() - started_s) / num_turns


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--profile", type=Path, help="write what the arms did here, for pstats")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    codec = codec_with("hermes")
    script = write_script(codec, ACT_TURNS, REPLY_TOKENS)
    script.event_s = EVENT_S
    spare_pauses()
    seen: dict[str, list[float]] = {name: [] for name in arguments.only}
    with turn_server(script) as url, tempfile.TemporaryDirectory() as folder:
        load = Workload(url, codec, folder, arguments.trajectories)
        for name in seen:  # what is imported, compiled and cached at first
            uvloop.run(measure(ARMS[name], Workload(url, codec, folder, AT_ONCE)))
        if arguments.profile is not None:
            profile(arguments.profile, seen, load)
            return
        for _ in range(arguments.rounds):
            for name, costs in seen.items():
                gc.collect()
                costs.append(uvloop.run(measure(ARMS[name], load)))
    print(f"{'':<8}{'ms/turn':>9}{'least':>8}{'x httpx':>9}")
    for name, costs in seen.items():
        ratios = [one / base for one, base in zip(costs, seen.get("httpx", costs), strict=True)]
        print(f"{name:<8}{statistics.median(costs):>9.3f}{min(costs):>8.3f}{statistics.median(ratios):>9.2f}")
    if misses := find_misses(seen):
        sys.exit("; ".join(misses))


def find_misses(seen: dict[str, list[float]]) -> list[str]:
    """Return which limits are missed."""
    misses = []
    if {"turn", "httpx"} <= seen.keys():
        ratio = statistics.median(one / base for one, base in zip(seen["turn"], seen["httpx"], strict=True))
        if ratio > MAX_TURN_RATIO:
            misses.append(f"turn: got {ratio:.2f} times httpx, need {MAX_TURN_RATIO:g} at most")
    if "act" in seen and (cost := statistics.median(seen["act"])) > MAX_ACT_MS:
        misses.append(f"act: got {cost:.2f} ms a turn, need {MAX_ACT_MS:g} at most")
    return misses


def profile(path: Path, names: "dict[str, list[float]]", load: Workload) -> None:
    """Run each arm once under cProfile."""
    import cProfile

    with cProfile.Profile() as watched:
        for name in names:
            uvloop.run(measure(ARMS[name], load))
    watched.dump_stats(path)


if __name__ == "__main__":
    main()
