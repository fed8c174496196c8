"""A score is asked for until a server gives it; what none can score is refused with its cause, and never made up."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from areal_async.config.settings import InferenceSettings, ModelSettings, Settings
from areal_async.errors import GenerationError, UserError
from areal_async.inference.embedded.engine.options import EngineOptions
from areal_async.inference.embedded.engine.runner import load_runner
from areal_async.inference.pool import ServerHandle, ServerPool
from areal_async.inference.scoring import ScoringClient
from areal_async.inference.supervision.fleet import Fleet
from tests.fakes.fake_sglang import FakeSglang
from tests.unit.inference.test_frozen_fleet import only_server, process_of

pytestmark = pytest.mark.anyio

GOOD = {"embedding": [0.25], "meta_info": {}}


@asynccontextmanager
async def client_of(*servers: FakeSglang, **settings: Any) -> AsyncIterator[ScoringClient]:
    async with AsyncExitStack() as stack:
        pool = ServerPool([f"s{index}" for index in range(len(servers))], deadline_s=60)
        for known, server in zip(pool.servers.values(), servers, strict=True):
            await stack.enter_async_context(server)
            pool.admit(known, url=server.url, version=server.version)
        client = ScoringClient(pool, InferenceSettings(**settings), max_requests=16, vocab_size=10)
        yield await stack.enter_async_context(client)


def answering(status: int, body: dict[str, Any]) -> FakeSglang:
    server = FakeSglang()
    server.failing["/classify"] = (status, body)
    return server


async def test_broken_server_is_doubted_and_the_score_is_had_from_another() -> None:
    broken, good = answering(500, {"error": {"message": "out of memory"}}), answering(200, GOOD)
    async with client_of(broken, good) as client:
        score = await client.score([1, 2])
        doubts = {server.id: server.doubt for server in client.pool.servers.values()}
        left = [(server.num_requests, server.outstanding_tokens) for server in client.pool.servers.values()]

    assert score == 0.25
    assert doubts == {"s0": "status 500: out of memory", "s1": ""}
    assert left == [(0, 0), (0, 0)], "places on both are given back"


async def test_silent_server_is_doubted_when_its_deadline_is_over() -> None:
    silent, good = FakeSglang(), answering(200, GOOD)
    silent.silent.add("/classify")
    async with client_of(silent, good, first_token_deadline_s=0.2) as client:
        score = await client.score([1, 2])

    assert score == 0.25
    assert client.pool.servers["s0"].doubt == "TimeoutError: no answer for 0.2 s"


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, {"error": {"message": "too long"}}, "score: refused with status 400: too long"),
        (200, {"embedding": [0.1, 0.2], "meta_info": {}}, "got 2 numbers from the model, need one"),
    ],
)
async def test_refusal_is_told_at_once_and_casts_no_doubt(status: int, body: dict[str, Any], message: str) -> None:
    async with client_of(answering(status, body)) as client:
        with pytest.raises(GenerationError, match=message):
            await client.score([1, 2])

        assert client.pool.servers["s0"].is_serviceable


async def test_answer_that_is_no_score_is_a_server_s_fault() -> None:
    odd, good = answering(200, {"embedding": [None], "meta_info": {}}), answering(200, GOOD)
    async with client_of(odd, good) as client:
        score = await client.score([1, 2])

    assert score == 0.25
    assert "need the embedding of one prompt" in client.pool.servers["s0"].doubt


@pytest.mark.parametrize("prompt_ids", [[], [1, 10], [-1]])
async def test_prompt_that_would_end_a_server_never_leaves(prompt_ids: list[int]) -> None:
    server = answering(200, GOOD)
    async with client_of(server) as client:
        with pytest.raises(GenerationError, match="prompt: got"):
            await client.score(prompt_ids)

    assert server.calls == []


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_model_that_only_generates_is_no_reward_model(models: list[Path]) -> None:
    options = EngineOptions(model_path=str(models[0]), device="cpu", is_embedding=True)

    with pytest.raises(UserError, match="1 tensors missing .* need a sequence classifier with its head"):
        load_runner(options, models[0])


@pytest.mark.timeout(400)
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})])
async def test_score_is_had_from_a_server_that_was_killed_and_came_back(models: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(models[0], num_labels=1).save_pretrained(folder)
    settings = Settings(
        model=ModelSettings(path=str(folder), dtype="float32"),
        inference=InferenceSettings(backend="embedded", start_deadline_s=240, flags=("--is-embedding",)),
    )

    async def publish(server: ServerHandle) -> None:
        pass

    fleet = Fleet(settings, node_id="n0", log_directory=tmp_path, publish=publish, frozen="taste")
    client = ScoringClient(fleet.pool, settings.inference, max_requests=8, vocab_size=258)
    with anyio.fail_after(300):
        async with client, anyio.create_task_group() as tasks:
            tasks.start_soon(fleet.run)
            server = await only_server(fleet.pool)
            before = await client.score([5, 6, 7])
            incarnation = server.incarnation
            os.kill(process_of(server), signal.SIGKILL)
            after = await client.score([5, 6, 7])
            tasks.cancel_scope.cancel()

    assert after == pytest.approx(before, abs=1e-6)
    assert server.incarnation != incarnation
    assert server.num_generated_tokens == 2, "a server that scores is not one that comes to nothing"
