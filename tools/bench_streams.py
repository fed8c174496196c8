"""What a stream costs: our client beside raw sockets, aiohttp and plain httpx, on one loop, against one cheap server.

    python -m tools.bench_streams                  # everything; about two minutes
    python -m tools.bench_streams --only paced     # or: requests, streams

`requests`: one event each, 64 at once: processor time per request. `streams`: 64, 512 and 2,048 at once, 64 events
each, as fast as both sides can. `paced`: 2,048 at 2,000 events/s in all, started over `RAMP_S`, while a control call
(the weights version, through the administration client) is made over and over. The server runs on a core of its own.
Every contender decodes every event, and has the garbage collector set as in a node. Processor time is this process's
whole; the contenders take turns, and the cheapest round of each counts. Loop lag is the time by which a callback would
be late, at every moment of the run: a stall counts for as long as it lasts.

Exits with status 1 where our client misses a limit: `MAX_LAG_P99_S`, `MAX_CONTROL_S`, `MAX_EVENT_RATIO` and
`MAX_REQUEST_RATIO` (against raw sockets in the same run), or anything fails.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, cast
from urllib.parse import urlsplit

import aiohttp
import httpx
import msgspec
import uvloop

from areal_async.config.settings import InferenceSettings
from areal_async.inference.client import InferenceClient
from areal_async.inference.completion import decode_chunk
from areal_async.inference.http import ServerApi
from areal_async.inference.pool import ServerPool
from areal_async.inference.streams import DONE, EventSplitter
from areal_async.process.gc_pauses import spare_pauses

MAX_LAG_P99_S: Final = 0.050
MAX_CONTROL_S: Final = 0.100
MAX_EVENT_RATIO: Final = 3.0
MAX_REQUEST_RATIO: Final = 25.0

PROMPT_IDS: Final = [1, 2, 3]
NUM_EVENTS: Final = 64
NUM_REQUESTS_AT_ONCE: Final = 64
PACED_STREAMS: Final = 2048
PACED_EVENTS_PER_S: Final = 2000
RAMP_S: Final = 2.0
PACED_S: Final = 9.5
SETTLED_S: Final = (2.5, 8.0)
"""The part of a paced run, from its start, in which every stream is under way: its events are what is costed."""
LAG_STEP_S: Final = 0.01
CONTROL_INTERVAL_S: Final = 0.5
PLAIN_DEADLINE_S: Final = 12.0
DEADLINE_S: Final = 45.0

Send = Callable[[dict[str, Any]], Awaitable[int]]
"""Sends one request with these sampling parameters, and returns how many events its stream had."""


@dataclass
class Figures:
    """A contender in a workload."""

    num_events: int = 0
    num_requests: int = 0
    num_failed: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    num_costed_events: int = 0
    """Events during ``cpu_s``."""
    lags_s: list[float] = field(default_factory=list)
    controls_s: list[float] = field(default_factory=list)

    @property
    def event_us(self) -> float:
        return 1e6 * self.cpu_s / max(1, self.num_costed_events)

    @property
    def request_us(self) -> float:
        return 1e6 * self.cpu_s / max(1, self.num_requests)

    def lag_s(self, share: float) -> float:
        """Return the lag that ``share`` of the run stayed below."""
        return sorted(self.lags_s)[int(share * (len(self.lags_s) - 1))] if self.lags_s else 0.0


class RawConnection(asyncio.Protocol):
    """The limit: events found in the bytes and decoded, nothing else."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._splitter = EventSplitter()
        self._num_events = 0
        self._end: asyncio.Future[int]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._end.done():
            self._end.set_exception(exc or ConnectionResetError())

    def data_received(self, data: bytes) -> None:
        for event in self._splitter.feed(data):
            if event == DONE:
                self._end.set_result(self._num_events)
            else:
                decode_chunk(event)
                self._num_events += 1

    async def send(self, request: bytes) -> int:
        """Send one request and return the number of its events."""
        self._num_events = 0
        self._end = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._end

    def close(self) -> None:
        """Close the connection."""
        self._transport.abort()


