"""The real SGLang on one GPU, started by our own command line, or in a rehearsal on the CPU."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from areal_async.config.settings import InferenceSettings, ModelSettings, Settings
from areal_async.inference.commands import server_command
from areal_async.process.parent_death import guarded
from tests.gpu.machine import DEVICE, HALF
from tests.unit.inference.embedded_engine import Server
from tools.gpu_hour import sglang_python

SMALL = ("--attention-backend", "triton", "--max-total-tokens", "65536")
"""For a tiny model: what attends with its heads, where SGLang's own choice wants those of real ones; and no cache of
hundreds of millions of its tokens, whose places alone take gigabytes."""


def settings_of(model: Path, *flags: str) -> Settings:
    """Return the settings of a run of this model with SGLang."""
    python = sglang_python()
    assert python is not None
    return Settings(
        model=ModelSettings(path=str(model), dtype=HALF if DEVICE == "cuda" else "float32"),
        inference=InferenceSettings(backend="sglang", python=Path(python), stream_interval=1, flags=flags),
    )


class SglangOnDevice(Server):
    """SGLang on the first GPU, in bfloat16; in a rehearsal in float32 on the CPU."""

    def start(self, model_path: Path, port: int, *flags: str) -> "subprocess.Popen[bytes]":
        command = server_command(settings_of(model_path, *flags), server_id="gpu", index=0)
        return subprocess.Popen(guarded(command.on_port(port)), env={**os.environ, **command.environment})


def start(model: Path, flags: Sequence[str] = ()) -> SglangOnDevice:
    """Start a server; with ``flags`` where it is on a GPU."""
    return SglangOnDevice(model, *(flags if DEVICE == "cuda" else ()))
