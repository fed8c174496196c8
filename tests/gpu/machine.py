"""Where the tests of GPUs run, and what they share."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import torch

from tools.gpu_hour import DEVICE as VARIABLE
from tools.gpu_hour import FIGURE

ROOT = Path(__file__).parents[2]
DEVICE: Literal["cuda", "cpu"] = "cpu" if os.environ.get(VARIABLE) == "cpu" else "cuda"
HALF: Literal["bfloat16"] = "bfloat16"


def device(index: int = 0) -> torch.device:
    """Return one of the machine's GPUs, or in a rehearsal the CPU."""
    return torch.device(DEVICE, index) if DEVICE == "cuda" else torch.device("cpu")


def report(figure: str) -> None:
    """Print a figure for the report."""
    print(f"\n{FIGURE}{figure}")


def run_tool(*words: str, deadline_s: float, on_cpu: bool = False) -> str:
    """Run a module of Python's and return what it wrote; it must succeed."""
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if on_cpu or DEVICE == "cpu" else {})
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, env=environment, timeout=deadline_s, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout
