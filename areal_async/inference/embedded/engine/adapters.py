"""LoRA adapters in PEFT's format, served by merging them into the matrices that they were trained over.

One adapter is served at a time, to every request, so it swaps as weights do: requests go on under it, and their tokens
name its version. The matrices as they were before are kept, so the next adapter is merged into those and nothing adds
up; they take as much memory again as what is adapted.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from areal_async.inference.embedded.engine.errors import WeightsError
from areal_async.inference.embedded.engine.tensor_files import read_tensors

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
_ROOT = "base_model.model."
_IN, _OUT = ".lora_A.weight", ".lora_B.weight"
_PLAIN = {"bias": "none", "fan_in_fan_out": False, "use_dora": False, "lora_bias": False}
"""Options of an adapter that is served; with any other it is refused."""
_UNKNOWN = ("rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication", "target_parameters")


class _Description(msgspec.Struct):
    """What is read of PEFT's description."""

    r: int
    lora_alpha: float
    peft_type: str = ""
    use_rslora: bool = False


class Adapter(NamedTuple):
    """An adapter in memory, as it is stored."""

    tensors: dict[str, torch.Tensor]
    """Tensors by PEFT's names."""
    scale: float

    @property
    def modules(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The two matrices [r, in] and [out, r] of each module, by the module's name in the model."""
        names = [name.removesuffix(_IN) for name in self.tensors if name.endswith(_IN)]
        return {name.removeprefix(_ROOT): (self.tensors[name + _IN], self.tensors[name + _OUT]) for name in names}


def is_adapter(folder: Path) -> bool:
    """Say whether a folder describes an adapter, and so holds no whole model."""
    return (folder / CONFIG_FILE).is_file()


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter whole, to the CPU.

    Raises:
        WeightsError: files missing or torn, or more than the two matrices of linear modules.
    """
    try:
        description = json.loads((folder / CONFIG_FILE).read_text())
        known = msgspec.convert(description, _Description, strict=False)
        tensors = {name: tensor.clone() for name, tensor in read_tensors(folder / TENSORS_FILE)}
    except (OSError, ValueError) as exc:
        raise WeightsError(f"{type(exc).__name__}: {exc}; write the adapter whole, then rename it") from exc
    _check_plain(description, known, tensors)
    return Adapter(tensors, known.lora_alpha / (known.r**0.5 if known.use_rslora else known.r))


def merge_adapter(adapter: Adapter, base: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the matrices that an adapter changes, merged, in the dtype and on the device of ``base``.

    Raises:
        WeightsError: it is not of this model.
    """
    merged: dict[str, torch.Tensor] = {}
    for module, (lora_a, lora_b) in adapter.modules.items():
        weight = base.get(f"{module}.weight")
        if weight is None:
            raise WeightsError(f"adapts {module}, which this model does not have; train it over the model served here")
        shape = torch.Size([lora_b.shape[0], lora_a.shape[1]])
        if weight.shape != shape or lora_a.shape[0] != lora_b.shape[1]:
            raise WeightsError(
                f"adapts {module} as {list(lora_b.shape)} times {list(lora_a.shape)}, need {list(weight.shape)}; "
                "train it over the model served here"
            )
        # In float32 and rounded once, as the trainer does: its layers compute with this very matrix.
        lora_a, lora_b = (half.to(weight.device, torch.float32) for half in (lora_a, lora_b))
        merged[f"{module}.weight"] = torch.addmm(weight.float(), lora_b, lora_a, alpha=adapter.scale).to(weight.dtype)
    return merged


def base_name(name: str) -> str:
    """Return what PEFT calls a matrix that is adapted: what it was before."""
    return f"{name.removesuffix('.weight')}.base_layer.weight"


def _check_plain(description: dict[str, Any], known: _Description, tensors: Mapping[str, torch.Tensor]) -> None:
    odd = [name for name, value in _PLAIN.items() if description.get(name, value) != value]
    odd += [name for name in _UNKNOWN if description.get(name)]
    if known.peft_type != "LORA" or known.r < 1 or odd:
        raise WeightsError(
            f"is of type {known.peft_type or 'none'}, rank {known.r}"
            + (f", with {odd[0]}={description[odd[0]]}" if odd else "")
            + "; need a plain LORA adapter of linear modules"
        )
    halves = {
        name.removesuffix(_IN) + _OUT if name.endswith(_IN) else name.removesuffix(_OUT) + _IN for name in tensors
    }
    if not tensors or halves != tensors.keys():
        strange = sorted(halves ^ tensors.keys())
        raise WeightsError(f"has tensors that are not pairs of {_IN} and {_OUT} (first: {strange[:1]})")
