"""Which GPUs there are, and who gets which. Without torch: the command line asks before anything heavy is loaded."""

import os
import shutil
import subprocess
from pathlib import Path

from areal_async.errors import UserError

PROBE_DEADLINE_S = 10.0


def visible_gpus() -> tuple[str, ...]:
    """Return the identifiers that ``CUDA_VISIBLE_DEVICES`` takes, honouring what it says now."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return tuple(name.strip() for name in allowed.split(",") if name.strip() not in ("", "-1"))
    devices = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    if devices:
        return tuple(sorted((name for name in devices if name.isdecimal()), key=int))
    return tuple(map(str, range(_count_by_driver())))


def _count_by_driver() -> int:
    """Ask the driver where there are no device files (WSL)."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        answer = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=PROBE_DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in answer.stdout.splitlines()) if answer.returncode == 0 else 0


def share_gpus(
    gpus: tuple[str, ...], *, num_inference: int, num_trainer: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the GPUs of the node and those of the trainer: apart where there are enough, else both see all.

    Raises:
        UserError: there are fewer GPUs than either side needs for itself.
    """
    if not gpus:
        return (), ()
    if num_trainer > len(gpus):
        raise UserError(
            f"trainer.num_ranks: got {num_trainer}, need at most {len(gpus)}, one per GPU; "
            "lower it, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    if num_inference > len(gpus):
        raise UserError(
            f"inference.num_servers x inference.tensor_parallel: got {num_inference} GPUs, need at most {len(gpus)}; "
            "lower one of them, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    if num_inference + num_trainer > len(gpus):
        return gpus, gpus
    return gpus[:num_inference], gpus[num_inference : num_inference + num_trainer]
