"""Weights from disk into a serving model, whole or not at all.

Staging reads and checks every tensor into memory of its own while the model goes on generating; the swap then only
re-points the parameters, between two steps. Nothing of the file is needed after staging, so it may be deleted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from areal_async.inference.embedded.errors import WeightsError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """One checked checkpoint, in memory, keyed by the model's own parameter and buffer names."""

    tensors: dict[str, torch.Tensor]


def stage_weights(model: torch.nn.Module, model_path: str) -> StagedWeights:
    """Read a checkpoint folder for ``model``.

    Tied tensors (an output head that is the embedding) may be stored under any of their names, or several.

    Raises:
        WeightsError: files missing, torn, or not of this model.
    """
    targets = model.state_dict(keep_vars=True)
    # Tied names share one tensor: the first name stands for all of them.
    first_names: dict[int, str] = {}
    for name, tensor in targets.items():
        first_names.setdefault(id(tensor), name)
    staged: dict[str, torch.Tensor] = {}
    unknown: list[str] = []
    for name, tensor in _read_tensors(Path(model_path)):
        target = targets.get(name)
        if target is None:
            unknown.append(name)
            continue
        if tensor.shape != target.shape:
            raise WeightsError(
                f"weights at {model_path}: {name} has shape {list(tensor.shape)}, need {list(target.shape)}; "
                f"save them from the model this server runs"
            )
        key = first_names[id(target)]
        if key not in staged:
            # A copy, always: the file behind the mapping may be truncated or replaced later.
            staged[key] = tensor.to(device=target.device, dtype=target.dtype, copy=True)
    missing = sorted(set(first_names.values()) - staged.keys())
    if missing or unknown:
        raise WeightsError(
            f"weights at {model_path}: {len(missing)} tensors missing (first: {missing[:1]}), {len(unknown)} unknown "
            f"(first: {unknown[:1]}); save them from the model this server runs"
        )
    return StagedWeights(staged)


def swap_weights(model: torch.nn.Module, staged: StagedWeights) -> None:
    """Point the model at staged weights. Nothing here can fail half way: everything was checked before."""
    targets = model.state_dict(keep_vars=True)
    for name, tensor in staged.tensors.items():
        targets[name].data = tensor


def named_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors served now; a later swap does not change the ones returned."""
    return {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}


def checksum_weights(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return the SHA-256 of every tensor's bytes, by name."""
    return {
        name: hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().data).hexdigest()
        for name, tensor in tensors.items()
    }


def _read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in _checkpoint_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():
                    yield name, tensors.get_tensor(name)
        except (SafetensorError, OSError) as exc:
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
