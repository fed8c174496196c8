"""Weights into a serving model: from disk whole or not at all, from a broadcast bucket by bucket.

Staging checks every tensor and copies it into memory of its own while the model goes on generating; the swap then only
re-points the parameters, between two steps. An adapter is merged while it is staged. Nothing of the source is needed
after staging: a file may be deleted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from areal_async.inference.embedded.engine.adapters import base_name, is_adapter, merge_adapter, read_adapter
from areal_async.inference.embedded.engine.errors import WeightsError
from areal_async.inference.embedded.engine.tensor_files import read_tensors

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Checked tensors in memory of their own, keyed by the model's own parameter and buffer names."""

    tensors: dict[str, torch.Tensor]
    merged: Merged | None = None
    """Adapter that is merged into them; ``None`` for weights that replace what is merged."""


@dataclass(slots=True)
class Merged:
    """The adapter that is merged into the served weights, and what these were before."""

    adapter: dict[str, torch.Tensor] = field(default_factory=dict)
    """Adapter's tensors by PEFT's names; empty where there is none."""
    base: dict[str, torch.Tensor] = field(default_factory=dict)
    """The tensors that it changed, as they were, by the model's names."""


def stage_weights(model: torch.nn.Module, model_path: str, merged: Merged | None = None) -> StagedWeights:
    """Read a folder for ``model``: a checkpoint, all of it, or an adapter to be merged into the model's own weights.

    Args:
        merged: the adapter that is served now: the next one takes its place.

    Raises:
        WeightsError: files missing, torn, or not of this model.
    """
    folder = Path(model_path)
    if is_adapter(folder):
        return _stage_adapter(model, folder, merged or Merged())
    staging = _Staging(model)
    for name, tensor in _read_tensors(folder):
        try:
            staging.add(name, tensor)
        except WeightsError as exc:
            raise WeightsError(f"weights at {model_path}: {exc}") from exc
    missing, unknown = sorted(staging.missing), staging.unknown
    if missing or unknown:
        raise WeightsError(
            f"weights at {model_path}: {len(missing)} tensors missing (first: {missing[:1]}), {len(unknown)} unknown "
            f"(first: {unknown[:1]}); save them from the model this server runs"
        )
    return StagedWeights(staging.staged)


def _stage_adapter(model: torch.nn.Module, folder: Path, served: Merged) -> StagedWeights:
    base = named_weights(model) | served.base
    try:
        adapter = read_adapter(folder)
        changed = merge_adapter(adapter, base)
    except WeightsError as exc:
        raise WeightsError(f"adapter at {folder}: {exc}") from exc
    # What the last one changed and this one does not is put back.
    tensors = {**served.base, **changed}
    return StagedWeights(tensors, Merged(adapter.tensors, {name: base[name] for name in changed}))


def stage_tensors(model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> StagedWeights:
    """Check and copy some of a model's tensors.

    Raises:
        WeightsError: one is not of this model.
    """
    staging = _Staging(model)
    for name, tensor in tensors:
        staging.add(name, tensor)
    if staging.unknown:
        raise WeightsError(f"got {len(staging.unknown)} unknown tensors (first: {staging.unknown[:1]}), need none")
    return StagedWeights(staging.staged)


class _Staging:
    """Tensors that were checked against a model's, on their way to becoming its own.

    Tied tensors (an output head that is the embedding) may come under any of their names, or several.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.staged: dict[str, torch.Tensor] = {}
        self.unknown: list[str] = []
        self._targets = model.state_dict(keep_vars=True)
        # Tied names share one tensor: the first name stands for all of them.
        self._first_names: dict[int, str] = {}
        for name, tensor in self._targets.items():
            self._first_names.setdefault(id(tensor), name)

    @property
    def missing(self) -> set[str]:
        """Names that did not come."""
        return set(self._first_names.values()) - self.staged.keys()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        target = self._targets.get(name)
        if target is None:
            self.unknown.append(name)
            return
        if tensor.shape != target.shape:
            raise WeightsError(
                f"{name} has shape {list(tensor.shape)}, need {list(target.shape)}; "
                f"save them from the model this server runs"
            )
        key = self._first_names[id(target)]
        if key not in self.staged:
            # A copy, always: the file behind the mapping may be truncated or replaced later, and a bucket is reused.
            self.staged[key] = tensor.to(device=target.device, dtype=target.dtype, copy=True)


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


def _read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in _checkpoint_files(folder):
        try:
            yield from read_tensors(file)
        except (OSError, ValueError) as exc:
            raise WeightsError(f"weights file {file}: cannot be read: {exc}; write it whole, then rename it") from exc


def _checkpoint_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as exc:
            raise WeightsError(f"weights index {index}: cannot be read: {type(exc).__name__}: {exc}") from exc
        return [folder / name for name in names]
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    raise WeightsError(f"weights at {folder}: found neither {_SINGLE} nor {_INDEX}; pass a folder that has one")
