"""What servers get of an engine's weights: all of them, or its adapters; gathered, sent and written."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from areal_async.config.settings import Settings
from areal_async.inference.commands import choose_backend
from areal_async.inference.weight_group import flatten, num_bytes
from areal_async.protocol.types import ADAPTER, DISK, Version, WeightsVersion
from areal_async.trainer.engine.policy import FsdpEngine
from areal_async.trainer.engine.weights import witnesses


class ServedWeights:
    """The weights of one engine, or its adapters."""

    def __init__(self, engine: FsdpEngine, *, bucket_bytes: int, is_adapter: bool = False) -> None:
        """Divide what is served into ``buckets`` of at most ``bucket_bytes``; adapters are one."""
        self._engine = engine
        self._is_adapter = is_adapter
        self.buckets = engine.plan_adapter() if is_adapter else engine.plan_buckets(max_bytes=bucket_bytes)

    def gather(self, send: Callable[[Tensor], None] | None = None) -> dict[str, Tensor]:
        """Return copies of the tensors on the CPU of rank 0 (``FsdpEngine.gather_weights``). A collective."""
        return self._engine.gather_weights(self.buckets, send=send)

    @property
    def num_bytes(self) -> int:
        """Of a whole version."""
        return sum(num_bytes(bucket) for bucket in self.buckets)

    def send(self, tensors: dict[str, Tensor], send: Callable[[Tensor], None]) -> None:
        """Send gathered tensors, from any thread, one bucket after the other, as ``gather`` does. Rank 0's alone."""
        for bucket in self.buckets:
            send(flatten([tensors[spec.name] for spec in bucket]).to(self._engine.dims.all.device))

    def write(self, tensors: dict[str, Tensor], version: Version, directory: Path) -> WeightsVersion:
        """Write gathered tensors into ``directory/<version>``, atomically; return what is announced of them.

        Rank 0's alone, from any thread.
        """
        engine, folder = self._engine, directory / str(version)
        return WeightsVersion(
            version=str(version),
            path=str(folder.resolve()),
            sha256=engine.write_adapter(tensors, folder) if self._is_adapter else engine.write_weights(tensors, folder),
            tensors_sha256=engine.adapter_witnesses(tensors) if self._is_adapter else witnesses(tensors),
            kind=ADAPTER if self._is_adapter else DISK,
        )


def sends_adapter(settings: Settings) -> bool:
    """Say whether servers get adapters alone: where there are some, and all servers can merge them."""
    lora = settings.trainer.lora
    if not lora.is_on or lora.transfer == "merged":
        return False
    takes_adapters = choose_backend(settings.inference) == "embedded" and settings.inference.weight_transfer == "disk"
    return lora.transfer == "adapter" or takes_adapters
