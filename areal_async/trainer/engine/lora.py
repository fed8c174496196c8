"""Low-rank adapters (LoRA): a decoder whose linear layers stay as they are and get a small trained part beside them.

    y = (W + (alpha / rank) B A) x + b      A [r, in], B [out, r]; W and b frozen, B zero at first

Invariant: a layer computes with its matrix merged and rounded as the servers merge and round it, so in bfloat16 too
what is trained is what samples. (Beside its matrix, ``W x + B (A x)``, the two differ: by 0.02 in the mean logprob of
the tiny model after five steps.) A merge costs as much as ``rank`` tokens; the gradients take the short way all the
same, through A and B alone.

The decoder's own parameters keep their names, so everything that speaks of them by name (what servers load, what
proves which weights they run) is as without adapters. PEFT's module wraps each layer instead and renames them all,
which is why the module here is ours; what is written is PEFT's format, and a test loads it with PEFT.

A vision tower is adapted as the language model is: the linear modules of its blocks, and not what stands before and
behind these (patch embedding, mergers), as little as embedding and head.

Legend: N tokens of a packed row, I and O width of a layer's input and output.

Source: Hu et al. 2021, arXiv 2106.09685, section 4.1.
"""

import hashlib
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from areal_async.config.lora import LoraSettings
from areal_async.errors import UserError
from areal_async.process.atomic_folders import written_whole
from areal_async.trainer.engine.parallel.dims import local_shard
from areal_async.trainer.packing.flops import language_model

IN, OUT = "lora_A", "lora_B"
"""PEFT's names of an adapter's two matrices."""
BASE = "base_layer"
"""PEFT's name of what is adapted; the embedded engine shows its checksum under it."""
PEFT_ROOT = "base_model.model."
CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"


class LoraLinear(nn.Linear):
    """A linear layer, frozen, with an adapter in float32."""

    def __init__(self, name: str, base: nn.Linear, settings: LoraSettings) -> None:
        """Take over the parameters of ``base``; ``reset_adapter`` says what the adapter's are."""
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.rank, self.scale = settings.rank, settings.scale
        self.has_adapter_on = True
        self._seed = zlib.crc32(name.encode())
        device = base.weight.device
        self.lora_A = nn.Parameter(torch.empty(settings.rank, base.in_features, device=device))
        self.lora_B = nn.Parameter(torch.empty(base.out_features, settings.rank, device=device))

    @torch.no_grad()
    def reset_adapter(self) -> None:
        """Let the adapter begin, sharded or not. Equal names begin with equal numbers, on every rank and layout."""
        drawn = torch.empty(self.lora_A.shape)
        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=torch.Generator().manual_seed(self._seed))
        if isinstance(self.lora_A, DTensor):
            mesh, placements = self.lora_A.device_mesh, self.lora_A.placements
            drawn = distribute_tensor(drawn, mesh, placements, src_data_rank=None).to_local()
        local_shard(self.lora_A).copy_(drawn)
        local_shard(self.lora_B).zero_()

    def forward(self, input: Tensor) -> Tensor:
        """Return what the layer and, unless it is off, its adapter make of ``input`` [..., in]: [..., out]."""
        if not self.has_adapter_on:
            return F.linear(input, self.weight, self.bias)
        merged: Any = _Merged  # torch does not type its own ``apply``
        output: Tensor = merged.apply(input, self.weight, self.bias, self.lora_A, self.lora_B, self.scale)
        return output


