"""Requests to ``serve`` at a steady rate while the tag that it follows moves: how many are answered, by which version.

    python -m tools.bench_serve [--rate 200] [--moves 5] [--tokens 16] [--run NAME]

``serve`` is started as a user starts it: for a run's checkpoints, oldest first, each exported when the tag comes to it,
or for versions that are made here, all of the tiny model and exported already. Requests come evenly, whether earlier
ones are answered or not, a share of them streamed; the tag moves whenever the version before has answered for a while.
Printed are the rate, what was dropped (any answer that is not whole, any status but 200) and each version's answers;
the status is 1 where one was dropped, or came with another version than its time allows. What is not known here is
handed on to ``serve``, as ``--serve.replace in_place``.
"""

import argparse
import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import uvloop

from areal_async.config.settings import InferenceSettings, ModelSettings, RolloutSettings, RunSettings, Settings
from areal_async.launch.run_directory import RunDirectory, find_run
from areal_async.process.atomic_folders import LEDGER, versions_in
from areal_async.versions.tags import Tag, write

MODEL = Path(__file__).parents[1] / "configs" / "models" / "tiny"
TAG = "bench"
START_DEADLINE_S = 300.0
REQUEST_DEADLINE_S = 300.0
QUESTIONS = tuple(f"Amy has {number} apples and gets {number % 7} more. How many has she?" for number in range(2, 99))
STREAMED_SHARE = 4
"""One request of so many is streamed."""


@dataclass
class Load:
    """What has become of requests."""

    versions: Counter[str] = field(default_factory=Counter)
    """Version in the header of an answer -> answers."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Why -> requests that were not answered whole."""
    astray: int = 0
    """Answers by a version that was not meant at any time between their request and their end."""
    num_tokens: int = 0
    latencies_s: list[float] = field(default_factory=list)
    late_starts_s: list[float] = field(default_factory=list)
    """By how much requests were sent later than they were to be: the driver's own want of a processor."""


def make_run(directory: Path, num_versions: int, *, replace: str = "beside", tokens: int) -> RunDirectory:
    """Make a run's directory with versions of the tiny model."""
    run = RunDirectory(directory / "bench")
    run.path.mkdir(parents=True)
    settings = Settings(
        run=RunSettings(name="bench", directory=directory),
        model=ModelSettings(path=str(MODEL), dtype="float32"),
        inference=InferenceSettings(backend="embedded"),
        rollout=RolloutSettings.model_validate({"sampling": {"max_new_tokens": tokens}}),
    )
    run.write_settings(settings.model_copy(update={"serve": settings.serve.model_copy(update={"replace": replace})}))
    for step in range(1, num_versions + 1):
        add_version(run, f"1-{step}")
    return run


def add_version(run: RunDirectory, version: str) -> None:
    """Make a checkpoint whose model, the tiny one, is exported already."""
    checkpoint = run.path / "checkpoints" / version
    checkpoint.mkdir(parents=True)
    (checkpoint / LEDGER).write_text("{}")
    shutil.copytree(MODEL, run.path / "served" / "models" / version)


