"""Weights as a plain Hugging Face folder: what servers load, and what a run leaves behind.

It holds all that the model's source folder held besides weights, so that any program that can load the source can
load this.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from areal_async.trainer.distributed import Ranks
from areal_async.trainer.folders import written_whole

MAX_FILE_BYTES = 5 << 30
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")


def save(causal_lm: nn.Module, directory: Path, *, source: Path, dtype: torch.dtype, ranks: Ranks) -> dict[str, str]:
    """Gather the shards on rank 0 and write them in ``dtype``; return {safetensors file: sha256} on every rank.

    A collective. ``source`` is the folder that the model came from.
    """
    tensors = gather(causal_lm, dtype, ranks)
    hashes: dict[str, str] = {}
    if ranks.rank == 0:
        with written_whole(directory) as partial:
            _copy_companions(source, partial)
            _write_config(cast(Any, causal_lm).config, partial, dtype)
            hashes = _write_tensors(tensors, partial)
    return cast(dict[str, str], json.loads(ranks.broadcast_bytes(json.dumps(hashes).encode())))


def gather(causal_lm: nn.Module, dtype: torch.dtype, ranks: Ranks) -> dict[str, Tensor]:
    """Return copies of the whole tensors on the CPU of rank 0, nothing elsewhere. Tied weights come once, as stored."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in causal_lm.named_parameters():
        shard = parameter.detach().to(dtype)
        whole = shard.full_tensor() if isinstance(shard, DTensor) else shard
        if ranks.rank == 0:
            tensors[name] = whole.to("cpu", copy=True)
    return tensors


def _copy_companions(source: Path, folder: Path) -> None:
    """Copy the tokenizer and whatever else stands beside the weights."""
    for path in source.iterdir():
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(path, folder / path.name)


def _write_config(config: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write the model's own config with the dtype that its weights are stored in."""
    written = config.to_diff_dict() | {"dtype": str(dtype).removeprefix("torch.")}
    written.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")


def _write_tensors(tensors: dict[str, Tensor], folder: Path) -> dict[str, str]:
    # Imported here, like all that only rank 0 of a trainer needs.
    from safetensors.torch import save

    parts = list(_split(tensors, max_bytes=MAX_FILE_BYTES))
    hashes: dict[str, str] = {}
    places: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        name = "model.safetensors" if len(parts) == 1 else f"model-{number:05}-of-{len(parts):05}.safetensors"
        data = save({key: tensors[key] for key in part}, metadata={"format": "pt"})
        (folder / name).write_bytes(data)
        hashes[name] = hashlib.sha256(data).hexdigest()
        places |= dict.fromkeys(part, name)
    if len(parts) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return hashes


def _split(tensors: dict[str, Tensor], *, max_bytes: int) -> Iterable[list[str]]:
    """Yield the names of each file's tensors, in order, none over ``max_bytes`` unless a single tensor is."""
    part: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > max_bytes:
            yield part
            part, size = [], 0
        part.append(name)
        size += tensor.nbytes
    yield part