class _Merged(torch.autograd.Function):
    """A linear layer whose matrix is merged where it is needed and never kept; the rounding has gradient 1."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(input, weight, lora_a, lora_b)
        ctx.scale = scale
        return F.linear(input, merge(weight, lora_a, lora_b, scale), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, Tensor, Tensor, None]:
        (grad,) = gradients
        input, weight, lora_a, lora_b = ctx.saved_tensors
        grad_input = grad @ merge(weight, lora_a, lora_b, ctx.scale) if ctx.needs_input_grad[0] else None
        grad_NO, input_NI = grad.flatten(0, -2), input.flatten(0, -2)
        grad_a = (grad_NO @ lora_b).T @ input_NI * ctx.scale
        grad_b = grad_NO.T @ (input_NI @ lora_a.T) * ctx.scale
        return grad_input, None, None, grad_a, grad_b, None


def adapt(decoder: nn.Module, settings: LoraSettings, *, tower: nn.Module | None = None) -> None:
    """Freeze a decoder and give the linear modules of its layers adapters.

    Args:
        tower: the decoder's own, where its blocks get some too.

    Raises:
        UserError: one of ``target_modules`` is in neither, or all are in one of the two.
    """
    decoder.requires_grad_(False)
    parts = {"layers": language_model(decoder).layers}
    if tower is not None:
        parts["tower's blocks"] = tower.blocks
    linears = {what: _linears(decoder, part) for what, part in parts.items()}
    known = {what: set(map(_last, inside)) for what, inside in linears.items()}
    wanted = set().union(*known.values()) if settings.target_modules is None else set(settings.target_modules)
    unknown = wanted.difference(*known.values())
    if unknown or any(wanted.isdisjoint(names) for names in known.values()):
        need = " and of its ".join(f"{what}: {', '.join(sorted(names)) or 'none'}" for what, names in known.items())
        raise UserError(
            f"trainer.lora.target_modules: got {', '.join(sorted(unknown or wanted)) or 'none'}, need some of the "
            f"linear modules of this model's {need}"
        )
    for name, module in (one for inside in linears.values() for one in inside.items()):
        if _last(name) in wanted:
            parent, _, last = name.rpartition(".")
            setattr(decoder.get_submodule(parent), last, LoraLinear(name, module, settings))


def _linears(decoder: nn.Module, part: nn.Module) -> dict[str, nn.Linear]:
    inside = next(name for name, module in decoder.named_modules() if module is part)
    return {f"{inside}.{name}": module for name, module in part.named_modules() if isinstance(module, nn.Linear)}


def adapters(decoder: nn.Module) -> dict[str, LoraLinear]:
    """Return the adapted modules by name; none of a decoder without adapters."""
    return {name: module for name, module in decoder.named_modules() if isinstance(module, LoraLinear)}


def is_adapter(name: str) -> bool:
    """Say whether a parameter of this name is an adapter's."""
    return name.endswith((f".{IN}", f".{OUT}"))


def merge(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """Return the matrix [out, in], of the dtype of ``weight``, that does what a layer and its adapter do."""
    return torch.addmm(weight.float(), lora_b.float(), lora_a.float(), alpha=scale).to(weight.dtype)


@contextmanager
def without_adapters(decoder: nn.Module) -> Iterator[None]:
    """Have the decoder compute what its base does, for every caller: only the engine's thread may use it."""
    modules = adapters(decoder).values()
    for module in modules:
        module.has_adapter_on = False
    try:
        yield
    finally:
        for module in modules:
            module.has_adapter_on = True


def peft_name(name: str) -> str:
    """Return what PEFT's files call an adapter's parameter."""
    return f"{PEFT_ROOT}{name}.weight"


def write(tensors: Mapping[str, Tensor], directory: Path, *, settings: LoraSettings, base: str) -> dict[str, str]:
    """Write the adapters, named as the decoder's parameters, as a folder of PEFT's, atomically; return its hashes.

    Args:
        base: the name or folder of the model that they are for.

    Returns:
        file name -> sha256, of both files.
    """
    # Imported here, like all that only rank 0 of a trainer needs.
    from safetensors.torch import save

    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        # Whole: PEFT takes every module whose name ends so, and a tower's may end as the layers' do.
        "target_modules": sorted({name.rpartition(".")[0] for name in tensors}),
        "modules_to_save": None,
    }
    files = {
        CONFIG_FILE: (json.dumps(described, indent=2, sort_keys=True) + "\n").encode(),
        TENSORS_FILE: save({peft_name(name): tensor for name, tensor in tensors.items()}, metadata={"format": "pt"}),
    }
    with written_whole(directory) as partial:
        for name, data in files.items():
            (partial / name).write_bytes(data)
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


class AdapterState(nn.Module):
    """What a checkpoint holds of an adapted decoder: its adapters, and which base they were trained over.

    The base itself is where ``model.path`` says: it never changes.
    """

    FINGERPRINT = "base_sha256"

    def __init__(self, decoder: nn.Module, base: Mapping[str, str]) -> None:
        """``base``: hashes that tell the base from others."""
        super().__init__()
        self._decoder = decoder
        digest = hashlib.sha256(json.dumps(sorted(base.items())).encode()).digest()
        self._expected = torch.tensor(list(digest), dtype=torch.uint8)
        self.fingerprint = nn.Parameter(self._expected.clone(), requires_grad=False)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the adapters, named as the decoder's parameters, and the base's fingerprint."""
        for name, parameter in self._decoder.named_parameters(prefix, recurse, remove_duplicate):
            if parameter.requires_grad:
                yield name, parameter
        yield prefix + self.FINGERPRINT, self.fingerprint

    def check_base(self, directory: Path) -> None:
        """Make sure that the adapters loaded from ``directory`` are of this base. After loading.

        Raises:
            UserError: they are of another one.
        """
        if not torch.equal(self.fingerprint.detach(), self._expected):
            raise UserError(
                f"checkpoint: the adapters of {directory} were trained over another model than model.path names; "
                "name that one, or start anew with --fresh"
            )


def _last(name: str) -> str:
    return name.rpartition(".")[2]