@asynccontextmanager
async def raw_sockets(url: str, max_streams: int) -> AsyncIterator[Send]:
    """A client with one kept connection per stream."""
    port = urlsplit(url).port or 80
    loop = asyncio.get_running_loop()
    idle: list[RawConnection] = []
    opened: list[RawConnection] = []

    async def send(sampling: dict[str, Any]) -> int:
        if idle:
            connection = idle.pop()
        else:
            _, connection = await loop.create_connection(RawConnection, "127.0.0.1", port)
            opened.append(connection)
        content = body(sampling)
        head = f"POST /generate HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-length: {len(content)}\r\n\r\n"
        num_events = await connection.send(head.encode() + content)
        idle.append(connection)
        return num_events

    yield send
    for connection in opened:
        connection.close()


@asynccontextmanager
async def plain_aiohttp(url: str, max_streams: int) -> AsyncIterator[Send]:
    """aiohttp as it comes, events split and decoded as ours are."""
    connector = aiohttp.TCPConnector(limit=max_streams)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout()) as session:

        async def send(sampling: dict[str, Any]) -> int:
            num_events = 0
            splitter = EventSplitter()
            async with session.post(f"{url}/generate", data=body(sampling)) as response:
                async for data in response.content.iter_any():
                    for event in splitter.feed(data):
                        if event != DONE:
                            decode_chunk(event)
                            num_events += 1
            return num_events

        yield send


@asynccontextmanager
async def plain_httpx(url: str, max_streams: int) -> AsyncIterator[Send]:
    """httpx as its documentation has it: its own transport, one large pool, lines."""
    limits = httpx.Limits(max_connections=max_streams, max_keepalive_connections=max_streams)
    async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client:

        async def send(sampling: dict[str, Any]) -> int:
            num_events = 0
            async with client.stream("POST", f"{url}/generate", content=body(sampling)) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        decode_chunk(line[6:].encode())
                        num_events += 1
            return num_events

        yield send


@asynccontextmanager
async def ours(url: str, max_streams: int, control: list[ServerApi] | None = None) -> AsyncIterator[Send]:
    """The client of this project, with its pool."""
    pool = ServerPool(["s0"], deadline_s=DEADLINE_S)
    pool.admit(pool.servers["s0"], url=url, version="1-7")
    async with InferenceClient(pool, InferenceSettings(), max_streams=max_streams, vocab_size=1 << 20) as client:
        if control is not None:
            control.append(ServerApi(client.administration, url))

        async def send(sampling: dict[str, Any]) -> int:
            turn, _ = await client.generate(PROMPT_IDS, sampling)
            return len(turn.output_ids)

        yield send


Contender = Callable[[str, int], AbstractAsyncContextManager[Send]]
CONTENDERS: Final[dict[str, Contender]] = {
    "raw sockets": raw_sockets,
    "aiohttp": plain_aiohttp,
    "ours": ours,
    "plain httpx": plain_httpx,
}


def body(sampling: dict[str, Any]) -> bytes:
    """Return the body of one request, as our client sends it."""
    request = {"rid": "5f1d0c3a9b7e4d2f8a6b1c0e9d8f7a6b", "input_ids": PROMPT_IDS, "sampling_params": sampling}
    return msgspec.json.encode({**request, "return_logprob": True, "stream": True})


@contextmanager
def stream_server() -> Iterator[str]:
    """Start the server on the last core, stay on the first, and yield its URL."""
    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "tools.stream_server", "--core", str(cores[-1])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        os.sched_setaffinity(0, {cores[0]})
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            os.sched_setaffinity(0, cores)
            server.stdin.close()


