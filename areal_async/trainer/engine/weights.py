"""Weights as they are served: the buckets in which they are gathered, broadcast and written, and what proves them."""

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from areal_async.inference.weight_group import describe, flatten, unflatten
from areal_async.protocol.types import TensorSpec
from areal_async.trainer.engine.gradient_groups import is_of_vision, layer_of
from areal_async.trainer.engine.host_copies import SideCopies, make_copies
from areal_async.trainer.engine.lora import BASE, adapters, is_adapter, merge, peft_name
from areal_async.trainer.engine.parallel.dims import whole_of
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.parallel.stages import StagedModel
from areal_async.trainer.engine.vision import stored_name

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
    causal_lm: nn.Module,
    buckets: Sequence[Bucket],
    ranks: Ranks,
    *,
    holders: Mapping[str, int] | None = None,
    send: Callable[[Tensor], None] | None = None,
    into: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return copies, on the CPU, of the whole tensors that this rank holds afterwards. A collective.

    What has an adapter comes merged with it. A bucket is copied while it is sent and while the next one is gathered.
    Beside the copies two buckets are whole at once on a rank that holds some of their tensors, or sends them, and a
    single tensor on the others.

    Args:
        holders: name -> the rank that holds a tensor; rank 0 holds all of them else.
        send: takes each bucket's bytes on rank 0's device, in order, before the next bucket is gathered. The other
            ranks wait meanwhile, in the next collective; where there are holders they pass some function too.
        into: copies to overwrite and to return (``empty_copies``); new ones else.
    """
    parameters = {_served_name(causal_lm, name): one for name, one in causal_lm.named_parameters()}
    adapted = {_served_name(causal_lm, f"{name}.weight"): module for name, module in adapters(causal_lm).items()}

    def whole_on(takers: set[int], spec: TensorSpec) -> Tensor | None:
        if isinstance(causal_lm, StagedModel):
            return causal_lm.fetch(spec.name, parameters.get(spec.name), _dtype(spec), to=takers)
        parameter, module = parameters[spec.name], adapted.get(spec.name)
        parts = [] if module is None else [module.lora_A, module.lora_B]
        weight, *adapter = (whole_of(part, _dtype(spec), ranks.device) for part in (parameter, *parts))
        if ranks.rank not in takers:
            return None
        return weight if module is None else merge(weight, adapter[0], adapter[1], module.scale)

    own = [
        [spec for spec in bucket if ranks.rank == (0 if holders is None else holders[spec.name])] for bucket in buckets
    ]
    tensors = empty_copies(own) if into is None else into
    copying = SideCopies(ranks.device)
    deliver = send if ranks.rank == 0 else None

    def move(bucket: Bucket, kept: Bucket) -> None:
        """Gather, keep and send one bucket; only what is being copied is left of it on the device."""
        wholes: dict[str, Tensor] = {}
        for spec in bucket:
            holder = 0 if holders is None else holders[spec.name]
            whole = whole_on({holder} if send is None else {holder, 0}, spec)
            if whole is not None:
                wholes[spec.name] = whole
        copying.finish()  # so that no third bucket is whole
        flat = None if deliver is None else flatten(wholes.values())
        if flat is not None:
            wholes = dict(unflatten(flat, bucket))
        names = [spec.name for spec in kept]
        copying.start([tensors[name] for name in names], [wholes[name] for name in names])
        if deliver is not None and flat is not None:
            deliver(flat)

    for bucket, kept in zip(buckets, own, strict=True):
        move(bucket, kept)
    copying.finish()
    return tensors


def empty_copies(buckets: Iterable[Bucket], *, is_pinned: bool = False) -> dict[str, Tensor]:
    """Make room in host memory for all tensors of some buckets (``host_copies``)."""
    like = {
        spec.name: torch.empty(spec.shape, dtype=_dtype(spec), device="meta") for bucket in buckets for spec in bucket
    }
    return make_copies(like, is_pinned=is_pinned)


def witnesses(tensors: Mapping[str, Tensor], *, of: Iterable[TensorSpec] | None = None) -> dict[str, str]:
    """Return {name: sha256 of the bytes} of a few tensors, which prove what a server runs.

    They are chosen from those that servers keep as they are: the norms of the first, the middle and the last layer
    and those outside of layers, and the last matrix of the first and the last layer.

    Args:
        of: all that is served, where ``tensors`` are this rank's part.
    """
    num_dims = {name: tensor.ndim for name, tensor in tensors.items()}
    if of is not None:
        num_dims = {spec.name: len(spec.shape) for spec in of}
    return {name: _sha256(tensors[name]) for name in _witness_names(num_dims) if name in tensors}


def base_witnesses(causal_lm: nn.Module, read: Callable[[str], Tensor]) -> dict[str, str]:
    """Return what proves that a server merges adapters into this very base. Before it is sharded.

    A matrix that has an adapter is named as the embedded engine shows what it has kept of it.

    Args:
        read: returns a parameter of the base by its name.
    """
    named = {name: parameter.detach() for name, parameter in causal_lm.named_parameters() if not is_adapter(name)}
    adapted = {f"{name}.weight": f"{name}.{BASE}.weight" for name in adapters(causal_lm)}
    num_dims = {name: parameter.ndim for name, parameter in named.items()}
    return {adapted.get(name, _served_name(causal_lm, name)): _sha256(read(name)) for name in _witness_names(num_dims)}


def adapter_witnesses(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return {PEFT's name: sha256 of the bytes} of the adapters of the first and the last layer, and of all of a tower.

    ``tensors`` has some of layers.
    """
    layers = [layer for name in tensors if (layer := layer_of(name)) is not None]
    ends = {min(layers), max(layers), None}
    return {peft_name(name): _sha256(tensor) for name, tensor in tensors.items() if layer_of(name) in ends}


def _witness_names(num_dims: Mapping[str, int]) -> list[str]:
    layers = sorted({layer for name in num_dims if (layer := layer_of(name)) is not None})
    ends = {layers[0], layers[-1]} if layers else set()
    looked_at = {None, *ends, *layers[len(layers) // 2 :][:1]}

    def is_witness(name: str) -> bool:
        if is_of_vision(name):
            return False
        if num_dims[name] == 1:
            return "norm" in name and layer_of(name) in looked_at
        return name.endswith(".down_proj.weight") and layer_of(name) in ends

    return [name for name in num_dims if is_witness(name)]


def _dtype(spec: TensorSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(flatten([tensor]).numpy().data).hexdigest()


def _shapes(causal_lm: nn.Module) -> Iterable[tuple[str, torch.Size]]:
    """Return the shape of every parameter of the whole model, in its order, as it is served."""
    if isinstance(causal_lm, StagedModel):
        return causal_lm.shapes.items()
    return ((_served_name(causal_lm, name), parameter.shape) for name, parameter in causal_lm.named_parameters())


def _served_name(causal_lm: nn.Module, name: str) -> str:
    """Return what servers call a parameter: as Hugging Face's files do, and an adapter as PEFT does."""
    return name if is_adapter(name) else stored_name(name, causal_lm.config)


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
