"""How late the event loop is while agents talk to the endpoint: many trajectories on one loop, three turns with a tool.

    python -m tools.bench_endpoint [--trajectories 1000] [--turns 3]

The model is paced (an event of 8 tokens every 100 ms, as a server with ``stream_interval`` 8 sends them), the agents
are another process. Prints the lag of the loop and the processor time of a request.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import anyio
import uvloop

from areal_async.config.settings import SamplingSettings
from areal_async.inference.pool import ServerHandle
from areal_async.process.gc_pauses import spare_pauses
from areal_async.protocol.types import Turn, VersionSpan
from areal_async.rollout.endpoint.policy import PolicyMaker
from areal_async.rollout.endpoint.server import AgentEndpoint
from areal_async.rollout.policy.merge import merge_turns
from areal_async.rollout.policy.text import load_codec
from areal_async.rollout.user_code.loop_watchdog import LoopWatchdog
from areal_async.vision.images import Image

MODEL = "configs/models/tiny"
EVENT_TOKENS = 8
EVENT_S = 0.1
TEXT = "I add the numbers of both boxes, and then I have a look at what is left of them for Amy and for Joe. "
CALL = '{"name": "add", "arguments": {"a": 2, "b": 3}}'
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


class PacedModel:
    """A generator with the same answer each time, an event at a time."""

    def __init__(self, output_ids: list[int]) -> None:
        self._output_ids = output_ids
        self._server = ServerHandle("s0")

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: Mapping[str, Any],
        *,
        preferred: ServerHandle | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
        images: Sequence[Image] = (),
    ) -> tuple[Turn, ServerHandle]:
        ids = self._output_ids
        for start in range(0, len(ids), EVENT_TOKENS):
            await asyncio.sleep(EVENT_S)
            if on_tokens is not None:
                on_tokens(ids[start : start + EVENT_TOKENS])
        turn = Turn(
            prompt_ids=prompt_ids,
            output_ids=list(ids),
            logprobs=[-1.0] * len(ids),
            spans=[VersionSpan(version="1-0", start=0, end=len(ids))],
            oldest="1-0",
            finish_reason="stop",
        )
        return turn, self._server


async def serve(num_trajectories: int, num_turns: int) -> None:
    """Open the trajectories, start the agents' process and wait for its end."""
    codec = load_codec(MODEL)
    codec.tool_format = "hermes"
    output_ids = [*codec.encode(f"{TEXT}<tool_call>{CALL}</tool_call>"), codec.stop_token_ids[0]]
    watch = LoopWatchdog()
    spare_pauses()
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(AgentEndpoint())
        maker = PolicyMaker(generator=PacedModel(output_ids), codec=codec, endpoint=endpoint)
        policies = [maker.policy(SamplingSettings(), f"t{number}") for number in range(num_trajectories)]
        addresses = json.dumps([(policy.base_url, policy.api_key) for policy in policies])
        beats = asyncio.create_task(watch.run_beats())
        started, worked = time.monotonic(), time.process_time()
        command = [sys.executable, "-m", "tools.bench_endpoint", "--agents", "--turns", str(num_turns)]
        lags: list[float] = []
        async with await anyio.open_process(command, stdout=None, stderr=None) as agents:
            assert agents.stdin is not None
            await agents.stdin.send(addresses.encode())
            await agents.stdin.aclose()
            while agents.returncode is None:
                await asyncio.sleep(1.0)
                lags.append(watch.lag.p99_s)
        beats.cancel()
        wall_s, cpu_s = time.monotonic() - started, time.process_time() - worked
        for policy in policies:
            policy.close()
    num_requests = sum(len(policy.turns) for policy in policies)
    num_rows = sum(len(merge_turns(policy.turns)) for policy in policies)
    print(
        f"{num_trajectories} trajectories, {num_requests} requests of {len(output_ids)} tokens in {wall_s:.1f} s; "
        f"{1e3 * cpu_s / max(1, num_requests):.2f} ms of processor a request; "
        f"p99 lag in ten seconds: worst {1e3 * max(lags):.1f} ms, last {1e3 * lags[-1]:.1f} ms; {num_rows} rows"
    )


async def run_agents(addresses: list[tuple[str, str]], num_turns: int) -> None:
    """Be all the agents; one begins every few milliseconds, as trajectories do."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http, asyncio.TaskGroup() as tasks:
        for url, key in addresses:
            tasks.create_task(run_agent(http, url, key, num_turns))
            await asyncio.sleep(0.005)


async def run_agent(http: aiohttp.ClientSession, url: str, key: str, num_turns: int) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How many cakes are there?"}]
    for _ in range(num_turns):
        body = {"messages": messages, "tools": [TOOL], "stream": True}
        content, call = "", None
        async with http.post(
            f"{url}/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
        ) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        content += choice["delta"].get("content") or ""
                        for one in choice["delta"].get("tool_calls", ()):
                            call = call or one
                            if "id" not in one:
                                call["function"]["arguments"] = one["function"]["arguments"]
        assert call is not None
        messages.append({"role": "assistant", "content": content, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "5"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--agents", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.agents:
        uvloop.run(run_agents(json.load(sys.stdin), arguments.turns))
    else:
        uvloop.run(serve(arguments.trajectories, arguments.turns))


if __name__ == "__main__":
    main()
