"""What servers get of an engine's weights: all of them, or its adapters; gathered, sent and written."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from areal_async.config.settings import Settings
from areal_async.errors import PipelineError
from areal_async.inference.commands import choose_backend
from areal_async.inference.weight_group import flatten, num_bytes
from areal_async.protocol.types import ADAPTER, DISK, Version, WeightsVersion
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.policy import FsdpEngine
from areal_async.trainer.engine.weights import witnesses


class ServedWeights:
    """The weights of one engine, or its adapters."""

    def __init__(
        self, engine: FsdpEngine, *, bucket_bytes: int, is_adapter: bool = False, is_broadcast: bool = False
    ) -> None:
        """Divide what is served into ``buckets`` of at most ``bucket_bytes``; adapters are one.

        Args:
            is_broadcast: rank 0 gets each bucket, whole, to send it.
        """
        self._engine = engine
        self._is_adapter = is_adapter
        self._is_broadcast = is_broadcast
        self._folder = engine.folder
        self.buckets = engine.plan_adapter() if is_adapter else engine.plan_buckets(max_bytes=bucket_bytes)

    def gather(self, send: Callable[[Tensor], None] = lambda _: None) -> dict[str, Tensor]:
        """Return copies of the tensors that this rank writes, on the CPU. A collective.

        Args:
            send: takes each bucket's bytes, on rank 0's device, where weights are broadcast (``weights.gather``).
        """
        if self._is_adapter:
            return self._engine.gather_weights(self.buckets)
        return self._engine.gather_files(self.buckets, send=send) if self._is_broadcast else self._engine.gather_files()

    @property
    def num_bytes(self) -> int:
        """Of a whole version."""
        return sum(num_bytes(bucket) for bucket in self.buckets)

    def send(self, directory: Path, send: Callable[[Tensor], None]) -> None:
        """Send what was written there, from any thread, one bucket after the other, as ``gather`` does but on the CPU.

        Rank 0's alone; not of adapters.

        Raises:
            PipelineError: they are not there any more, or damaged.
        """
        from safetensors import SafetensorError  # imported here, like all that a trainer needs only for files

        for bucket in self.buckets:
            try:
                tensors = self._folder.read(bucket, directory)
            except (OSError, SafetensorError) as exc:
                raise PipelineError(
                    f"weights: {directory} cannot be read to be broadcast: {exc}; a trainer that starts again writes "
                    "them anew"
                ) from exc
            send(flatten(tensors))

    def write(self, tensors: dict[str, Tensor], version: Version, directory: Path, ranks: Ranks) -> WeightsVersion:
        """Write gathered tensors into ``directory/<version>``, atomically; return what is announced, on rank 0.

        A collective, from any thread of which these are the ranks.

        Raises:
            PipelineError: some rank could not write; raised on every rank.
        """
        folder = directory / str(version)
        if self._is_adapter:
            hashes, proofs = self._write_adapter(tensors, folder, ranks)
        else:
            hashes = self._folder.write_together(tensors, folder, ranks)
            served = (spec for bucket in self.buckets for spec in bucket)
            proofs = ranks.gather_entries(witnesses(tensors, of=served))
        return WeightsVersion(
            version=str(version),
            path=str(folder.resolve()),
            sha256=hashes,
            tensors_sha256=proofs,
            kind=ADAPTER if self._is_adapter else DISK,
        )

    def _write_adapter(
        self, tensors: dict[str, Tensor], folder: Path, ranks: Ranks
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Return digests of the files and of the tensors, as rank 0 has them all."""
        hashes: dict[str, str] = {}
        proofs: dict[str, str] = {}
        with ranks.together(f"weights: {folder} could not be written"):
            if ranks.rank == 0:
                hashes = self._engine.write_adapter(tensors, folder)
                proofs = self._engine.adapter_witnesses(tensors)
        return hashes, proofs


def sends_adapter(settings: Settings) -> bool:
    """Say whether servers get adapters alone: where there are some, and all servers can merge them."""
    lora = settings.trainer.lora
    if not lora.is_on or lora.transfer == "merged":
        return False
    takes_adapters = choose_backend(settings.inference) == "embedded" and settings.inference.weight_transfer == "disk"
    return lora.transfer == "adapter" or takes_adapters
