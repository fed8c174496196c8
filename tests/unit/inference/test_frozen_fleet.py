"""A fleet of a frozen model, with the real engine: it serves what it started with, whatever is announced or dies."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from areal_async.config.settings import InferenceSettings, ModelSettings, Settings
from areal_async.inference.client import InferenceClient
from areal_async.inference.http import ServerApi
from areal_async.inference.pool import ServerHandle, ServerPool
from areal_async.inference.supervision.fleet import Fleet
from areal_async.protocol.types import Turn, WeightsVersion

pytestmark = pytest.mark.anyio

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0, "stop_token_ids": []}
PROMPT = [5, 6, 7]
VERSION = "1-3"
"""What the weights are that it starts with."""


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}  # it starts an engine twice: one loop is enough


def settings_of(model: Path) -> Settings:
    return Settings(
        model=ModelSettings(path=str(model), dtype="float32"),
        inference=InferenceSettings(backend="embedded", start_deadline_s=240),
    )


class Yard:
    def __init__(self, model: Path, directory: Path) -> None:
        self.states: list[str] = []
        self.fleet = Fleet(
            settings_of(model),
            node_id="n0",
            log_directory=directory,
            publish=self._publish,
            frozen="judge",
            version=VERSION,
        )

    async def _publish(self, server: ServerHandle) -> None:
        self.states.append(server.fence or server.version)


@asynccontextmanager
async def serving(model: Path, directory: Path) -> AsyncIterator[tuple[Yard, InferenceClient]]:
    yard = Yard(model, directory)
    with anyio.fail_after(300):
        async with (
            InferenceClient(yard.fleet.pool, settings_of(model).inference, max_streams=8, vocab_size=1 << 20) as client,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(yard.fleet.run)
            yield yard, client
            tasks.cancel_scope.cancel()


async def only_server(pool: ServerPool) -> ServerHandle:
    await pool.wait_serviceable()
    (server,) = pool.servers.values()
    return server


def process_of(server: ServerHandle) -> int:
    """Return the process that listens where the server does."""
    port = server.url.rpartition(":")[2]
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if words[1:3] == [b"-m", b"areal_async.inference.embedded"] and port.encode() in words:
            return int(entry.name)
    raise AssertionError(f"nobody serves at {server.url}")


@pytest.mark.timeout(400)
async def test_frozen_server_that_is_killed_in_an_answer_returns_with_its_own_weights_and_no_token_is_lost(
    models: list[Path], tmp_path: Path
) -> None:
    long = {**GREEDY, "max_new_tokens": 300}
    turns: list[Turn] = []
    async with serving(models[0], tmp_path) as (yard, client):
        server = await only_server(yard.fleet.pool)
        whole, _ = await client.generate(PROMPT, long)
        yard.fleet.target.announce(WeightsVersion(version="1-5", path=str(models[1])))
        incarnation = server.incarnation
        seen = anyio.Event()

        async def generate() -> None:
            turns.append((await client.generate(PROMPT, long, on_tokens=lambda _: seen.set()))[0])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate)
            await seen.wait()
            os.kill(process_of(server), signal.SIGKILL)
        after, _ = await client.generate(PROMPT, GREEDY)
        held = await ServerApi(client.administration, server.url).weight_version(deadline_s=100)
        by_others = await client.administration.post(f"{server.url}/pause_generation", json={})
        await ServerApi(client.administration, server.url, admin_key=server.admin_key).resume(deadline_s=100)

    assert server.id == "n0-judge_0", "what follows the last dash is no part of the node's id"
    assert server.incarnation != incarnation, "it was to be another process"
    assert {yard.states[1], yard.states[-1]} == {VERSION}
    assert held == VERSION
    assert by_others.status_code == 401
    assert [(turn.output_ids, turn.oldest) for turn in turns] == [(whole.output_ids, VERSION)]
    assert (after.output_ids, after.oldest) == (whole.output_ids[: GREEDY["max_new_tokens"]], VERSION)
