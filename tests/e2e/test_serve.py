"""``serve`` as a user starts it, with real servers: nothing is dropped, whatever moves and whoever is killed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from areal_async.launch.run_directory import RunDirectory
from areal_async.process.json_lines import read_json_lines
from areal_async.serving.export import read_answers
from areal_async.versions.tags import Tag, write
from tests.brokers import until
from tests.e2e.test_run import REPOSITORY, said
from tools.bench_serve import MODEL, TAG, Load, Meant, Serving, drive, make_run

RATE = 4.0
TOKENS = 8
LONG_TOKENS = 300

pytestmark = [pytest.mark.timeout(420), pytest.mark.whole_runs, pytest.mark.anyio]


@dataclass
class Scene:
    """A run that is served, and asked at a steady rate."""

    run: RunDirectory
    serving: Serving
    http: aiohttp.ClientSession
    url: str
    meant: Meant
    load: Load

    async def move(self, version: str) -> None:
        self.meant.before, self.meant.now = self.meant.now, version
        await asyncio.to_thread(write, self.run.path, Tag(tag=TAG, version=version))
        await self.serving.wait_for(rf"(version {version} answers)")

    def server_pids(self) -> list[int]:
        lines = read_json_lines(self.run.path / "served" / "logs" / "serve.jsonl")
        return [line["pid"] for line in lines if line["event"] == "server.started"]


@asynccontextmanager
async def served(directory: Path, *, replace: str) -> AsyncIterator[Scene]:
    run = make_run(directory, 2, replace=replace, tokens=LONG_TOKENS)
    write(run.path, Tag(tag=TAG, version="1-1"))
    serving, done = Serving(["--run", str(run.path), "--version", TAG], directory / "said"), asyncio.Event()
    try:
        key = await serving.wait_for(r"key default: (\S+)")
        url = await serving.wait_for(r"serving at (\S+)")
        async with aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as http:
            scene = Scene(run, serving, http, url, Meant("1-1"), Load())
            driving = asyncio.create_task(drive(url, key, RATE, scene.meant, scene.load, TOKENS, done))
            await until(lambda: scene.load.versions["1-1"] > 0)
            yield scene
            done.set()
            await driving
        assert await asyncio.to_thread(serving.end) == 0
    finally:
        if serving.process.poll() is None:
            serving.process.kill()
            serving.process.wait()


def assert_nothing_was_lost(scene: Scene, *, num_more: int = 0) -> None:
    assert not scene.load.dropped
    assert scene.load.astray == 0
    rows = list(read_answers(scene.run.path / "served"))
    assert len(rows) == scene.load.versions.total() + num_more
    assert {row["version"] for row in rows} == set(scene.load.versions) == {"1-1", "1-2"}
    assert all(len(row["token_ids"]) == len(row["logprobs"]) == row["num_tokens"] for row in rows)


async def test_an_answer_outlives_its_server_and_a_move_and_what_was_answered_is_a_table(tmp_path: Path) -> None:
    """The server is killed in the midst of an answer; the next ends it, while those of another version answer."""
    async with served(tmp_path, replace="beside") as scene:
        long = {"model": "m", "stream": True, "max_tokens": LONG_TOKENS, "ignore_eos": True,
                "messages": [{"role": "user", "content": "?"}], "stream_options": {"include_usage": True}}  # fmt: skip
        async with scene.http.post(f"{scene.url}/chat/completions", json=long) as answer:
            events = b"".join([await answer.content.readuntil(b"\n\n") for _ in range(2)])
            (pid,) = await asyncio.to_thread(scene.server_pids)
            os.kill(pid, signal.SIGKILL)
            await scene.move("1-2")
            events += await answer.read()
        await until(lambda: scene.load.versions["1-2"] > 0)
        feedback = {"id": answer.headers["x-request-id"], "rating": 5}
        async with scene.http.post(f"{scene.url}/feedback", json=feedback) as taken:
            assert (await taken.json())["is_known"]
        models = scene.run.path / "served" / "models"
        await until(lambda: [name.name for name in models.iterdir() if name.is_dir()] == ["1-2"])

    assert answer.headers["x-areal-version"] == "1-1"
    last = [json.loads(event.removeprefix(b"data: ")) for event in events.strip().split(b"\n\n")[:-1]][-1]
    assert last["usage"]["completion_tokens"] == LONG_TOKENS
    assert_nothing_was_lost(scene, num_more=1)
    assert [row["num_tokens"] for row in read_answers(scene.run.path / "served") if row["rating"]] == [LONG_TOKENS]
    assert len(scene.server_pids()) == 3, "the first, its next life, and the other version's"
    pairs = said("serve", "--run", str(scene.run.path), "--export", str(tmp_path / "all.parquet"))
    assert f"{scene.load.versions.total() + 1} answers written" in pairs.stdout


async def test_in_place_the_same_servers_answer_with_the_new_weights(tmp_path: Path) -> None:
    async with served(tmp_path, replace="in_place") as scene:
        await scene.move("1-2")
        await until(lambda: scene.load.versions["1-2"] > 0)

    assert_nothing_was_lost(scene)
    assert len(scene.server_pids()) == 1


async def test_a_model_without_a_run_is_served_by_its_own_name(tmp_path: Path) -> None:
    words = ["--model", str(MODEL), "--model.dtype", "float32", "--inference.backend", "embedded"]
    serving = Serving([*words, "--serve.directory", str(tmp_path / "served")], tmp_path / "said")
    try:
        key = await serving.wait_for(r"key default: (\S+)")
        url = await serving.wait_for(r"serving at (\S+)")
        body = {"model": "any", "messages": [{"role": "user", "content": "?"}], "max_tokens": 4}
        async with aiohttp.ClientSession(headers={"x-api-key": key}) as http:
            async with http.post(f"{url}/messages", json=body) as answer:
                said_so = await answer.json()
    finally:
        status = await asyncio.to_thread(serving.end)

    assert (status, answer.headers["x-areal-arm"], answer.headers["x-areal-version"]) == (0, "tiny", "tiny")
    (row,) = read_answers(tmp_path / "served")
    assert (row["id"], row["version"], row["num_tokens"]) == (said_so["id"], "tiny", said_so["usage"]["output_tokens"])


@pytest.mark.nightly
def test_two_hundred_requests_a_second_while_the_tag_moves_five_times() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench_serve", "--rate", "200", "--moves", "5"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr


MISTAKES: dict[str, tuple[list[str], str]] = {
    "neither": ([], "serve: got neither of --run and --model, need one"),
    "both": (["--run", "r", "--model", "m"], "serve: got both of --run and --model"),
    "version of a model": (["--model", "m", "--version", "1-2"], "--version: got it with --model"),
    "split and version": (["--run", "r", "--version", "a", "--split", "a=1"], "--version: got --split as well"),
    "no run": (["--run", "nowhere"], "--run: got nowhere, need the name of a run"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake: str) -> None:
    words, sentence = MISTAKES[mistake]

    done = said("serve", *words)

    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert sentence in done.stderr


def test_a_name_that_means_nothing_a_bad_split_and_a_taken_port_are_told(tmp_path: Path) -> None:
    run = make_run(tmp_path, 1, replace="beside", tokens=TOKENS)

    def told(*words: str) -> Any:
        done = said("serve", "--run", str(run.path), *words)
        assert done.returncode == 2
        return done.stderr

    assert "has no checkpoint champion, need one of 1-1, best, last" in told("--serve.port", "0")
    assert "--split: got 'a'" in told("--split", "a")
    assert "need an address of this host and a free port" in told("--version", "last", "--serve.host", "203.0.113.7")
    assert "has no answers; serve some first" in told("--export", str(tmp_path / "a.jsonl"))
    key = said("serve", "--run", str(run.path), "--new-key", "ann")
    assert key.returncode == 0
    assert "key ann: sk-" in key.stdout
    assert "has one called ann already" in told("--new-key", "ann")
