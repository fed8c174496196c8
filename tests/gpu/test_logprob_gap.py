"""Trainer and server score the same tokens of a real model alike, in the type that both are run in.

The model is ``GPU_HOUR_MODEL``, a folder, or the one named below from the hub.
"""

import os
from pathlib import Path

import numpy as np
import torch

from areal_async.config.settings import AlgorithmSettings, ModelSettings, RolloutSettings, Settings, TrainerSettings
from areal_async.trainer.engine.parallel.ranks import joined_ranks
from areal_async.trainer.engine.policy import FsdpEngine
from areal_async.trainer.packing.rows import TrainRow
from tests.gpu import servers
from tests.gpu.machine import DEVICE, HALF, report

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
TOLERANCE = 0.02
"""Mean absolute difference, natural logarithm."""
PROMPTS = ("The capital of France is", "To solve 3x + 5 = 20, first", "def fibonacci(n):", "Once upon a time")
NEW_TOKENS = 256 if DEVICE == "cuda" else 16


def test_trainer_and_server_agree_on_the_logprobs_of_a_real_model() -> None:
    folder = _folder(os.environ.get("GPU_HOUR_MODEL", MODEL))
    rows = _sampled(folder)
    settings = Settings(
        model=ModelSettings(path=str(folder), dtype=HALF if DEVICE == "cuda" else "float32"),
        algorithm=AlgorithmSettings(decoupled=False),
        rollout=RolloutSettings(max_staleness=0),
        trainer=TrainerSettings(token_budget=4096),
    )

    with joined_ranks(deadline_s=300.0) as ranks:
        scored = FsdpEngine.for_run(settings, ranks).logprobs(rows)

    gaps = torch.cat(
        [
            (ours.cpu() - torch.from_numpy(row.behave_logprobs))[-NEW_TOKENS:].abs()
            for ours, row in zip(scored, rows, strict=True)
        ]
    )
    report(f"{folder.name}: mean |trainer - server| {gaps.mean():.4f}, largest {gaps.max():.3f}, {len(gaps)} tokens")
    assert float(gaps.mean()) < TOLERANCE


def _folder(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt"]))


def _sampled(folder: Path) -> list[TrainRow]:
    """Return answers of the server with its logprobs; it has ended then, so one GPU is enough."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    server = servers.start(folder)
    rows = []
    try:
        for index, text in enumerate(PROMPTS):
            prompt = tokenizer(text)["input_ids"]
            answer = server.generate(prompt, max_new_tokens=NEW_TOKENS)
            logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
            ids = [*prompt, *answer["output_ids"]]
            mask = np.arange(len(ids)) >= len(prompt)
            behave = np.concatenate([np.zeros(len(prompt)), logprobs]).astype(np.float32)
            rows.append(
                TrainRow(
                    token_ids=np.array(ids, np.int32), loss_mask=mask, behave_logprobs=behave, advantage=1.0,
                    current_mask=mask, index=index,
                )
            )  # fmt: skip
    finally:
        server.close()
    return rows
