"""A server's prefix cache never serves a new prompt from old weights, whatever mode the weights were swapped in."""

from pathlib import Path

import anyio
import pytest

from areal_async.inference.http import ServerApi
from areal_async.inference.supervision.swap import swap as in_place
from areal_async.protocol.types import WeightsVersion
from tests.sglang.test_client import client_of
from tests.sglang.test_contract import LONG, assert_scored_by, swap
from tests.unit.inference.embedded_engine import Server, body, prompt_of

pytestmark = pytest.mark.timeout(900)

PROMPT = prompt_of(200, seed=7)


def scored(server: Server, model: Path, **fields: str) -> int:
    """Answer the prompt, hold every logprob against the model's forward pass, and return the tokens found cached."""
    answer = server.post("/generate", **body(PROMPT, max_new_tokens=8), **fields).json()
    logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert_scored_by(model, PROMPT, answer["output_ids"], logprobs, slice(None))
    return int(answer["meta_info"]["cached_tokens"])


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_a_swap_that_interrupts_requests_leaves_nothing_cached(server: Server, models: list[Path], mode: str) -> None:
    scored(server, models[0])
    swap(server, models[1], "0-1", mode=mode)

    assert scored(server, models[1]) == 0


def test_after_an_in_place_swap_a_prompt_salted_with_the_new_version_is_not_served_from_the_old_cache(
    server: Server, models: list[Path]
) -> None:
    """The requests that are held keep the cache in use, so that it cannot be flushed."""
    scored(server, models[0], cache_salt="0-0")
    with server.stream(prompt_of(10), max_new_tokens=LONG) as held:
        held.read(3)
        swap(server, models[1], "0-1", mode="in_place")

        assert scored(server, models[1], cache_salt="0-1") == 0


@pytest.mark.parametrize("shared_server", [pytest.param("sglang", marks=pytest.mark.sglang)], indirect=True)
def test_without_the_salt_it_would_be(server: Server, models: list[Path]) -> None:
    """Shows that the test above can fail; the embedded engine caches no prefixes."""
    scored(server, models[0])
    with server.stream(prompt_of(10), max_new_tokens=LONG) as held:
        held.read(3)
        swap(server, models[1], "0-1", mode="in_place")

        with pytest.raises(AssertionError, match="Tensor-likes are not close"):
            scored(server, models[1])


@pytest.mark.anyio
async def test_the_client_salts_what_it_sends_with_the_version(server: Server, models: list[Path]) -> None:
    params = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    async with client_of(server) as client:
        known = client.pool.servers["s0"]
        await client.generate(PROMPT, params)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.generate, prompt_of(10), {**params, "max_new_tokens": LONG})
            while known.num_generated_tokens < 20:  # noqa: ASYNC110 -- a counter has no event
                await anyio.sleep(0.01)
            target = WeightsVersion(version="0-1", path=str(models[1]))
            await in_place(ServerApi(client.administration, known.url), target, mode="in_place", deadline_s=60)
            client.pool.admit(known, url=known.url, version="0-1")
            turn, _ = await client.generate(PROMPT, params)

    assert_scored_by(models[1], PROMPT, turn.output_ids, turn.logprobs, slice(None))
