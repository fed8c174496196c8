"""The ranks of one trainer: how they find each other, and what they say besides tensors.

Control collectives (every method of ``Ranks`` but ``reduce``) run over a gloo group of their own, so they may be
called from another thread while the engine trains; all ranks call them in the same order among themselves.
Bytes travel as bytes: nothing is pickled.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from areal_async.errors import PipelineError, leaves_of
from areal_async.process.device import own_device
from areal_async.process.host import RENDEZVOUS, interface_towards

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Names the network interface of gloo's groups; a user's own stands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """This process among its peers. Make it with ``joined_ranks``."""

    rank: int
    size: int
    device: torch.device
    deadline_s: float
    """Seconds that any one collective may take."""
    control: dist.ProcessGroup
    tensors: dist.ProcessGroup | None = None
    """Group of the collectives on tensors; None takes the default one."""

    def all_agree(self, flag: bool) -> bool:
        """Return whether every rank passed True."""
        votes = torch.tensor([int(flag)])
        dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self.control)
        return bool(votes.item())

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Return rank 0's bytes on every rank; the others pass None.

        Raises:
            ValueError: rank 0 passed None.
        """
        if self.rank == 0 and payload is None:
            raise ValueError("broadcast: got None on rank 0, need the bytes to send")
        length = torch.tensor([len(payload or b"")])
        dist.broadcast(length, group_src=0, group=self.control)
        buffer = _to_tensor(payload or b"", int(length.item()))
        dist.broadcast(buffer, group_src=0, group=self.control)
        return buffer.numpy().tobytes()

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Return every rank's bytes, by rank, on every rank."""
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(payload)]), group=self.control)
        counts = [int(length.item()) for length in lengths]
        own = _to_tensor(payload, max(counts))
        buffers = [torch.empty_like(own) for _ in counts]
        dist.all_gather(buffers, own, group=self.control)
        return [buffer[:count].numpy().tobytes() for buffer, count in zip(buffers, counts, strict=True)]

    def gather_entries(self, entries: Mapping[str, str]) -> dict[str, str]:
        """Return the entries of every rank, the lowest's first, on every rank."""
        parts = self.gather_bytes(json.dumps(dict(entries)).encode())
        return {key: value for part in parts for key, value in json.loads(part).items()}

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Have every rank know at the end of the block whether all could do their parts. A collective.

        Args:
            what: failed if one could not.

        Raises:
            PipelineError: an operating system's or a pipeline's error on some rank; raised on every rank.
        """
        error: OSError | PipelineError | None = None
        try:
            yield
        except (OSError, PipelineError) as exc:
            error = exc
        if not self.all_agree(error is None):
            reason = f"{type(error).__name__}: {error}" if error else "another rank says why"
            raise PipelineError(f"{what}: {reason}") from error

    def reduce(self, values_N: torch.Tensor, op: "dist.ReduceOp.RedOpType") -> torch.Tensor:
        """Return the values reduced over the ranks; for the thread that trains."""
        if self.size > 1:
            dist.all_reduce(values_N, op=op, group=self.tensors)
        return values_N

    def sums(self, values: Sequence[float]) -> list[float]:
        """Return each of these values added up over the ranks, in float64; for the thread that trains."""
        added: list[float] = self.reduce(
            torch.tensor(values, dtype=torch.float64, device=self.device), dist.ReduceOp.SUM
        ).tolist()
        return added

    def largest(self, value: int) -> int:
        """Return the largest that any rank passed; for the thread that trains."""
        return int(self.reduce(torch.tensor([value], device=self.device), dist.ReduceOp.MAX).item())

    def with_tensor_group(self) -> "Ranks":
        """Return the same ranks with a group of their own for tensors. A collective, of all ranks in the same order.

        A model whose calls run in a thread of their own needs it: collectives of one group must not overtake each
        other, and two threads keep no order.
        """
        return replace(self, tensors=dist.new_group(timeout=timedelta(seconds=self.deadline_s)))

    def with_control_group(self) -> "Ranks":
        """Return the same ranks with a control group of their own. A collective, of all ranks in the same order.

        For a thread that speaks to its peers while others do: as with tensors, one group keeps one thread's order.
        """
        return replace(self, control=dist.new_group(backend="gloo", timeout=timedelta(seconds=self.deadline_s)))


def is_of_peers(error: BaseException) -> bool:
    """Say whether a collective has failed, for want of a peer: what went wrong, if anything did, is its to tell."""
    leaves = leaves_of(error)
    return any(isinstance(one, dist.DistError) or (type(one) is RuntimeError and "gloo" in str(one)) for one in leaves)


def ranks_started() -> int:
    """Return how many ranks the environment names, as torchrun does."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def joined_ranks(*, deadline_s: float, num_threads: int = 1) -> Iterator[Ranks]:
    """Join the ranks that the environment names as torchrun does, or stand alone, for as long as the block runs.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, and ``RENDEZVOUS``, which torchrun does not set. Takes
    this rank's GPU where there is one. A rank whose block fails has to end its process at once, as the command line
    does (``areal_async.__main__``).

    Args:
        deadline_s: how long the start, and afterwards any one collective, may take.
        num_threads: CPU threads of this process where there is no GPU.

    Raises:
        UserError: this rank was given GPUs that torch does not see.
        PipelineError: the peers did not come together before the deadline.
    """
    rank, size = int(os.environ.get("RANK", "0")), ranks_started()
    device = own_device(int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(num_threads)
    deadline = timedelta(seconds=deadline_s)
    if size > 1:
        _choose_interface()
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            rank=rank,
            world_size=size,
            timeout=deadline,
            store=_store(rank, size, deadline),
        )
        control = dist.new_group(backend="gloo", timeout=deadline)
    except (RuntimeError, ValueError) as exc:
        raise PipelineError(f"trainer rank {rank} of {size}: could not join its peers: {exc}") from exc
    is_whole = False
    try:
        yield Ranks(rank=rank, size=size, device=device, deadline_s=deadline_s, control=control)
        is_whole = True
    finally:
        # A rank that has failed leaves its groups to the end of its process: nccl's would wait here for the peers, who
        # wait for this rank.
        if is_whole or size == 1:
            dist.destroy_process_group()


def _store(rank: int, size: int, deadline: timedelta) -> dist.Store | None:
    """Return where the ranks of this start meet, and no others: one that was cut off may come when it is replaced.

    None where torchrun has made one.
    """
    if size == 1:
        return dist.HashStore()  # needs neither a port nor an environment
    if (start := os.environ.get(RENDEZVOUS)) is None:
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # Nobody is counted: who comes late may be of an older start.
    store = dist.TCPStore(address, port, size, is_master=rank == 0, timeout=deadline, wait_for_workers=False)
    return dist.PrefixStore(start, store)


def _choose_interface() -> None:
    """Have gloo listen where rank 0 is reached: left to itself it asks what this host's name resolves to."""
    interface = interface_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if interface is not None:
        os.environ.setdefault(GLOO_INTERFACE, interface)


def _to_tensor(payload: bytes, length: int) -> torch.Tensor:
    """Copy the bytes into a tensor of ``length`` >= len(payload)."""
    buffer = torch.zeros(length, dtype=torch.uint8)
    if payload:
        buffer[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return buffer
