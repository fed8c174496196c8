"""AdamW and its learning rate, the latter a pure function of the training step."""

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from areal_async.config.settings import TrainerSettings


def learning_rate(step: int, *, total_steps: int, trainer: TrainerSettings) -> float:
    """Return the rate of training step ``step``, which counts from 1.

    It rises evenly over ``warmup_steps``; the first step after them has the peak. A falling schedule would reach
    0 one step after the last, so every step learns.
    """
    if step <= trainer.warmup_steps:
        return trainer.lr * step / trainer.warmup_steps
    done = min((step - 1 - trainer.warmup_steps) / max(total_steps - trainer.warmup_steps, 1), 1.0)
    match trainer.schedule:
        case "constant":
            return trainer.lr
        case "linear":
            return trainer.lr * (1.0 - done)
        case "cosine":
            return trainer.lr * 0.5 * (1.0 + math.cos(math.pi * done))


def make_optimizer(parameters: Iterable[nn.Parameter], trainer: TrainerSettings) -> torch.optim.AdamW:
    """Return AdamW in its fused form, with weight decay on matrices only."""
    # The fused form takes tensors of one mesh at a time.
    groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((parameter.ndim > 1, mesh), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": members, "weight_decay": trainer.weight_decay if is_matrix else 0.0}
            for (is_matrix, _), members in groups.items()
        ],
        lr=trainer.lr,
        betas=trainer.betas,
        eps=trainer.eps,
        fused=True,
    )
