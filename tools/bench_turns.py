"""How late the event loop is while 1,000 trajectories use a tool over several turns, beside a plain openai-SDK loop.

    python -m tools.bench_turns [--trajectories 1000] [--turns 4] [--only ours ...]

Both have the same conversations with the same server (`tools.turn_server`: replies of 256 tokens, 8 in an event, an
event each 200 ms) and run the same tool; the server has a core of its own. `ours` is what a node does with tickets,
except that the broker acknowledges at once: workflows with `policy.act`, every token recorded, trajectories encoded.
`openai SDK` is what an agent does by hand: it streams, adds up the pieces, calls the tool and records nothing.
`traced` is ours with every group traced into a file, by a thread of the same process, on the same core.

Loop lag is the time by which a callback would be late, at every moment of the run. Processor time is this process's
whole. Exits with status 1 where ours misses `MAX_LAG_P99_S`, or anything fails.
"""

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import openai
import structlog
import uvloop

from areal_async.api import Policy
from areal_async.bus import Bus, Delivery
from areal_async.config.metrics import TO_FILES
from areal_async.config.settings import InferenceSettings, MetricsSettings, RunSettings, SamplingSettings, Settings
from areal_async.inference.client import InferenceClient
from areal_async.inference.pool import ServerPool
from areal_async.process.gc_pauses import spare_pauses
from areal_async.protocol.types import Prompt, Ticket
from areal_async.rollout.group import run_ticket
from areal_async.rollout.node_context import NodeContext
from areal_async.rollout.policy.text import TextCodec
from areal_async.telemetry.exporters.traces import recording
from tests.unit.rollout.chat_templates import codec_with
from tools.bench_streams import watch_lag
from tools.turn_server import VERSION, Script

MAX_LAG_P99_S = 0.050
GROUP_SIZE = 8
REPLY_TOKENS = 256
EVENT_TOKENS = 8
EVENT_S = 0.2
QUESTION = "Amy has 2 boxes of cakes and Joe has 3. How many boxes are there?"
WORDS = "I add the numbers of both boxes, and then I have a look at what is left of them for Amy and for Joe. "
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


async def add(a: int, b: int) -> int:
    """Add two numbers."""
    await asyncio.sleep(0.01)
    return a + b


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@dataclass
class Figures:
    """The measurements of a contender."""

    lags_s: list[float] = field(default_factory=list)
    num_turns: int = 0
    num_trajectories: int = 0
    num_failed: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def lag_ms(self, quantile: float) -> float:
        ordered = sorted(self.lags_s)
        return 1e3 * ordered[int(quantile * (len(ordered) - 1))]


