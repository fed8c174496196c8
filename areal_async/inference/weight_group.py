"""The process group over which one trainer broadcasts weights to inference servers, and the shape of a broadcast.

Rank 0 hosts the store and sends; every other rank receives. The others may be servers of another make: the keys in the
store are those of a ``torch.distributed`` group that was made with ``group_name`` over ``tcp://address:port``, and a
bucket is its tensors' bytes, one after the other, in one tensor.

Invariants: no wait is longer than the group's deadline; a group that failed once is of no more use; when rank 0 closes
its group, nobody waits for it any longer.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Self

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from areal_async.process.daemon_thread import in_daemon_thread
from areal_async.protocol.types import TensorSpec

GLOO, NCCL = "gloo", "nccl"
_Gloo: Any = ProcessGroupGloo
"""As it is: torch's stubs have its options wrong."""

_NEVER = timedelta(days=7)
"""Deadline of NCCL's own: ours is kept here instead."""
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
"""A group made with it has no watchdog, which ends the whole process when a peer has gone; ``wait`` raises instead."""
_POLL_S = 0.001
_LOOK_S = 0.05
"""From one look whether rank 0 has closed its group to the next."""


class WeightGroupError(Exception):
    """The group did not come together, or broke: leave it and make another."""


class WeightGroup:
    """One rank's end of a group. For one thread at a time."""

    def __init__(self, store: TCPStore, *, rank: int, size: int, name: str, backend: str, deadline_s: float) -> None:
        self.port = store.port
        """Port of rank 0's store."""
        self.rank = rank
        self.size = size
        self.name = name
        self._kind = backend
        self._deadline_s = deadline_s
        self._store: TCPStore | None = store
        self._hosted: TCPStore | None = None
        self._backend: Any = None

    @classmethod
    def host(cls, *, address: str, size: int, name: str, backend: str, deadline_s: float) -> Self:
        """Be rank 0: listen at a free port of ``address`` at once. ``meet`` must follow.

        Raises:
            WeightGroupError: the address is not this host's.
        """
        _check_backend(backend)
        try:
            listening = socket.create_server((address, 0), family=_family(address))
        except OSError as exc:
            raise WeightGroupError(f"weight group {name}: cannot listen at {address}: {exc}") from exc
        port = listening.getsockname()[1]
        store = partial(TCPStore, address, port, size, timeout=timedelta(seconds=deadline_s))
        with _translated(f"weight group {name}: no store of its own at {address}:{port}"):
            hosted = store(is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
            # A client like the others', so that the store can be closed while this rank waits in it.
            client = store(is_master=False)
        group = cls(client, rank=0, size=size, name=name, backend=backend, deadline_s=deadline_s)
        group._hosted = hosted
        return group

    @classmethod
    def join(cls, *, address: str, port: int, rank: int, size: int, name: str, backend: str, deadline_s: float) -> Self:
        """Be another rank: find rank 0's store and meet the others.

        Raises:
            WeightGroupError: not all ranks came within the deadline, or rank 0 closed.
        """
        _check_backend(backend)
        with _translated(f"weight group {name}: rank {rank} found no store at {address}:{port}"):
            store = TCPStore(address, port, size, is_master=False, timeout=timedelta(seconds=deadline_s))
        group = cls(store, rank=rank, size=size, name=name, backend=backend, deadline_s=deadline_s)
        del store  # the group alone may keep it, so that closing the group closes it
        try:
            group.meet()
        except WeightGroupError:
            group.close()
            raise
        return group

    def meet(self) -> None:
        """Wait for the other ranks. NCCL meets in its first broadcast instead, under the same deadline.

        Raises:
            WeightGroupError: not all came within the deadline.
        """
        with _translated(f"weight group {self.name}: {self.size} ranks did not meet"):
            self._backend = self._open_nccl() if self._kind == NCCL else self._open_gloo()

    def broadcast(self, flat: torch.Tensor) -> None:
        """Send ``flat`` from rank 0, or fill it on another rank. It is there on return, on the device too.

        Raises:
            WeightGroupError: a rank is gone or late, or this group is closed.
        """
        if self._backend is None:
            raise WeightGroupError(f"weight group {self.name}: got a broadcast, need a group that met; join it first")
        with _translated(f"weight group {self.name}: a broadcast of {flat.nbytes} bytes broke"):
            if self._kind == NCCL:
                send = partial(_broadcast_nccl, self._backend, flat, torch.cuda.current_stream(flat.device))
                _run_within(self._deadline_s, send, is_over=self._is_over)
            else:
                _start_broadcast(self._backend, flat).wait()

    def close(self) -> None:
        """Leave the group; ranks that wait for this one raise. Closing twice is no error."""
        backend, self._backend = self._backend, None
        if self._kind == NCCL and backend is not None:
            # Aborting may itself wait for a peer that is gone.
            with contextlib.suppress(WeightGroupError, RuntimeError):
                _run_within(self._deadline_s, backend.abort)
        del backend  # its connections end with the last reference
        self._store = None
        self.close_store()

    def close_store(self) -> None:
        """Have rank 0 and all that still meet in its store raise. From any thread; ``close`` must follow."""
        self._hosted = None

    def _open_gloo(self) -> Any:
        options = _Gloo._Options()
        options._timeout = timedelta(seconds=self._deadline_s)
        options._devices = [_Gloo.create_device(hostname=self._own_address())]
        return _Gloo(self._prefixed("cpu"), self.rank, self.size, options)

    def _open_nccl(self) -> Any:
        from torch.distributed import ProcessGroupNCCL  # absent from builds without CUDA

        options = ProcessGroupNCCL.Options()
        options._timeout = _NEVER
        before = os.environ.get(_BLOCKING)
        os.environ[_BLOCKING] = "1"  # read while the group is made; those that train keep their watchdogs
        try:
            return ProcessGroupNCCL(self._prefixed("cuda"), self.rank, self.size, options)
        finally:
            del os.environ[_BLOCKING]
            os.environ |= {} if before is None else {_BLOCKING: before}

    def _prefixed(self, device: str) -> PrefixStore:
        """Nest the keys as ``torch.distributed`` does for a group with a name of its own."""
        assert self._store is not None
        return PrefixStore(f"{device}/", PrefixStore(f"{self.name}/", PrefixStore(self.name, self._store)))

    def _own_address(self) -> str:
        """Return the address of this host that reaches rank 0's store: the one where the others can reach us."""
        assert self._store is not None
        if self.rank == 0:
            return self._store.host
        with socket.create_connection((self._store.host, self.port), timeout=self._deadline_s) as probe:
            address: str = probe.getsockname()[0]
            return address

    def _is_over(self) -> bool:
        """Say whether rank 0 has closed its store: of that its own nccl hears nothing."""
        return self.rank == 0 and self._hosted is None


def _start_broadcast(backend: Any, flat: torch.Tensor) -> Any:
    options = BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return backend.broadcast([flat], options)


def _broadcast_nccl(backend: Any, flat: torch.Tensor, stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):  # of the thread that made ``flat``, and its device
        work = _start_broadcast(backend, flat)
        while not work.is_completed():
            time.sleep(_POLL_S)
        work.wait()  # raises where it has failed, which also completes it


def describe(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Say what a receiver needs to know of a tensor in advance."""
    return TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape))


def flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Join the bytes of a bucket's tensors, in order, into one tensor on their device."""
    return torch.cat([tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in tensors])


def num_bytes(specs: Sequence[TensorSpec]) -> int:
    """Return the size of a bucket.

    Raises:
        ValueError: as ``empty_bucket``.
    """
    return _offsets(specs)[-1]


def empty_bucket(specs: Sequence[TensorSpec], device: torch.device | str = "cpu") -> torch.Tensor:
    """Make room for the bytes of a bucket.

    Raises:
        ValueError: a tensor is of no type of torch's, has a negative dimension or would not be aligned.
    """
    return torch.empty(_offsets(specs)[-1], dtype=torch.uint8, device=device)


def unflatten(flat: torch.Tensor, specs: Sequence[TensorSpec]) -> list[tuple[str, torch.Tensor]]:
    """Return the named tensors of a bucket, as views of ``flat``.

    Raises:
        ValueError: as ``empty_bucket``, or ``flat`` has another size.
    """
    offsets = _offsets(specs)
    if flat.numel() != offsets[-1]:
        raise ValueError(f"bucket: got {flat.numel()} bytes, need {offsets[-1]}")
    return [
        (spec.name, flat[start:end].view(_dtype(spec)).view(spec.shape))
        for spec, start, end in zip(specs, offsets, offsets[1:], strict=False)
    ]


def _offsets(specs: Sequence[TensorSpec]) -> list[int]:
    """Return where each tensor begins, and where the last one ends."""
    offsets = [0]
    for spec in specs:
        itemsize = _dtype(spec).itemsize
        if any(length < 0 for length in spec.shape):
            raise ValueError(f"bucket: got shape {spec.shape} for {spec.name}, need no negative dimension")
        if offsets[-1] % itemsize:
            raise ValueError(
                f"bucket: got {spec.name} of {spec.dtype} at byte {offsets[-1]}, need a multiple of {itemsize}; "
                f"put the wider types first"
            )
        offsets.append(offsets[-1] + torch.Size(spec.shape).numel() * itemsize)
    return offsets


def _dtype(spec: TensorSpec) -> torch.dtype:
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"bucket: got type {spec.dtype!r} for {spec.name}, need one of torch's like bfloat16")
    return dtype


def _check_backend(backend: str) -> None:
    if backend not in (GLOO, NCCL):
        raise WeightGroupError(f"weight group: got backend {backend!r}, need {GLOO} or {NCCL}")
    if backend == NCCL and not torch.distributed.is_nccl_available():
        raise WeightGroupError(f"weight group: got backend {NCCL}, which this torch is built without; use {GLOO}")


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    """Turn torch's errors into ours.

    The cause goes on without its traceback, whose frames would keep the store open after ``close``.
    """
    try:
        yield
    except (RuntimeError, OSError) as exc:
        cause = exc.with_traceback(None)
    else:
        return
    raise WeightGroupError(f"{what}: {cause}") from cause


def _run_within(deadline_s: float, call: Callable[[], None], *, is_over: Callable[[], bool] = bool) -> None:
    """Run what may never return in a thread that is left behind at the deadline, or as soon as ``is_over`` says so.

    Raises:
        WeightGroupError: it did not return in time.
    """
    answer = in_daemon_thread(call, name="weight-group", expected=(RuntimeError,))
    ends_at = time.monotonic() + deadline_s
    while (left := ends_at - time.monotonic()) > 0 and not is_over():
        with contextlib.suppress(TimeoutError):
            return answer.result(min(left, _LOOK_S))
    why = "the group is closed" if is_over() else f"got no answer of every rank in {deadline_s:g} s"
    raise WeightGroupError(f"nccl: {why}")
