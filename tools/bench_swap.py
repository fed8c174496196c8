"""What changing the weights costs a server that generates: tokens per second with and without a swap every few seconds.

    python -m tools.bench_swap                               # the embedded engine; about two minutes
    python -m tools.bench_swap --python sglang/bin/python    # the real SGLang, installed in that environment

One server, `--streams` completions at once through the client of this project, a new one for each that ends; with
`--group-size` so many to each prompt, and a group's next prompt when all of them have ended. Phases
without a swap alternate with phases of each mode (`retract`, `in_place`, `abort`), so that a busy machine slows them
alike; the swaps are the project's own, from a folder on disk. Each phase's rate is compared with the mean of the two
quiet phases beside it, and the median over the rounds is the mode's cost. `abort` ends what runs; the client goes on
from the tokens it has, so that only the server's work is lost.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import structlog
import uvloop

from areal_async.config.settings import InferenceSettings, ModelSettings, RunSettings, Settings
from areal_async.inference.client import InferenceClient
from areal_async.inference.commands import server_command
from areal_async.inference.http import ServerApi
from areal_async.inference.pool import ServerHandle, ServerPool
from areal_async.inference.servers import ServerProcess
from areal_async.inference.supervision.swap import swap
from areal_async.process.gc_pauses import spare_pauses
from areal_async.protocol.types import WeightsVersion

MODES: Final = ("retract", "in_place", "abort")
WARM_UP_S: Final = 3.0
PROMPT_TOKENS: Final = 32
START_DEADLINE_S: Final = 180.0
SWAP_DEADLINE_S: Final = 60.0


class Bench:
    """A server under constant load, and its swaps."""

    def __init__(self, client: InferenceClient, server: ServerHandle, arguments: argparse.Namespace) -> None:
        self._client = client
        self._server = server
        self._arguments = arguments
        self._api = ServerApi(client.administration, server.url, admin_key=server.admin_key)
        self._num_swaps = 0
        self.swaps_s: dict[str, list[float]] = {mode: [] for mode in MODES}

    async def run_group(self) -> None:
        """Ask for the completions of one prompt after the other, of lengths that differ."""
        low, high = self._arguments.min_tokens, self._arguments.max_tokens
        while True:
            prompt_ids = [random.randrange(5, 200) for _ in range(PROMPT_TOKENS)]
            async with anyio.create_task_group() as siblings:
                for _ in range(self._arguments.group_size):
                    sampling = {"max_new_tokens": random.randint(low, high), "temperature": 1.0, "ignore_eos": True}
                    siblings.start_soon(self._client.generate, prompt_ids, sampling)

    async def phase_rate(self, mode: str | None) -> float:
        """Return the tokens per second of one phase, with swaps in this mode, or none."""
        seconds = self._arguments.seconds
        start, num_tokens = time.monotonic(), self._server.num_generated_tokens
        async with anyio.create_task_group() as swaps:
            if mode is not None:
                swaps.start_soon(self._run_swaps, mode)
            await anyio.sleep(seconds)
            swaps.cancel_scope.cancel()
        return (self._server.num_generated_tokens - num_tokens) / (time.monotonic() - start)

    async def _run_swaps(self, mode: str) -> None:
        interval_s = self._arguments.every
        await anyio.sleep(interval_s / 2)
        while True:
            self._num_swaps += 1
            target = WeightsVersion(version=f"1-{self._num_swaps}", path=self._arguments.model)
            start = time.monotonic()
            with anyio.CancelScope(shield=True):  # a phase that ends does not leave a swap half done
                await swap(self._api, target, mode=mode, deadline_s=SWAP_DEADLINE_S)
            self.swaps_s[mode].append(time.monotonic() - start)
            self._server.version = target.version
            await anyio.sleep(max(0.0, start + interval_s - time.monotonic()))


@asynccontextmanager
async def serving(arguments: argparse.Namespace, folder: Path) -> AsyncIterator[tuple[InferenceClient, ServerHandle]]:
    """Start the server that the arguments name, and a client of it."""
    inference = InferenceSettings(
        backend="embedded" if arguments.python is None else "sglang",
        python=arguments.python,
        flags=tuple(arguments.flags),
        num_threads=arguments.threads,
    )
    settings = Settings(
        run=RunSettings(seed=1), model=ModelSettings(path=arguments.model, dtype="float32"), inference=inference
    )
    process = ServerProcess(server_command(settings, server_id="s0", index=0), log_path=folder / "server.log")
    pool = ServerPool(["s0"], deadline_s=START_DEADLINE_S)
    async with InferenceClient(pool, inference, max_streams=2 * arguments.streams, vocab_size=1 << 20) as client:
        try:
            api = ServerApi(client.administration, "")
            await process.start(api, silence_s=START_DEADLINE_S, bound_s=START_DEADLINE_S)
            pool.servers["s0"].admin_key = process.command.admin_key
            pool.admit(pool.servers["s0"], url=process.url, version="0-0")
            yield client, pool.servers["s0"]
        finally:
            await process.stop()


async def measure(arguments: argparse.Namespace) -> None:
    """Run the phases and print each mode's cost."""
    rates: dict[str, list[float]] = {mode: [] for mode in arguments.modes}
    costs: dict[str, list[float]] = {mode: [] for mode in arguments.modes}
    with tempfile.TemporaryDirectory() as folder:
        async with serving(arguments, Path(folder)) as (client, server), anyio.create_task_group() as streams:
            bench = Bench(client, server, arguments)
            for _ in range(arguments.streams // arguments.group_size):
                streams.start_soon(bench.run_group)
            await anyio.sleep(WARM_UP_S)
            quiet = await bench.phase_rate(None)
            for _ in range(arguments.rounds):
                for mode in arguments.modes:
                    rate = await bench.phase_rate(mode)
                    quiet_after = await bench.phase_rate(None)
                    rates[mode].append(rate)
                    costs[mode].append(1 - 2 * rate / (quiet + quiet_after))
                    quiet = quiet_after
            streams.cancel_scope.cancel()
    load = f"{arguments.streams} streams, {arguments.threads} server threads"
    print(f"{load}, a swap every {arguments.every:g} s, phases of {arguments.seconds:g} s")
    for mode in arguments.modes:
        each = ", ".join(f"{100 * cost:.1f}" for cost in costs[mode])
        rate, cost = statistics.median(rates[mode]), 100 * statistics.median(costs[mode])
        swap_ms = 1e3 * statistics.median(bench.swaps_s[mode])
        print(f"{mode:<10}{rate:>9,.0f} tok/s   costs {cost:5.1f} %   swap {swap_ms:.0f} ms   (rounds: {each})")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="configs/models/tiny", help="model folder, loaded again at each swap")
    parser.add_argument("--python", type=Path, help="interpreter of an environment with SGLang")
    parser.add_argument("--flags", nargs="*", default=[], help="passed on to the server as they are")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the server; all cores, as it is alone")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=1, help="completions of each prompt")
    parser.add_argument("--min-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--every", type=float, default=5.0, help="seconds from one swap to the next")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of one phase")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.group_size < 1 or arguments.streams < 1 or arguments.streams % arguments.group_size:
        parser.error(f"--streams: got {arguments.streams}, need a multiple of --group-size, {arguments.group_size}")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("error"))
    spare_pauses()
    uvloop.run(measure(arguments))


if __name__ == "__main__":
    main()