async def watch_lag(lags_s: list[float]) -> None:
    """Note, for moments `LAG_STEP_S` apart, how late a callback due then came."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_STEP_S
        await asyncio.sleep(LAG_STEP_S)
        late_s = max(0.0, loop.time() - due)
        lags_s.append(late_s)
        while (late_s := late_s - LAG_STEP_S) > 0:
            lags_s.append(late_s)


async def call_control(api: ServerApi, controls_s: list[float]) -> None:
    """Ask for the weights version over and over."""
    while True:
        start = time.perf_counter()
        await api.weight_version(deadline_s=DEADLINE_S)
        controls_s.append(time.perf_counter() - start)
        await asyncio.sleep(CONTROL_INTERVAL_S)


async def measure(send: Send, figures: Figures, requests: Callable[[Send], Awaitable[None]], deadline_s: float) -> None:
    """Run one workload; what is not over by the deadline has failed."""
    watcher = asyncio.create_task(watch_lag(figures.lags_s))
    start_cpu, start = time.process_time(), time.perf_counter()
    try:
        async with asyncio.timeout(deadline_s):
            await requests(send)
    except TimeoutError:
        figures.num_failed += 1
    figures.cpu_s = time.process_time() - start_cpu
    figures.num_costed_events = figures.num_events
    figures.wall_s = time.perf_counter() - start
    watcher.cancel()


def counted(figures: Figures, send: Send) -> Send:
    """Return ``send`` that keeps the counts."""

    async def send_and_count(sampling: dict[str, Any]) -> int:
        num_events = await send(sampling)
        figures.num_requests += 1
        figures.num_events += num_events
        figures.num_failed += num_events != sampling["max_new_tokens"]
        return num_events

    return send_and_count


async def run_workers(contender: Contender, url: str, *, num_workers: int, num_each: int, num_events: int) -> Figures:
    """Have ``num_workers`` at once send ``num_each`` requests each, one after the other."""
    figures = Figures()

    async def requests(send: Send) -> None:
        async def work() -> None:
            for _ in range(num_each):
                await send({"max_new_tokens": num_events})

        async with asyncio.TaskGroup() as workers:
            for _ in range(num_workers):
                workers.create_task(work())

    deadline_s = PLAIN_DEADLINE_S if contender is plain_httpx else DEADLINE_S
    async with contender(url, num_workers) as send:
        await measure(counted(figures, send), figures, requests, deadline_s)
    return figures


async def run_paced(contender: Contender, url: str) -> Figures:
    """Keep ``PACED_STREAMS`` going at ``PACED_EVENTS_PER_S`` in all."""
    figures = Figures()
    sampling = {
        "max_new_tokens": int(PACED_S * PACED_EVENTS_PER_S / PACED_STREAMS),
        "event_interval_s": PACED_STREAMS / PACED_EVENTS_PER_S,
    }

    settled = Figures()

    async def watch_settled() -> None:
        begin_s, end_s = SETTLED_S
        await asyncio.sleep(begin_s)
        start_cpu, start = time.process_time(), time.perf_counter()
        await asyncio.sleep(end_s - begin_s)
        settled.cpu_s = time.process_time() - start_cpu
        settled.num_costed_events = int((time.perf_counter() - start) * PACED_EVENTS_PER_S)

    async def requests(send: Send) -> None:
        async def start_late(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            await send(sampling)

        async with asyncio.TaskGroup() as streams:
            streams.create_task(watch_settled())
            for index in range(PACED_STREAMS):
                streams.create_task(start_late(RAMP_S * index / PACED_STREAMS))

    control: list[ServerApi] = []
    entered = ours(url, PACED_STREAMS, control) if contender is ours else contender(url, PACED_STREAMS)
    async with entered as send:
        controls = [asyncio.create_task(call_control(api, figures.controls_s)) for api in control]
        await measure(counted(figures, send), figures, requests, DEADLINE_S)
        for task in controls:
            task.cancel()
    figures.cpu_s, figures.num_costed_events = settled.cpu_s, settled.num_costed_events
    return figures


def race(names: list[str], rounds: int, run: Callable[[Contender], Awaitable[Figures]]) -> dict[str, Figures]:
    """Run the contenders in turn; return each one's cheapest round, the least disturbed."""
    seen: dict[str, list[Figures]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, figures in seen.items():
            figures.append(uvloop.run(run(CONTENDERS[name])))  # type: ignore[arg-type]
    return {name: min(figures, key=lambda one: one.event_us) for name, figures in seen.items()}


def show(title: str, results: dict[str, Figures], *, per_request: bool) -> None:
    """Print one table."""
    print(f"\n{title}")
    head = f"{'us/request' if per_request else 'us/event':>12}{'x raw':>8}{'events/s':>10}{'lag p50 ms':>12}"
    print(f"{'':<14}{head}{'lag p99 ms':>12}{'failed':>8}")
    base = results["raw sockets"]
    for name, one in results.items():
        cost, limit = (one.request_us, base.request_us) if per_request else (one.event_us, base.event_us)
        rate = one.num_events / one.wall_s
        lags = f"{1e3 * one.lag_s(0.5):>12.2f}{1e3 * one.lag_s(0.99):>12.2f}"
        print(f"{name:<14}{cost:>12.1f}{cost / limit:>8.1f}{rate:>10,.0f}{lags}{one.num_failed:>8}", flush=True)


def misses(title: str, results: dict[str, Figures], *, max_lag_s: float | None, per_request: bool) -> list[str]:
    """Return which limits our client misses in one table."""
    one, base = results["ours"], results["raw sockets"]
    ratio = one.request_us / base.request_us if per_request else one.event_us / base.event_us
    max_ratio = MAX_REQUEST_RATIO if per_request else MAX_EVENT_RATIO
    found = []
    if one.num_failed:
        found.append(f"{title}: {one.num_failed} failed, need none")
    if ratio > max_ratio:
        found.append(f"{title}: got {ratio:.2f} times the raw sockets' cost, need {max_ratio:g} at most")
    if max_lag_s is not None and one.lag_s(0.99) > max_lag_s:
        found.append(f"{title}: got a p99 lag of {1e3 * one.lag_s(0.99):.1f} ms, need {1e3 * max_lag_s:g}")
    if one.controls_s and max(one.controls_s) > MAX_CONTROL_S:
        found.append(f"{title}: got a control call of {1e3 * max(one.controls_s):.0f} ms, need {1e3 * MAX_CONTROL_S:g}")
    return found


def bench_requests(url: str, rounds: int) -> list[str]:
    """Measure what a request costs."""
    title = f"requests: 1 event each, {NUM_REQUESTS_AT_ONCE} at once"
    results = race(
        ["raw sockets", "aiohttp", "ours"],
        rounds,
        lambda contender: run_workers(contender, url, num_workers=NUM_REQUESTS_AT_ONCE, num_each=50, num_events=1),
    )
    results |= race(
        ["plain httpx"],
        1,
        lambda contender: run_workers(contender, url, num_workers=NUM_REQUESTS_AT_ONCE, num_each=5, num_events=1),
    )
    show(title, results, per_request=True)
    return misses(title, results, max_lag_s=None, per_request=True)


def bench_streams(url: str, rounds: int, num_streams: int) -> list[str]:
    """Measure what an event costs when they come as fast as they can."""
    title = f"streams: {num_streams:,} at once, {NUM_EVENTS} events each"

    async def run(contender: Contender) -> Figures:
        return await run_workers(contender, url, num_workers=num_streams, num_each=1, num_events=NUM_EVENTS)

    results = race(["raw sockets", "aiohttp", "ours"], rounds, run)
    if num_streams < PACED_STREAMS:
        results |= race(["plain httpx"], 1, run)
    show(title, results, per_request=False)
    return misses(title, results, max_lag_s=None, per_request=False)


def bench_paced(url: str, rounds: int) -> list[str]:
    """Measure streams as a model sends them, and control calls beside them."""
    title = f"paced: {PACED_STREAMS:,} streams, {PACED_EVENTS_PER_S:,} events/s in all"
    results = race(["raw sockets", "aiohttp", "ours"], rounds, lambda contender: run_paced(contender, url))
    show(title, results, per_request=False)
    controls = results["ours"].controls_s
    median_ms, worst_ms = 1e3 * statistics.median(controls), 1e3 * max(controls)
    print(f"control call beside ours: median {median_ms:.1f} ms, worst of {len(controls)} {worst_ms:.1f} ms")
    return misses(title, results, max_lag_s=MAX_LAG_P99_S, per_request=False)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["requests", "streams", "paced"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 512, 2048])
    arguments = parser.parse_args()
    found: list[str] = []
    spare_pauses()
    with stream_server() as url:
        if arguments.only in (None, "requests"):
            found += bench_requests(url, arguments.rounds)
        if arguments.only in (None, "streams"):
            for num_streams in arguments.streams:
                found += bench_streams(url, arguments.rounds, num_streams)
        if arguments.only in (None, "paced"):
            found += bench_paced(url, 1)
    if found:
        sys.exit("\n" + "\n".join(found))


if __name__ == "__main__":
    main()
