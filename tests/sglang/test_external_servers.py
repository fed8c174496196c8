"""Both servers, started by our own command line, are such as ``try --server`` takes."""

from pathlib import Path

import pytest

from areal_async.config.settings import Settings
from areal_async.inference.client import InferenceClient
from areal_async.inference.external_servers import visited_servers
from tests.unit.inference.embedded_engine import Server, prompt_of

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]  # of which the start of a server takes most, once


async def test_a_server_that_runs_is_asked_what_it_is_and_streams_what_it_says(
    server: Server, models: list[Path], tmp_path: Path
) -> None:
    settings = Settings()
    params = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    url = str(server.http.base_url)

    async with (
        visited_servers(settings, [url], log_path=tmp_path / "log") as (pool, (fact,)),
        InferenceClient(pool, settings.inference, max_streams=4, vocab_size=1 << 20) as client,
    ):
        turn, _ = await client.generate(prompt_of(6), params)

    assert fact.version == "0-0"
    assert fact.tokenizer_path == str(models[0])
    assert turn.output_ids == server.generate(prompt_of(6), **params)["output_ids"]
    assert [(span.version, span.start, span.end) for span in turn.spans] == [("0-0", 0, 12)]
