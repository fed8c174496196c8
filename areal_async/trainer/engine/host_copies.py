"""Copies in host memory of what lies on a GPU: where they go, and how they get there beside the GPU's other work.

A copy that is kept, of a version or of a checkpoint, is itself pinned and filled again and again. The GPU then writes
straight into it, which a GPU can do while it gathers, computes and sends. Two pinned buffers of a bucket's size would
pin less, but the processor would have to empty them into memory that is new each time, page by page, and a step waits
for that. On a CPU the same memory is not pinned, and a copy is done when it is started.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

ALIGNMENT_BYTES = 64
"""Of each copy; no type of number needs more."""


def make_copies(like: Mapping[str, Tensor], *, is_pinned: bool) -> dict[str, Tensor]:
    """Return uninitialised tensors like these, which may be on ``meta``, in host memory, cut from one buffer.

    torch's allocator of pinned memory rounds each size up to a power of two, which would take up to twice as much. Each
    has a storage of its own size: DCP clones what is part of a larger one, and keeps all clones until it has written
    the last.

    Args:
        is_pinned: they last as long as the process, or until ``unpin_copies``.
    """
    sizes = [-(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for tensor in like.values()]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8)
    if is_pinned and buffer.nbytes:
        pin_memory(buffer.data_ptr(), buffer.nbytes)
    return {
        name: _like(tensor, part[: tensor.nbytes])
        for (name, tensor), part in zip(like.items(), buffer.split(sizes), strict=True)
    }


def unpin_copies(copies: Mapping[str, Tensor]) -> None:
    """Have pinned copies be ordinary memory again, which goes with the last of them."""
    if starts := [copy.data_ptr() for copy in copies.values() if copy.nbytes]:
        unpin_memory(starts[0])  # the first that is not empty stands where the buffer begins


class SideCopies:
    """Copies from one device to host memory, on a stream of their own: one lot on its way at a time.

    Invariants: what is copied is neither freed nor counted as copied before the GPU is done with it; at most one lot is
    held for that.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._sources: list[Tensor] = []

    def start(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        """Copy a lot, once the one before has arrived; the sources must not change until ``finish``."""
        self.finish()
        if not sources:
            return
        if self._stream is None:
            torch._foreach_copy_(targets, sources)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # which makes the sources
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)
        self._sources = sources

    def finish(self) -> None:
        """Wait until what was started is there, and let go of its sources."""
        if self._stream is not None:
            self._stream.synchronize()
        self._sources = []


def _like(tensor: Tensor, part: Tensor) -> Tensor:
    if not part.nbytes:  # of a rank beyond a parameter's rows; NumPy gives its array strides that torch cannot view
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return torch.from_numpy(part.numpy()).view(tensor.dtype).view(tensor.shape)
