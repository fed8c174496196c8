"""What servers get of an engine's weights: all of them, or its adapters; gathered, sent and written."""

from collections.abc import Callable
from pathlib import Path

import structlog
from torch import Tensor

from areal_async.config.settings import Settings
from areal_async.errors import PipelineError
from areal_async.inference.commands import choose_backend
from areal_async.inference.supervision.deltas import write_delta
from areal_async.inference.weight_group import flatten, num_bytes
from areal_async.protocol.types import ADAPTER, DISK, Version, WeightsVersion
from areal_async.trainer.engine.host_copies import unpin_copies
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.policy import FsdpEngine
from areal_async.trainer.engine.weights import Bucket, empty_copies, witnesses

log = structlog.get_logger()


class ServedWeights:
    """The weights of one engine, or its adapters.

    The memory of a version that is written or let go of (``take_back``) is that of the next one to be gathered: a GPU
    copies into it without the processor (``host_copies``). One version's is kept so, until ``close``.
    """

    def __init__(
        self,
        engine: FsdpEngine,
        *,
        bucket_bytes: int,
        is_adapter: bool = False,
        is_broadcast: bool = False,
        has_deltas: bool = False,
    ) -> None:
        """Divide what is served into ``buckets`` of at most ``bucket_bytes``; adapters are one.

        Args:
            is_broadcast: rank 0 gets each bucket, whole, to send it.
            has_deltas: beside each file there is what has changed in it since the version before.
        """
        self._engine = engine
        self._is_adapter = is_adapter
        self._is_broadcast = is_broadcast
        self._has_deltas = has_deltas and not is_broadcast
        self._before: tuple[Path, dict[str, str]] | None = None
        """Folder and digests of the version that was written last."""
        self._folder = engine.folder
        self.buckets = engine.plan_adapter() if is_adapter else engine.plan_buckets(max_bytes=bucket_bytes)
        self._is_pinned = engine.dims.all.device.type == "cuda"
        self._spare: list[dict[str, Tensor]] = []

    def gather(self, send: Callable[[Tensor], None] = lambda _: None) -> dict[str, Tensor]:
        """Return copies of the tensors that this rank writes, on the CPU. A collective.

        Args:
            send: takes each bucket's bytes, on rank 0's device, where weights are broadcast (``weights.gather``).
        """
        into = self._spare.pop() if self._spare else empty_copies(self._own(), is_pinned=self._is_pinned)
        if self._is_adapter:
            return self._engine.gather_weights(self.buckets, into=into)
        if self._is_broadcast:
            return self._engine.gather_files(self.buckets, send=send, into=into)
        return self._engine.gather_files(into=into)

    def take_back(self, tensors: dict[str, Tensor]) -> None:
        """Have a version's copies overwritten by a later one: nobody reads them any more. From any thread."""
        if not self._spare:
            self._spare.append(tensors)
        elif self._is_pinned:
            unpin_copies(tensors)

    def close(self) -> None:
        """Give up the memory that waits for a version."""
        while self._spare:
            tensors = self._spare.pop()
            if self._is_pinned:
                unpin_copies(tensors)

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

        They are taken back. A collective, from any thread of which these are the ranks.

        Raises:
            PipelineError: some rank could not write; raised on every rank.
        """
        folder = directory / str(version)
        if self._is_adapter:
            hashes, proofs = self._write_adapter(tensors, folder, ranks)
        else:
            hashes = self._folder.write_together(tensors, folder, ranks)
            served = (spec for bucket in self.buckets for spec in bucket)
            own = witnesses(tensors, of=served)
            if self._has_deltas:
                self._write_deltas(tensors, folder, hashes)
            self.take_back(tensors)  # before any rank returns from the next collective, and gathers again
            proofs = ranks.gather_entries(own)
        return WeightsVersion(
            version=str(version),
            path=str(folder.resolve()),
            sha256=hashes,
            tensors_sha256=proofs,
            kind=ADAPTER if self._is_adapter else DISK,
        )

    def _write_deltas(self, tensors: dict[str, Tensor], folder: Path, hashes: dict[str, str]) -> None:
        """Write what has changed in the files of this rank; without it, hosts copy them whole."""
        if self._before is not None:
            base, before = self._before
            for name in self._folder.names_of(tensors):
                try:
                    write_delta(base / name, folder / name, base_sha256=before[name], sha256=hashes[name])
                except OSError as exc:
                    log.warning("weights.no_delta", file=str(folder / name), cause=str(exc))
        self._before = folder, hashes

    def _own(self) -> list[Bucket]:
        """Return the tensors that this rank writes."""
        ranks = self._engine.dims.all
        holders = {} if self._is_adapter else self._folder.holders(ranks.size)
        return [[spec for spec in bucket if holders.get(spec.name, 0) == ranks.rank] for bucket in self.buckets]

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
            self.take_back(tensors)
        return hashes, proofs


def sends_adapter(settings: Settings) -> bool:
    """Say whether servers get adapters alone: where there are some, and all servers can merge them."""
    lora = settings.trainer.lora
    if not lora.is_on or lora.transfer == "merged":
        return False
    takes_adapters = choose_backend(settings.inference) == "embedded" and settings.inference.weight_transfer == "disk"
    return lora.transfer == "adapter" or takes_adapters
