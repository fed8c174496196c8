"""Weights as they are served: the buckets in which they are gathered and broadcast, and a plain Hugging Face folder.

The folder holds all that the model's source folder held besides weights: a program that loads the source loads it too.
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from areal_async.inference.weight_group import describe, flatten, unflatten
from areal_async.process.atomic_folders import written_whole
from areal_async.protocol.types import TensorSpec
from areal_async.trainer.engine.gradient_groups import layer_of
from areal_async.trainer.engine.lora import BASE, LoraLinear, adapters, is_adapter, merge, peft_name
from areal_async.trainer.engine.parallel.dims import whole_of
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.parallel.stages import StagedModel

MAX_FILE_BYTES = 5 << 30
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")

Bucket = list[TensorSpec]


def plan(
    causal_lm: nn.Module, dtype: torch.dtype, *, max_bytes: int = sys.maxsize, of_adapters: bool = False
) -> list[Bucket]:
    """Divide the weights, in ``dtype``, into buckets of at most ``max_bytes``; a larger tensor goes alone.

    Tied weights come once, as stored; adapters not at all, for they are merged. The same on every rank, and for as
    long as the model lives.

    Args:
        of_adapters: these alone.
    """
    whole = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, shape in _shapes(causal_lm)
        if is_adapter(name) == of_adapters
    }
    return [[describe(name, whole[name]) for name in names] for names in _split(whole, max_bytes=max_bytes)]


def gather(
    causal_lm: nn.Module, buckets: Sequence[Bucket], ranks: Ranks, *, send: Callable[[Tensor], None] | None = None
) -> dict[str, Tensor]:
    """Return copies of the whole tensors on the CPU of rank 0, nothing elsewhere. A collective.

    What has an adapter comes merged with it.

    Args:
        send: takes each bucket's bytes on rank 0's device, in order, before the next bucket is gathered. The other
            ranks wait meanwhile, in the next collective.
    """
    parameters = dict(causal_lm.named_parameters())
    adapted = {f"{name}.weight": module for name, module in adapters(causal_lm).items()}
    tensors: dict[str, Tensor] = {}
    for bucket in buckets:
        wholes = [
            causal_lm.fetch(spec.name, parameters.get(spec.name), getattr(torch, spec.dtype))
            if isinstance(causal_lm, StagedModel)
            else _served(parameters[spec.name], adapted.get(spec.name), getattr(torch, spec.dtype), device=ranks.device)
            for spec in bucket
        ]
        if ranks.rank == 0:
            flat = flatten([whole for whole in wholes if whole is not None])
            if send is not None:
                send(flat)
            tensors.update(unflatten(flat.cpu(), bucket))
    return tensors


def save(causal_lm: nn.Module, dtype: torch.dtype, directory: Path, *, source: Path, ranks: Ranks) -> dict[str, str]:
    """Gather the weights and write them in ``dtype``; return {safetensors file: sha256} on every rank. A collective.

    ``source`` is the folder that the model came from.
    """
    tensors = gather(causal_lm, plan(causal_lm, dtype, max_bytes=0), ranks)
    hashes = write(tensors, directory, source=source, config=cast(Any, causal_lm).config) if ranks.rank == 0 else {}
    return cast(dict[str, str], json.loads(ranks.broadcast_bytes(json.dumps(hashes).encode())))


def write(tensors: dict[str, Tensor], directory: Path, *, source: Path, config: Any) -> dict[str, str]:
    """Write the folder atomically; return {safetensors file: sha256}. Rank 0's alone."""
    with written_whole(directory) as partial:
        _copy_companions(source, partial)
        _write_config(config, partial, next(iter(tensors.values())).dtype)
        return _write_tensors(tensors, partial)


def witnesses(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return {name: sha256 of the bytes} of a few tensors, which prove what a server runs.

    They are chosen from those that servers keep as they are: the norms of the first, the middle and the last layer
    and those outside of layers, and the last matrix of the first and the last layer.
    """
    return {name: _sha256(tensors[name]) for name in _witness_names(tensors)}


def base_witnesses(causal_lm: nn.Module, read: Callable[[str], Tensor]) -> dict[str, str]:
    """Return what proves that a server merges adapters into this very base. Before it is sharded.

    A matrix that has an adapter is named as the embedded engine shows what it has kept of it.

    Args:
        read: returns a parameter of the base by its name.
    """
    named = {name: parameter.detach() for name, parameter in causal_lm.named_parameters() if not is_adapter(name)}
    adapted = {f"{name}.weight": f"{name}.{BASE}.weight" for name in adapters(causal_lm)}
    return {adapted.get(name, name): _sha256(read(name)) for name in _witness_names(named)}


def adapter_witnesses(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return {PEFT's name: sha256 of the bytes} of the adapters of the first and the last layer."""
    layers = [layer for name in tensors if (layer := layer_of(name)) is not None]
    ends = {min(layers), max(layers)}
    return {peft_name(name): _sha256(tensor) for name, tensor in tensors.items() if layer_of(name) in ends}


def _served(parameter: Tensor, adapted: LoraLinear | None, dtype: torch.dtype, *, device: torch.device) -> Tensor:
    if adapted is None:
        return whole_of(parameter, dtype, device)
    parts = (parameter, adapted.lora_A, adapted.lora_B)
    weight, lora_a, lora_b = (whole_of(part, dtype, device) for part in parts)
    return merge(weight, lora_a, lora_b, adapted.scale)


def _witness_names(tensors: Mapping[str, Tensor]) -> list[str]:
    layers = sorted({layer for name in tensors if (layer := layer_of(name)) is not None})
    ends = {layers[0], layers[-1]} if layers else set()
    looked_at = {None, *ends, *layers[len(layers) // 2 :][:1]}

    def is_witness(name: str, tensor: Tensor) -> bool:
        if tensor.ndim == 1:
            return "norm" in name and layer_of(name) in looked_at
        return name.endswith(".down_proj.weight") and layer_of(name) in ends

    return [name for name, tensor in tensors.items() if is_witness(name, tensor)]


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(flatten([tensor]).numpy().data).hexdigest()


def _shapes(causal_lm: nn.Module) -> Iterable[tuple[str, torch.Size]]:
    """Return the shape of every parameter of the whole model, in its order."""
    if isinstance(causal_lm, StagedModel):
        return causal_lm.shapes.items()
    return ((name, parameter.shape) for name, parameter in causal_lm.named_parameters())


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
        index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return hashes


def _split(tensors: Mapping[str, Tensor], *, max_bytes: int) -> Iterable[list[str]]:
    """Yield the names of each part's tensors, in order, none over ``max_bytes`` unless a single tensor is."""
    part: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > max_bytes:
            yield part
            part, size = [], 0
        part.append(name)
        size += tensor.nbytes
    yield part
