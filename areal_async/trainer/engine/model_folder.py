"""A model as a plain Hugging Face folder: what ``model.path``, servers, and any other program can load.

The folder holds all that the model's source folder held besides weights: a program that loads the source loads it too.
It appears whole or not at all.

Invariant: its files follow from the model alone, whatever the layout and the number of ranks: equal weights have equal
digests.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from areal_async.errors import PipelineError
from areal_async.inference.weight_group import num_bytes
from areal_async.process.atomic_folders import finish, partial_name, sync, written_whole
from areal_async.trainer.engine.digests import digests
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.weights import Bucket, plan

FILE_BYTES = 512 << 20
"""Of a file's tensors at most, unless it has a single one: who writes a file has these in host memory."""
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What is to stand in the folder."""

    source: Path
    """The folder that the model came from."""
    config: Any
    files: Sequence[Bucket]
    """The tensors of each safetensors file."""

    @classmethod
    def of(cls, decoder: Any, source: Path, dtype: torch.dtype) -> Self:
        """Describe the folder of a decoder's weights in ``dtype``, which may be parts of it, or have no content."""
        return cls(source, decoder.config, plan(decoder, dtype, max_bytes=FILE_BYTES))

    def holders(self, num_ranks: int) -> dict[str, int]:
        """Return the rank that writes each tensor: files are dealt out, neighbours to one."""
        dealt = ((number * num_ranks // len(self.files), bucket) for number, bucket in enumerate(self.files))
        return {spec.name: rank for rank, bucket in dealt for spec in bucket}

    def read(self, bucket: Bucket, directory: Path) -> list[Tensor]:
        """Return some tensors of a folder that was written, on the CPU."""
        from safetensors import safe_open

        with ExitStack() as stack:
            files = {
                name: stack.enter_context(safe_open(directory / name, framework="pt"))
                for name in dict.fromkeys(self._places[spec.name] for spec in bucket)
            }
            return [files[self._places[spec.name]].get_tensor(spec.name) for spec in bucket]

    def write(self, read: Callable[[Bucket], Mapping[str, Tensor]], directory: Path) -> dict[str, str]:
        """Write the folder as one process; return {safetensors file: sha256}. No collective.

        Args:
            read: returns a file's tensors, on the CPU; they are needed no more when it is asked for the next one's.

        Raises:
            OSError: it cannot be written.
        """
        with written_whole(directory) as partial:
            self._begin(partial)
            paths = [self._write_file(number, read(bucket), partial) for number, bucket in enumerate(self.files)]
            return digests(partial, paths)

    def write_together(self, tensors: Mapping[str, Tensor], directory: Path, ranks: Ranks) -> dict[str, str]:
        """Write the folder as all ranks, each the files whose tensors it has; return as ``write``. A collective.

        ``directory`` is the same folder to all of them.

        Raises:
            PipelineError: some rank could not write; raised on every rank.
        """
        partial, what = partial_name(directory), f"weights: {directory} could not be written"
        written: dict[str, str] = {}
        try:
            with ranks.together(what):
                if ranks.rank == 0:
                    shutil.rmtree(partial, ignore_errors=True)
                    partial.mkdir(parents=True)
                    self._begin(partial)
            with ranks.together(what):
                own = self._numbers_of(tensors)
                written = digests(partial, [self._write_file(number, tensors, partial) for number in own])
            with ranks.together(what):
                if ranks.rank == 0:
                    finish(partial, directory)
        except PipelineError:  # known to every rank: none writes any more
            if ranks.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        return ranks.gather_entries(written)

    def names_of(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Return the files that are written of these tensors."""
        return [self._name(number) for number in self._numbers_of(tensors)]

    def _numbers_of(self, tensors: Mapping[str, Tensor]) -> list[int]:
        return [number for number, bucket in enumerate(self.files) if bucket[0].name in tensors]

    def _begin(self, folder: Path) -> None:
        """Write all but the weights: the tokenizer and whatever else stands beside them, the config and the index."""
        for path in self.source.iterdir():
            if path.is_file() and not path.name.startswith(".") and not path.name.endswith(WEIGHT_SUFFIXES):
                shutil.copyfile(path, folder / path.name)
        # The model's own config, with the dtype that its weights are stored in.
        config = self.config.to_diff_dict() | {"dtype": self.files[0][0].dtype}
        config.pop("torch_dtype", None)
        _write_json(config, folder / "config.json")
        if len(self.files) > 1:
            index = {"metadata": {"total_size": sum(map(num_bytes, self.files))}, "weight_map": self._places}
            _write_json(index, folder / "model.safetensors.index.json")

    @property
    def _places(self) -> dict[str, str]:
        """Name of a tensor -> that of its file."""
        return {spec.name: self._name(number) for number, bucket in enumerate(self.files) for spec in bucket}

    def _name(self, number: int) -> str:
        """Return what Hugging Face calls a file, of which ``number`` stand before it."""
        if len(self.files) == 1:
            return "model.safetensors"
        return f"model-{number + 1:05}-of-{len(self.files):05}.safetensors"

    def _write_file(self, number: int, tensors: Mapping[str, Tensor], folder: Path) -> Path:
        # Imported here, like all that a trainer needs only to write.
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = folder / self._name(number)
        try:
            save_file({spec.name: tensors[spec.name] for spec in self.files[number]}, path, metadata={"format": "pt"})
        except SafetensorError as exc:
            raise OSError(f"{path}: {exc}") from exc
        shutil.copymode(folder / "config.json", path)  # the library makes it for its owner alone
        sync(path)  # by the host that wrote it
        return path


def _write_json(content: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
