"""A real SGLang in which one request hangs for ever answers others, takes new weights from us, and is ended.

0.5.23 waits for ever for images that are not there. An update of the weights waits for that request, and everybody for
the update, unless the server was paused before; asked to end, it waits for the request too.
"""

import os
from pathlib import Path

import anyio
import httpx
import pytest

from areal_async.config.settings import InferenceSettings, ModelSettings, Settings
from tests.sglang.conftest import find_sglang
from tests.sglang.test_supervision import PARAMS, Yard, watching_log
from tests.unit.inference.embedded_engine import prompt_of
from tests.unit.inference.seeing_engine import SHOWN, build_seeing_model, expanded, png_of, shown_body

pytestmark = [pytest.mark.anyio, pytest.mark.sglang, pytest.mark.nightly, pytest.mark.timeout(1500)]

UPDATE_DEADLINE_S = 100.0


async def test_server_in_which_a_request_hangs_takes_the_next_weights_and_ends(tmp_path: Path) -> None:
    models = [build_seeing_model(tmp_path / f"m{seed}", seed=seed, family="qwen2_5_vl") for seed in range(2)]
    poison = shown_body(expanded(models[0], [5, *SHOWN, 6], [png_of(1)]), [png_of(1)], max_new_tokens=4)
    inference = InferenceSettings(
        backend="sglang", python=find_sglang(), stream_interval=1, start_deadline_s=UPDATE_DEADLINE_S
    )
    settings = Settings(model=ModelSettings(path=str(models[0]), dtype="float32"), inference=inference)
    yard = Yard(settings, tmp_path / "yard", models)

    async def update() -> None:
        yard.announce(1)

    with watching_log(yard):
        async with yard.client, anyio.create_task_group() as tasks:
            tasks.start_soon(yard.fleet.run)
            await yard.until(lambda: list(yard.fleet.pool.servers) == ["n0-0"])
            (server,) = await yard.until_all_hold(yard.announce(0))
            hung = server.url
            async with httpx.AsyncClient() as http:
                with pytest.raises(httpx.ReadTimeout):
                    await http.post(f"{hung}/generate", json=poison, timeout=10)
                await yard.client.generate(prompt_of(8), {**PARAMS, "max_new_tokens": 4})  # others are answered
                assert (await http.get(f"{hung}/health", timeout=60)).status_code == 200

            turns = await yard.generate_while(update, num_received=20)
            (server,) = await yard.until_all_hold("1-2")

            assert server.url == hung, "it was not started anew"
            assert all({span.version for span in turn.spans} == {"1-1", "1-2"} for _, turn in turns)
            tasks.cancel_scope.cancel()
    with pytest.raises(ProcessLookupError):
        os.kill(yard.pids["n0-0"], 0)
