"""A device that is not there: its tensors have shapes and sizes, and no memory. What engines do on it can be counted.

It is a device of torch's own for backends in Python, whose operators run under ``FakeTensorMode``; tensors in the
host's memory are real. What is copied to the host, or read as a number, is ones, but a single number that the host
gave is what it was: counts of rows and layers decide what a rank does next.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.tensor import DTensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from areal_async.trainer.engine import attention
from areal_async.trainer.engine.loading import StoredWeights

NAME = "absent"
DEVICE = f"{NAME}:0"


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, _stream: Any = None) -> "_Event":
        return self


class _Stream(torch.cpu.Stream):
    def wait_event(self, _event: Any) -> None:
        pass

    def record_event(self, _event: Any = None) -> _Event:  # type: ignore[override]
        return _Event()


class _Module(backend_registration._DummyBackendModule):
    """What ``torch.cuda`` is to a GPU, as far as FSDP2, checkpointing and pipelines ask for it."""

    Stream, Event = _Stream, _Event
    current_stream = staticmethod(lambda *_: _Stream())
    stream = staticmethod(torch.cpu.stream)
    set_device = staticmethod(lambda _: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])
    get_rng_state = staticmethod(lambda *_: torch.zeros(1, dtype=torch.uint8))
    set_rng_state = staticmethod(lambda *_: None)


def register() -> None:
    """Make torch know the device. Once in a process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())


@contextmanager
def engines_on_it() -> Iterator[None]:
    """Let engines be built and run where nothing can be loaded, as they would on a GPU."""
    with ExitStack() as stack:
        patch = mock.patch.object
        # A computed buffer is real and cannot become fake in place; models copy it to the device when they use it.
        stack.enter_context(patch(_fsdp_init, "_move_states_to_device", lambda *_: None))
        stack.enter_context(patch(StoredWeights, "fill", lambda *_: None))
        stack.enter_context(patch(StoredWeights, "read", lambda *_args, **_named: torch.zeros(1)))
        stack.enter_context(patch(attention, "has_kernel", lambda *_: True))
        stack.enter_context(patch(torch.accelerator, "current_stream", lambda *_: _Stream()))
        yield


class AbsentDevice(TorchDispatchMode):
    """Runs what this thread asks of the device, and counts the bytes that would be there. B: bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on_collective: Callable[[Any, Any], None] | None = None
        """Takes each collective of the thread, the host's too, and its arguments."""
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._sizes: dict[int, int] = {}
        """Of each storage that is there, by id."""
        self.num_bytes = 0
        self.peak_bytes = 0

    @contextmanager
    def on(self) -> Iterator[None]:
        """Have it in this thread, for as long as the block runs."""
        lifts, resize = torch._C._only_lift_cpu_tensors(), torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            result = resize(storage, num_bytes)
            if id(storage) in self._sizes:
                self._change(id(storage), num_bytes)
            return result

        # Otherwise ``torch.tensor`` would ask the device itself for memory.
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            # FSDP2 frees and gets memory so. One thread: a backward pass of its own would not have this mode.
            with (
                mock.patch.object(torch.UntypedStorage, "resize_", counted),
                torch.autograd.set_multithreading_enabled(False),
                self,
            ):
                yield
        finally:
            torch._C._set_only_lift_cpu_tensors(lifts)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator: for real where all of it is the host's."""
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # of every second call
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # it comes again for the local tensors
        kwargs = kwargs or {}
        if self.on_collective is not None and func.namespace == "c10d":
            self.on_collective(func, args)
        leaves = [*_leaves(args), *_leaves(kwargs.values())]
        if active_fake_mode() or not any(_is_absent(one) for one in leaves):  # DTensor finds shapes out with another
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return getattr(args[0], "said", torch.ones((), dtype=args[0].dtype).item())
        given = args, kwargs
        if any(isinstance(one, Tensor) and not isinstance(one, FakeTensor) for one in leaves):
            given = tree_map_only(Tensor, self._faked, given)
        with self._fake:
            result = func(*given[0], **given[1])
        if func is torch.ops.aten._to_copy.default and not isinstance(args[0], FakeTensor) and args[0].numel() == 1:
            result.said = args[0].item()
        return self._taken(result) if isinstance(result, FakeTensor) else tree_map_only(FakeTensor, self._taken, result)

    def _faked(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)

    def _taken(self, tensor: FakeTensor) -> Tensor:
        if tensor.device.type == "cpu":
            return torch.ones(tensor.shape, dtype=tensor.dtype)
        storage = tensor.untyped_storage()
        if id(storage) not in self._sizes and tensor.device.type == NAME:
            weakref.finalize(storage, self._forget, id(storage))
            self._change(id(storage), storage.nbytes())
        return tensor

    def _change(self, key: int, num_bytes: int) -> None:
        self.num_bytes += num_bytes - self._sizes.get(key, 0)
        self._sizes[key] = num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def _forget(self, key: int) -> None:
        self.num_bytes -= self._sizes.pop(key)


def _leaves(arguments: Iterable[Any]) -> Iterator[Any]:
    """Yield the arguments of an operator, which nests nothing but lists. Torch's own way takes four times as long."""
    for one in arguments:
        if isinstance(one, list | tuple):
            yield from _leaves(one)
        else:
            yield one


def _is_absent(one: Any) -> bool:
    return isinstance(one, FakeTensor) or (isinstance(one, torch.device) and one.type == NAME)
