"""The server that sleeps shows what a real one would: the checksums of what it loaded, and who made which token.

It takes the time that it is told to.
"""

import asyncio
import hashlib
import json
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file

from tools.sleeping_server import Pace, SleepingServer, checksums, spans


def test_checksums_are_those_of_the_tensors_bytes(tmp_path: Path) -> None:
    tensors = {"b": torch.arange(6, dtype=torch.bfloat16), "a": torch.ones(2, 3)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    expected = {
        name: hashlib.sha256(one.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, one in tensors.items()
    }
    assert checksums(tmp_path) == expected


def test_spans_cover_every_token_once() -> None:
    assert spans(["1-0", "1-0", "1-2", "1-2", "1-2"]) == [
        {"version": "1-0", "start": 0, "end": 2},
        {"version": "1-2", "start": 2, "end": 5},
    ]
    assert spans([]) == []


def test_a_step_takes_longer_with_more_in_it_and_more_to_prefill() -> None:
    pace = Pace(step_s=0.01, request_s=0.001, prefill_s=0.0001, event_tokens=8)
    assert pace.seconds(2, 0) == pytest.approx(8 * 0.012)
    assert pace.seconds(4, 100) == pytest.approx(8 * 0.014 + 0.01)


@pytest.mark.anyio
async def test_all_go_on_together_and_what_came_meanwhile_is_prefilled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[tuple[int, int]] = []
    monkeypatch.setattr(Pace, "seconds", lambda self, *loaded: slept.append(loaded) or 0.02)
    server = SleepingServer(version="1-3", name="paced", pace=Pace(event_tokens=4))
    async with server, httpx.AsyncClient(base_url=server.url) as client, asyncio.TaskGroup() as tasks:
        stepping = tasks.create_task(server.step())
        ask = {"input_ids": [7] * 30, "sampling_params": {"max_new_tokens": 10}}
        replies = await asyncio.gather(*(client.post("/generate", json=ask) for _ in range(3)))
        stepping.cancel()

    for reply in replies:
        said = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        assert [len(event["output_ids"]) for event in said] == [4, 4, 2]
        assert said[-1]["meta_info"]["weight_versions"] == [{"version": "1-3", "start": 0, "end": 10}]
    assert len(slept) >= len(said), "an event was not waited for"
    assert sum(num_prefilled for _, num_prefilled in slept) == 90
    assert max(num_requests for num_requests, _ in slept) == 3
