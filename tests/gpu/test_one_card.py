"""A run whose server and trainer share one GPU trains its steps, and has kept its promises."""

import json
from pathlib import Path

import pytest

from areal_async.process.host import visible_gpus
from tests.gpu.machine import DEVICE, run_tool
from tests.gpu.servers import SMALL
from tools.gpu_hour import sglang_python


def test_a_run_on_one_card_trains_and_keeps_its_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "--config", "configs/gsm8k_cpu.yaml", "--run.directory", str(tmp_path), "--run.name", "one", "--run.steps", "2",
        "--eval.every_steps", "0", "--rollout.batch_groups", "4", "--inference.colocate", "release",
    ]  # fmt: skip
    if DEVICE == "cuda":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible_gpus()[0])
        words += ["--model.dtype", "bfloat16", "--inference.backend", "sglang"]
        words += ["--inference.python", str(sglang_python()), "--inference.flags", json.dumps(SMALL)]

    run_tool("areal_async", "run", "workflows/gsm8k.py", *words, deadline_s=800.0)

    run_tool("areal_async", "doctor", "--run", str(tmp_path / "one"), deadline_s=100.0)