def write_script(codec: TextCodec, num_turns: int, reply_tokens: int = REPLY_TOKENS) -> Script:
    """Return what the server says: replies of one length, all but the last with a call."""
    end_id = codec.stop_token_ids[0]
    call, words = codec.encode(CALL), codec.encode(WORDS)

    def filled(tail: list[int]) -> list[int]:
        num_words = reply_tokens - len(tail) - 1
        return [*(words * (num_words // len(words) + 1))[:num_words], *tail, end_id]

    call_ids = filled(call)
    texts = [codec.decode(call_ids[start : start + EVENT_TOKENS]) for start in range(0, reply_tokens, EVENT_TOKENS)]
    # a question, then an answer and a tool's in each turn; the template writes the tools' schemas as a message more
    return Script(
        call_ids=call_ids, last_ids=filled([]), texts=texts, end_id=end_id, num_messages=2 * num_turns - 1,
        event_tokens=EVENT_TOKENS, event_s=EVENT_S,
    )  # fmt: skip


class Broker:
    """Takes everything, at once."""

    def __init__(self, settings: Settings) -> None:
        self.names = settings.names
        self.num_dead_letters = 0

    async def publish(self, *args: object, **options: object) -> None:
        await asyncio.sleep(0)


class Lease:
    """A ticket that nobody takes away."""

    num_delivered = 1

    @property
    def stored_ns(self) -> int:
        return time.time_ns()

    async def ack(self) -> None:
        pass

    async def nak(self, delay_s: float) -> None:
        pass

    async def in_progress(self) -> None:
        pass


async def run_traced(url: str, codec: TextCodec, figures: Figures, arguments: argparse.Namespace, folder: str) -> None:
    """Run tickets as a node does that records traces; what it has left to write is counted too."""
    settings = Settings(metrics=MetricsSettings(traces=TO_FILES))
    with recording(settings, Path(folder), role="node"):
        await run_ours(url, codec, figures, arguments, folder)


async def run_ours(url: str, codec: TextCodec, figures: Figures, arguments: argparse.Namespace, folder: str) -> None:
    """Run tickets as a node does."""
    sampling = SamplingSettings(max_new_tokens=2 * REPLY_TOKENS)
    settings = Settings(run=RunSettings(name="bench", directory=Path(folder)))
    rollout = settings.rollout.model_copy(update={"group_size": GROUP_SIZE, "sampling": sampling})
    settings = settings.model_copy(update={"rollout": rollout})

    async def workflow(prompt: Prompt, policy: Policy) -> float:
        act = await policy.act([{"role": "user", "content": prompt["question"]}], [add], max_turns=arguments.turns)
        figures.num_turns += len(act.replies)
        assert act.is_finished
        assert [result.text for result in act.results] == ["5"] * (arguments.turns - 1)
        return 1.0

    pool = ServerPool(["s0"], deadline_s=60.0)
    pool.admit(pool.servers["s0"], url=url, version=VERSION)
    async with InferenceClient(
        pool, InferenceSettings(), max_streams=arguments.trajectories, vocab_size=1 << 20
    ) as client:
        place = NodeContext(
            settings=settings, bus=cast(Bus, Broker(settings)), node_id="0", generator=client, codec=codec,
            workflows={"w": workflow},
        )  # fmt: skip

        async def run_one(number: int) -> None:
            row = {"question": f"{number}: {QUESTION}"}
            ticket = Ticket(group_id=f"0-{number}-0", workflow="w", row=row, group_size=GROUP_SIZE, version=VERSION)
            await run_ticket(place, ticket, cast(Delivery, Lease()))

        await spread(run_one, arguments.trajectories // GROUP_SIZE, arguments.ramp_s)
    figures.num_trajectories = place.counts.num_scored
    figures.num_failed = place.counts.num_failed
    if place.counts.last_failure:
        print(place.counts.last_failure)


async def run_sdk(url: str, figures: Figures, arguments: argparse.Namespace) -> None:
    """Be the agents, by hand."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120.0, max_retries=0) as client:

        async def run_one(number: int) -> None:
            messages: list[Any] = [{"role": "user", "content": f"{number // GROUP_SIZE}: {QUESTION}"}]
            for turn in range(arguments.turns):
                content, calls = await ask(client, messages)
                figures.num_turns += 1
                messages.append({"role": "assistant", "content": content, "tool_calls": calls})
                for call in calls:
                    value = await add(**json.loads(call["function"]["arguments"]))
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(value)})
                if bool(calls) != (turn < arguments.turns - 1):
                    figures.num_failed += 1
            figures.num_trajectories += 1

        await spread(run_one, arguments.trajectories, arguments.ramp_s)


async def ask(client: openai.AsyncOpenAI, messages: list[Any]) -> tuple[str, list[dict[str, Any]]]:
    """Return what the model says and calls."""
    content, calls = "", []
    tools = cast(Any, [ADD])
    stream = await client.chat.completions.create(model="m", messages=messages, tools=tools, stream=True)
    async for chunk in stream:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for call in delta.tool_calls or []:
            assert call.function is not None
            function = {"name": call.function.name, "arguments": call.function.arguments}
            calls.append({"id": call.id, "type": "function", "function": function})
    return content, calls


async def spread(run_one: Callable[[int], Awaitable[None]], number: int, ramp_s: float) -> None:
    """Begin one after the other, and wait for all."""
    async with asyncio.TaskGroup() as tasks:
        for index in range(number):
            tasks.create_task(cast(Any, run_one(index)))
            await asyncio.sleep(ramp_s / number)


async def measure(run: Callable[[Figures], Awaitable[None]]) -> Figures:
    """Run one contender."""
    figures = Figures()
    watcher = asyncio.create_task(watch_lag(figures.lags_s))
    started_s, worked_s = time.perf_counter(), time.process_time()
    await run(figures)
    figures.cpu_s, figures.wall_s = time.process_time() - worked_s, time.perf_counter() - started_s
    watcher.cancel()
    return figures


def compare(results: Mapping[str, Figures], left: str, right: str) -> None:
    """Print what a turn of one costs beside a turn of another, where both were measured."""
    if left in results and right in results:
        one, other = results[left], results[right]
        ratio = one.cpu_s / max(1, one.num_turns) / (other.cpu_s / max(1, other.num_turns))
        print(f"a turn of {left} costs {ratio:.2f} of one of {right}")


@contextmanager
def turn_server(script: Script) -> Iterator[str]:
    """Start the server on the last core, stay on the first, and yield its URL."""
    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "tools.turn_server", "--core", str(cores[-1])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(msgspec.json.encode(script) + b"\n")
        server.stdin.flush()
        os.sched_setaffinity(0, {cores[0]})
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            os.sched_setaffinity(0, cores)
            server.stdin.close()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--ramp-s", type=float, default=5.0, help="over which they begin")
    parser.add_argument("--only", nargs="+", choices=["ours", "traced", "openai SDK"])
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(30))
    codec = codec_with("hermes")
    script = write_script(codec, arguments.turns)
    print(
        f"{arguments.trajectories:,} trajectories at once, {arguments.turns} turns of {REPLY_TOKENS} tokens\n"
        f"{'':<12}{'ms/turn':>9}{'traj./s':>9}{'lag p50 ms':>12}{'p99':>8}{'max':>8}{'busy':>7}{'failed':>8}"
    )
    results: dict[str, Figures] = {}
    spare_pauses()
    with turn_server(script) as url, tempfile.TemporaryDirectory() as folder:
        contenders: dict[str, Callable[[Figures], Awaitable[None]]] = {
            "ours": lambda figures: run_ours(url, codec, figures, arguments, folder),
            "traced": lambda figures: run_traced(url, codec, figures, arguments, folder),
            "openai SDK": lambda figures: run_sdk(url, figures, arguments),
        }
        for name in arguments.only or contenders:
            one = results[name] = uvloop.run(measure(contenders[name]))
            gc.collect()
            print(
                f"{name:<12}{1e3 * one.cpu_s / max(1, one.num_turns):>9.2f}{one.num_trajectories / one.wall_s:>9.1f}"
                f"{one.lag_ms(0.5):>12.1f}{one.lag_ms(0.99):>8.1f}{one.lag_ms(1.0):>8.1f}"
                f"{one.cpu_s / one.wall_s:>7.0%}{one.num_failed:>8}",
                flush=True,
            )
    compare(results, "ours", "openai SDK")
    compare(results, "traced", "ours")
    ours = results.get("ours", Figures())
    if ours.num_failed or ours.num_trajectories + ours.num_failed < bool(ours.lags_s) * arguments.trajectories:
        sys.exit(f"ours: {ours.num_trajectories} of {arguments.trajectories} were scored")
    if ours.lags_s and ours.lag_ms(0.99) > 1e3 * MAX_LAG_P99_S:
        sys.exit(f"ours: got a p99 lag of {ours.lag_ms(0.99):.1f} ms, need {1e3 * MAX_LAG_P99_S:g} at most")


if __name__ == "__main__":
    main()
