"""A decoder's layers as torch compiles them (``trainer.compile``), and whether this host can.

A layer becomes four graphs: before its attention module, in that before and after attention itself, and behind it.
What attention does depends on how long a row's documents are, so it stays outside (``attention``): the graphs take
rows of any lengths, and all layers of one kind share them. Passes without gradients have graphs of their own.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from areal_async.errors import UserError

BACKEND = "inductor"
"""What makes kernels of graphs: torch's default."""
MAX_GRAPHS = 64
"""Of one place in a layer, over all models of a process that have it: by kind of layer and width, with gradients and
without, with adapters and without. What comes beyond runs uncompiled. torch's own bound is 8."""


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Have these compiled when they first run. Before they are sharded: FSDP's hooks stay around the graphs."""
    for layer in layers:
        layer.forward = _compiled(layer.forward)


def check_compiler(device: torch.device | None = None) -> str:
    """Compile something small for this device, and say what did: seconds, the first time on a host.

    Args:
        device: None takes a GPU where there is one.

    Raises:
        UserError: it cannot be done here.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        _compiled(torch.cos)(torch.ones(8, device=device))
    except (RuntimeError, TypeError, OSError, ImportError) as exc:  # TypeError: an older torch knows no limit to set
        told = [line.strip() for line in str(exc).splitlines()]
        lines = [line for line in told if line and not line.endswith(" raised:")] or [type(exc).__name__]
        reason = next((line for line in lines if "error" in line.lower()), lines[0])
        raise UserError(
            f"trainer.compile: got true where torch {torch.__version__} cannot compile ({reason}), need torch 2.13 "
            "with a compiler it can use: g++ and Python's headers, on a GPU triton too; install them, or set it to "
            "false"
        ) from exc
    return f"torch {torch.__version__} compiles for this {device.type.upper()}"


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    make: Any = torch.compile  # its types lack the limit
    compiled: Callable[..., Any] = make(function, dynamic=True, backend=BACKEND, recompile_limit=MAX_GRAPHS)
    return compiled
