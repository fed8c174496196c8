"""Weights into a serving model: from disk whole or not at all, from a broadcast bucket by bucket.

Staging checks every tensor and copies it into memory of its own while the model goes on generating; the swap then only
re-points the parameters, between two steps. An adapter is merged while it is staged. Nothing of the source is needed
after staging: a file may be deleted.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from areal_async.inference.embedded.engine.adapters import base_name, is_adapter, merge_adapter, read_adapter
from areal_async.inference.embedded.engine.errors import WeightsError
from areal_async.inference.embedded.engine.tensor_files import read_tensors
from areal_async.vision.names import plain_name

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(slots=True)
class Merged:
    """The adapter that is merged into the served weights, and what these were before."""

    adapter: dict[str, torch.Tensor] = field(default_factory=dict)
    """Adapter's tensors by PEFT's names; empty where there is none."""
    base: dict[str, torch.Tensor] = field(default_factory=dict)
    """The tensors that it changed, as they were, by the model's names."""


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Checked tensors in memory of their own, keyed by the model's own parameter and buffer names."""

    tensors: dict[str, torch.Tensor]
    merged: Merged | None = None
    """Adapter that is merged into them; ``None`` for weights that replace what is merged."""


def stage_weights(model: torch.nn.Module, model_path: str, merged: Merged | None = None) -> StagedWeights:
    """Read a folder for ``model``: a checkpoint, all of it, or an adapter to be merged into the model's own weights.

    Args:
        merged: the adapter that is served now: the next one takes its place.

    Raises:
        WeightsError: files missing, torn, or not of this model.
    """
    folder = Path(model_path)
    try:
        if is_adapter(folder):
            return _stage_adapter(model, folder, merged or Merged())
        staged, unknown, missing = _stage(model, read_checkpoint(folder))
        if missing or unknown:
            raise WeightsError(
                f"{len(missing)} tensors missing (first: {missing[:1]}), {len(unknown)} unknown "
                f"(first: {unknown[:1]}); save them from the model this server runs"
            )
    except WeightsError as exc:
        raise WeightsError(f"{'adapter' if is_adapter(folder) else 'weights'} at {model_path}: {exc}") from exc
    return StagedWeights(staged)


def _stage_adapter(model: torch.nn.Module, folder: Path, served: Merged) -> StagedWeights:
    base = named_weights(model) | served.base
    adapter = read_adapter(folder)
    changed = merge_adapter(adapter, base)
    # What the last one changed and this one does not is put back.
    tensors = {**served.base, **changed}
    return StagedWeights(tensors, Merged(adapter.tensors, {name: base[name] for name in changed}))


def stage_tensors(model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> StagedWeights:
    """Check and copy some of a model's tensors.

    Raises:
        WeightsError: one is not of this model.
    """
    staged, unknown, _ = _stage(model, tensors)
    if unknown:
        raise WeightsError(f"got {len(unknown)} unknown tensors (first: {unknown[:1]}), need none")
    return StagedWeights(staged)


def _stage(
    model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]
) -> tuple[dict[str, torch.Tensor], list[str], list[str]]:
    """Check tensors against a model's and copy them; return them, the names it does not know and those missing.

    Tied tensors (an output head that is the embedding) may come under any of their names, or several: the first name
    stands for all of them. Those of a model that sees may be written as in a checkpoint or as in the model.
    """
    targets = model.state_dict(keep_vars=True)
    own_names = {plain_name(name): name for name in targets}
    first_names: dict[int, str] = {}
    for name, target in targets.items():
        first_names.setdefault(id(target), name)
    staged: dict[str, torch.Tensor] = {}
    unknown = []
    for name, tensor in tensors:
        own_name = own_names.get(plain_name(name))
        if own_name is None:
            unknown.append(name)
            continue
        target = targets[own_name]
        if tensor.shape != target.shape:
            raise WeightsError(
                f"{name} has shape {list(tensor.shape)}, need {list(target.shape)}; "
                f"save them from the model this server runs"
            )
        first_name = first_names[id(target)]
        if first_name not in staged:
            # A copy, always: the file behind the mapping may be truncated or replaced later, and a bucket is reused.
            staged[first_name] = tensor.to(device=target.device, dtype=target.dtype, copy=True)
    return staged, unknown, sorted(set(first_names.values()) - staged.keys())


def swap_weights(model: torch.nn.Module, staged: StagedWeights, merged: Merged) -> Merged:
    """Point the model at staged weights and return what is merged into them then, ``merged`` until now.

    Nothing here can fail half way: everything was checked before.
    """
    targets = model.state_dict(keep_vars=True)
    for name, tensor in staged.tensors.items():
        targets[name].data = tensor
    if staged.merged is not None:
        return staged.merged
    # Some tensors of a broadcast leave the others as they are, and what those were.
    return Merged(base={name: tensor for name, tensor in merged.base.items() if name not in staged.tensors})


def named_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors served now; a later swap does not change the ones returned."""
    return {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}


def shown_weights(model: torch.nn.Module, merged: Merged) -> dict[str, torch.Tensor]:
    """Return the tensors served now and, by PEFT's names, what they were made of."""
    base = {base_name(name): tensor for name, tensor in merged.base.items()}
    return named_weights(model) | base | merged.adapter


def checksum_weights(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return the SHA-256 of every tensor's bytes, by name."""
    return {
        name: hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().data).hexdigest()
        for name, tensor in tensors.items()
    }


def read_checkpoint(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of all that a checkpoint's files hold, each a view of a file.

    Raises:
        WeightsError: there are none, or one cannot be read.
    """
    for file in _checkpoint_files(folder):
        try:
            yield from read_tensors(file)
        except (OSError, ValueError) as exc:
            raise WeightsError(f"{file.name}: cannot be read: {exc}; write it whole, then rename it") from exc


def _checkpoint_files(folder: Path) -> list[Path]:
    if (folder / _SINGLE).is_file():  # where both are, the one that transformers reads
        return [folder / _SINGLE]
    index = folder / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as exc:
            raise WeightsError(f"{_INDEX}: cannot be read: {type(exc).__name__}: {exc}") from exc
        return [folder / name for name in names]
    raise WeightsError(f"found neither {_SINGLE} nor {_INDEX}; pass a folder that has one")
