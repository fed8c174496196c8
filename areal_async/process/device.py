"""The device that a process computes on: a GPU that it was given, the CPU where it was given none."""

from typing import TYPE_CHECKING

from areal_async.errors import UserError
from areal_async.process.host import MIG, visible_gpus

if TYPE_CHECKING:
    import torch


def own_device(index: int = 0) -> "torch.device":
    """Return number ``index`` of the GPUs that this process may use, or the CPU where it may use none.

    Raises:
        UserError: torch sees fewer than there are, or than ``index`` needs. Nothing meant for a GPU runs on a CPU.
    """
    import torch  # not for those who only ask what a host has

    num_seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index < num_seen:
        return torch.device("cuda", index)
    gpus = visible_gpus()
    if not gpus and not num_seen:
        return torch.device("cpu")
    raise UserError(unseen_gpus("this process", gpus, torch=torch.__version__, num_seen=num_seen, need=index + 1))


def unseen_gpus(who: str, gpus: tuple[str, ...], *, torch: str, num_seen: int, need: int) -> str:
    """Return the sentence for a process whose torch does not see the GPUs that it was given."""
    saw = f"{who}: got GPUs {','.join(gpus)}, of which torch {torch} sees {num_seen}, need {need}"
    if num_seen and any(name.startswith(MIG) for name in gpus):
        return (
            f"{saw}: a process has one MIG device, whichever it is given; have one rank on a host (trainer.num_ranks) "
            "and inference.tensor_parallel=1, or switch MIG off"
        )
    return (
        f"{saw}; install a build of torch for the CUDA of this driver (nvidia-smi names it), or set "
        "CUDA_VISIBLE_DEVICES= to run on the CPU"
    )
