"""Weights on one GPU reach SGLang on another by a broadcast of nccl's, bucket by bucket, and it serves them."""

from pathlib import Path

import pytest
import torch

from areal_async.config.settings import InferenceSettings
from areal_async.inference.commands import nccl_environment
from areal_async.inference.weight_group import GLOO, NCCL
from areal_async.launch.interpreters import _check_nccl
from tests.gpu import servers
from tests.gpu.machine import DEVICE, device, report
from tests.unit.inference.broadcasting import Trainer
from tests.unit.inference.embedded_engine import prompt_of, reference_logprobs

TOLERANCE = 0.05
"""Largest difference of a logprob, bfloat16 beside float32; other weights differ by whole units."""


def test_sglang_serves_what_nccl_brought_it(models: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in nccl_environment(InferenceSettings(weight_transfer="distributed")).items():
        monkeypatch.setenv(name, value)  # for the server too
    if DEVICE == "cuda":  # two versions do not meet, and say less of it
        _check_nccl(servers.settings_of(models[0]))
    server = servers.start(models[0], servers.SMALL)
    backend = NCCL if DEVICE == "cuda" else GLOO
    trainer = Trainer(server, "gpu-1-1", backend=backend, device=device(1), deadline_s=200.0)
    try:
        trainer.join()
        for model, version in ((models[1], "0-1"), (models[0], "0-2")):
            server.post("/pause_generation", mode="retract")
            trainer.send(model, version)
            server.post("/continue_generation")

            prompt = prompt_of(12, seed=3)
            answer = server.generate(prompt, max_new_tokens=30)
            logprobs = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
            expected = torch.tensor(reference_logprobs(model, prompt, answer["output_ids"]))
            gap = float((logprobs - expected).abs().max())
            report(f"version {version} by {backend}: largest difference of a logprob {gap:.1e}")
            assert answer["meta_info"]["weight_version"] == version
            assert gap < TOLERANCE
    finally:
        trainer.close()
        server.close()
