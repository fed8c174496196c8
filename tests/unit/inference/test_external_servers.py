"""A server that somebody else runs is asked what it is before it is sent anything, and used as it is."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import anyio
import pytest

from areal_async.config.settings import InferenceSettings, ModelSettings, Settings
from areal_async.errors import GenerationError, UserError, leaves_of
from areal_async.inference.client import InferenceClient
from areal_async.inference.external_servers import ask, visited_servers
from areal_async.inference.http import make_client
from tests.unit.inference.embedded_engine import Server, prompt_of

pytestmark = pytest.mark.anyio


@contextmanager
def answering(answers: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Serve these routes and no other."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path)
            self.send_response(404 if answer is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(answer or {}).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def free() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


MODEL = {"weight_version": "3-4", "tokenizer_path": "/models/m"}
FLAGS = {"incremental_streaming_output": True, "context_length": 512}


async def test_a_server_is_known_by_what_it_says_of_itself() -> None:
    with answering({"/model_info": MODEL, "/server_info": FLAGS}) as url:
        async with make_client(max_connections=4) as client:
            assert await ask(client, f"{url}/") == (url, "3-4", "/models/m", 512)


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        ({"/v1/models": {"data": []}}, "a plain OpenAI endpoint gives no token ids"),
        (
            {"/model_info": MODEL, "/server_info": {"incremental_streaming_output": False}},
            "start it with --incremental",
        ),
        ({"/model_info": {**MODEL, "weight_version": "default"}, "/server_info": FLAGS}, "weight version 'default'"),
    ],
)
async def test_a_server_of_another_kind_is_refused_in_one_sentence(answers: Any, sentence: str) -> None:
    with answering(answers) as url:
        async with make_client(max_connections=4) as client:
            with pytest.raises(UserError, match=sentence) as refused:
                await ask(client, url)

    assert str(refused.value).startswith(f"server {url}: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("address", "sentence"), [(free, "cannot be reached: "), (lambda: "here:3", "is no address")])
async def test_nobody_there_is_told_in_one_sentence(address: Callable[[], str], sentence: str) -> None:
    async with make_client(max_connections=4) as client:
        with pytest.raises(UserError, match=f"server .*{sentence}"):
            await ask(client, address())


async def test_a_running_engine_is_used_and_left_as_it_was(server: Server, models: list[Path], tmp_path: Path) -> None:
    settings = Settings(model=ModelSettings(path=str(models[0]), dtype="float32"))
    url = str(server.http.base_url)
    params = {"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": True}

    async with (
        visited_servers(settings, [url], log_path=tmp_path / "log") as (pool, (fact,)),
        InferenceClient(pool, settings.inference, max_streams=4, vocab_size=1 << 20) as client,
    ):
        turn, _ = await client.generate(prompt_of(6), params)

    assert turn.output_ids == server.generate(prompt_of(6), **params)["output_ids"]
    assert Path(fact.tokenizer_path) == models[0]
    assert server.http.get("/model_info").json()["weight_version"] == fact.version == "0-0"
    assert not (tmp_path / "log").exists()


async def test_a_request_that_fails_once_does_not_end_the_use_of_a_server_that_is_well(
    server: Server, tmp_path: Path
) -> None:
    url = str(server.http.base_url)
    async with visited_servers(Settings(), [url], log_path=tmp_path / "log") as (pool, _):
        (one,) = pool.servers.values()
        pool.cast_doubt(one, "connection lost")
        with anyio.fail_after(60):
            await pool.wait_serviceable()


async def test_a_server_that_is_gone_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("areal_async.inference.external_servers.LOST_DEADLINE_S", 0.1)

    async def ask_it(url: str) -> None:
        async with visited_servers(Settings(), [url], log_path=tmp_path / "log") as (pool, _):
            (one,) = pool.servers.values()
            pool.fence(one, "ended with status -9: out of memory")
            async with InferenceClient(pool, InferenceSettings(), max_streams=1, vocab_size=1 << 20) as client:
                await client.generate([1], {"max_new_tokens": 1})

    with answering({"/model_info": MODEL, "/server_info": FLAGS}) as url, pytest.raises(ExceptionGroup) as failed:
        await ask_it(url)

    (error,) = leaves_of(failed.value)
    assert isinstance(error, GenerationError)
    assert "ended with status -9: out of memory" in str(error)