class Serving:
    """``serve`` as a process, and what it says."""

    def __init__(self, words: list[str], said: Path) -> None:
        """Take the words after ``serve``, and the file for what it says."""
        command = [sys.executable, "-m", "areal_async", "serve", "--serve.port", "0", *words]
        self._said = said
        with said.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file)

    async def wait_for(self, pattern: str) -> str:
        """Return the first group of a pattern, once it has said that."""
        ends_at = time.monotonic() + START_DEADLINE_S
        while (found := re.search(pattern, self._said.read_text())) is None:
            if self.process.poll() is not None or time.monotonic() > ends_at:
                raise RuntimeError(f"serve: no {pattern} in {self._said.read_text()!r}")
            await asyncio.sleep(0.05)
        return found[1]

    def end(self) -> int:
        """End it, as an operator does; return its status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=START_DEADLINE_S)


@dataclass
class Meant:
    """Which versions may answer."""

    now: str
    before: str = ""
    """The one that may answer until ``now`` has begun to."""


async def ask(http: aiohttp.ClientSession, url: str, number: int, meant: Meant, load: Load, tokens: int) -> None:
    """Ask once, and note what becomes of it."""
    is_streamed = number % STREAMED_SHARE == 0
    question = {"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}
    body = {
        "model": "bench", "messages": [question], "max_tokens": tokens, "stream": is_streamed, "ignore_eos": True,
        "stream_options": {"include_usage": True} if is_streamed else None,
    }  # fmt: skip
    started, allowed = time.monotonic(), {meant.now, meant.before}
    try:
        async with http.post(f"{url}/chat/completions", json=body) as answer:
            text = await answer.text()
            if answer.status != 200:
                load.dropped[f"status {answer.status}: {text[:120]}"] += 1
                return
            last = text.split("\n\n")[-3].removeprefix("data: ") if is_streamed else text
            if is_streamed and not text.endswith("data: [DONE]\n\n"):
                load.dropped["a stream without its end"] += 1
                return
            num_tokens = json.loads(last)["usage"]["completion_tokens"]
            version = answer.headers["x-areal-version"]
    except (aiohttp.ClientError, TimeoutError, OSError) as exc:
        load.dropped[f"{type(exc).__name__}: {exc}"[:120]] += 1
        return
    load.num_tokens += num_tokens
    load.versions[version] += 1
    load.latencies_s.append(time.monotonic() - started)
    load.astray += version not in allowed | {meant.now}


async def drive(url: str, key: str, rate: float, meant: Meant, load: Load, tokens: int, done: asyncio.Event) -> None:
    """Ask at a steady rate until ``done``, then wait for the answers."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=REQUEST_DEADLINE_S)
    headers = {"authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as http,
        asyncio.TaskGroup() as tasks,
    ):
        start, number = time.monotonic(), 0
        while not done.is_set():
            due = start + number / rate
            if (wait_s := due - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            load.late_starts_s.append(max(0.0, time.monotonic() - due))
            tasks.create_task(ask(http, url, number, meant, load, tokens))
            number += 1


async def bench(arguments: argparse.Namespace, words: list[str]) -> int:
    """Serve, ask, move; return the exit status."""
    with tempfile.TemporaryDirectory(prefix="areal-bench-serve-") as folder:
        if arguments.run is not None:
            run = find_run(arguments.run)
            versions = [str(version) for version in versions_in(run.path / "checkpoints")][: arguments.moves + 1]
            words = ["--serve.directory", f"{folder}/served", *words]
        else:
            run = make_run(Path(folder), 1, tokens=arguments.tokens)
            versions = [f"1-{step}" for step in range(1, arguments.moves + 2)]
        write(run.path, Tag(tag=TAG, version=versions[0], why="tools.bench_serve"))
        serving = Serving(["--run", str(run.path), "--version", TAG, *words], Path(folder, "said"))
        try:
            key = await serving.wait_for(r"key default: (\S+)")
            url = await serving.wait_for(r"serving at (\S+)")
            load, meant, done = Load(), Meant(versions[0]), asyncio.Event()
            driving = asyncio.create_task(drive(url, key, arguments.rate, meant, load, arguments.tokens, done))
            started = time.monotonic()
            await asyncio.sleep(arguments.between_s)
            moved_s = []
            for version in versions[1:]:
                if arguments.run is None:
                    add_version(run, version)
                told = time.monotonic()
                meant.before, meant.now = meant.now, version
                write(run.path, Tag(tag=TAG, version=version, why="tools.bench_serve"))
                await serving.wait_for(rf"(version {version} answers)")
                moved_s.append(time.monotonic() - told)
                await asyncio.sleep(arguments.between_s)
            wall_s = time.monotonic() - started
            done.set()
            await driving
            async with aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as http:
                async with http.get(f"{url}/metrics") as answer:
                    metrics = await answer.text()
        finally:
            status = serving.end()
        served = Path(folder, "served") if arguments.run is not None else run.path / "served"
        num_recorded = sum(path.read_bytes().count(b"\n") for path in served.glob("answers-*"))
    mixed = re.search(r"areal_serve_mixed_answers_total ([0-9.]+)", metrics)
    return report(load, wall_s, moved_s, num_recorded, status=status, num_mixed=float(mixed[1]) if mixed else -1)


def report(load: Load, wall_s: float, moved_s: list[float], num_recorded: int, *, status: int, num_mixed: float) -> int:
    """Print it; return the exit status."""
    num_answered, num_dropped = load.versions.total(), load.dropped.total()
    ordered = sorted(load.latencies_s) or [0.0]
    p50, p99 = (1e3 * ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
    num_asked = num_answered + num_dropped
    print(
        f"{num_asked} requests in {wall_s:.1f} s, {num_asked / wall_s:.0f} a second; {num_answered} answered, "
        f"{num_dropped} dropped, {load.astray} astray, {num_mixed:.0f} mixed; {load.num_tokens} tokens; "
        f"latency p50 {p50:.0f} ms, p99 {p99:.0f} ms, longest {1e3 * ordered[-1]:.0f} ms; "
        f"sent late by {1e3 * max(load.late_starts_s):.0f} ms at most; {num_recorded} recorded; ended with {status}"
    )
    print("versions: " + ", ".join(f"{name} {count}" for name, count in sorted(load.versions.items())))
    print("moves: " + ", ".join(f"{one:.1f} s" for one in moved_s))
    for cause, count in load.dropped.most_common():
        print(f"dropped {count}: {cause}")
    is_whole = not num_dropped and not load.astray and not num_mixed and num_recorded == num_answered and not status
    return 0 if is_whole and len(load.versions) == len(moved_s) + 1 else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--moves", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--between-s", type=float, default=3.0, help="time for which a version answers between moves")
    parser.add_argument("--run", help="serve this run's checkpoints, of which it needs one more than moves")
    arguments, words = parser.parse_known_args()
    return uvloop.run(bench(arguments, words))


if __name__ == "__main__":
    sys.exit(main())
