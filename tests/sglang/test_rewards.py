"""What both servers promise of a reward model: the scores of transformers' own model, and refusals that say why."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from areal_async.config.settings import InferenceSettings, ModelSettings, PolicySettings, Settings
from areal_async.errors import GenerationError
from areal_async.rollout.frozen import serve_frozen
from areal_async.rollout.named_policies import FrozenReward
from tests.sglang.conftest import find_sglang

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

TINY = Path(__file__).parents[2] / "configs" / "models" / "tiny"
TOLERANCE = 1e-4
CONTEXT_LENGTH = 512


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}  # each test starts a server: once is enough


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a classifier of one label with a random head."""
    folder = tmp_path_factory.mktemp("reward")
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(TINY, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


def conversations() -> list[list[dict[str, str]]]:
    return [
        [{"role": "user", "content": f"What is {n}+{n}?"}, {"role": "assistant", "content": f"#### {n}" * (n % 5)}]
        for n in range(20)
    ]


def plain_scores(folder: Path) -> list[float]:
    """Return what transformers alone says of each conversation."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [
            model(**tokenizer.apply_chat_template(one, return_tensors="pt", return_dict=True)).logits.item()
            for one in conversations()
        ]


@asynccontextmanager
async def serving(backend: str, model: Path, directory: Path) -> AsyncIterator[FrozenReward]:
    settings = Settings(
        model=ModelSettings(dtype="float32"),
        policies={"taste": PolicySettings(kind="reward", path=str(model))},
        inference=InferenceSettings.model_validate(
            {"backend": backend, "python": find_sglang() if backend == "sglang" else None}
        ),
    )
    async with serve_frozen(settings, node_id="n0", log_directory=directory, max_streams=32) as frozen:
        taste = frozen["taste"]
        assert isinstance(taste, FrozenReward)
        yield taste


@pytest.mark.parametrize("backend", ["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
async def test_scores_are_the_trainers_and_a_refusal_says_why(backend: str, reward_model: Path, tmp_path: Path) -> None:
    scores: dict[int, float] = {}
    async with serving(backend, reward_model, tmp_path) as taste:

        async def score(number: int, messages: list[dict[str, str]]) -> None:
            scores[number] = await taste.score(messages)

        async with anyio.create_task_group() as tasks:
            for number, messages in enumerate(conversations()):
                tasks.start_soon(score, number, messages)
        with pytest.raises(GenerationError, match=r"refused with status 400: The input .* longer than the model's con"):
            await taste.score([{"role": "user", "content": "1 " * CONTEXT_LENGTH}])
        (server,) = taste.pool.servers.values()
        text = taste.codec.render(conversations()[3], for_reply=False)
        await check_route(server.url, prompt_ids=taste.codec.encode(text))

    assert [scores[number] for number in range(20)] == pytest.approx(plain_scores(reward_model), abs=TOLERANCE)
    assert len({round(score, 3) for score in scores.values()}) > 5, "else anything passes"


async def check_route(url: str, *, prompt_ids: list[int]) -> None:
    """Check the form of the answers themselves."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:

        async def post(**body: Any) -> httpx.Response:
            return await http.post("/classify", json=body)

        one = (await post(input_ids=prompt_ids, rid="mine")).json()
        batch = (await post(input_ids=[prompt_ids, prompt_ids[:5]])).json()
        longest = await post(input_ids=[5] * (CONTEXT_LENGTH - 1))
        malformed = await post(input_ids=["x"])
        info = (await http.get("/model_info")).json()
        health = await http.get("/health")

    assert set(one) == {"embedding", "meta_info"}
    meta = one["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["weight_version"]) == ("mine", len(prompt_ids), "0-0")
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert [len(answer["embedding"]) for answer in batch] == [1, 1]
    assert batch[0]["embedding"] == pytest.approx(one["embedding"], abs=TOLERANCE)
    assert batch[1]["embedding"] != pytest.approx(one["embedding"], abs=TOLERANCE)
    assert (longest.status_code, malformed.status_code, health.status_code) == (200, 400, 200)
    assert json.loads(malformed.content)["object"] == "error"
    assert info["is_generation"] is False
