"""A checkpoint's policy as a plain Hugging Face folder: what ``model.path``, and any other program, can load.

Needs no process group and no model in memory: names and shapes are the checkpoint's own, so it does not matter on how
many ranks and in which layout it was made.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_async.config.settings import LoraSettings, ModelSettings
from areal_async.errors import UserError
from areal_async.process.atomic_folders import LEDGER
from areal_async.process.hub import local_model
from areal_async.trainer.engine import weights
from areal_async.trainer.engine.checkpoint import PARAMETERS, STATE
from areal_async.trainer.engine.digests import damage
from areal_async.trainer.engine.lora import IN, OUT, merge
from areal_async.trainer.engine.model import DTYPES

PREFIX = f"{PARAMETERS}."


def export_policy(
    checkpoint: Path, directory: Path, *, model: ModelSettings, lora: LoraSettings | None = None
) -> dict[str, str]:
    """Write the folder atomically, in the dtype that is served; return {safetensors file: sha256}.

    Takes as much host memory as the weights in that dtype, twice. Adapters are merged into ``model.path``.

    Raises:
        UserError: there is no checkpoint, or a live run has removed it meanwhile.
    """
    from transformers import AutoConfig  # imported here: it takes seconds

    if not (checkpoint / LEDGER).is_file():
        raise UserError(f"checkpoint: {checkpoint} is not one; name one of those in {checkpoint.parent}")
    tensors = _read(checkpoint, DTYPES[model.dtype])
    source = local_model(model.path)
    config: Any = AutoConfig.from_pretrained(source, local_files_only=True)
    named = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    if lora is not None and lora.is_on:
        named = _merged(named, source, DTYPES[model.dtype], lora.scale)
    return weights.write(named, directory, source=source, config=config)


def _read(checkpoint: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the parameters in a checkpoint.

    Raises:
        UserError: some of its files have gone meanwhile.
    """
    import torch.distributed.checkpoint as dcp  # imported here: it takes seconds
    from torch.distributed.checkpoint.api import CheckpointException

    reason, files = damage(checkpoint), set(checkpoint.rglob("*"))
    if reason and checkpoint.is_dir():
        raise UserError(f"checkpoint: {checkpoint}: {reason}; take another one")
    try:
        reader = dcp.FileSystemReader(checkpoint / STATE)
        tensors: dict[str, Tensor] = {
            name: torch.empty(entry.size, dtype=dtype)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
            if name.startswith(PREFIX) and hasattr(entry, "size")
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except (OSError, CheckpointException) as exc:
        if files <= set(checkpoint.rglob("*")):
            raise
        raise UserError(
            f"checkpoint: {checkpoint} has gone meanwhile, as its run keeps the newest alone; take a newer one"
        ) from exc
    return tensors


def _merged(adapters: dict[str, Tensor], source: Path, dtype: torch.dtype, scale: float) -> dict[str, Tensor]:
    """Return the weights that adapters were trained over, merged with them."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, local_files_only=True)
    weights = {name: parameter.detach() for name, parameter in base.named_parameters()}
    for name in [name.removesuffix(f".{IN}") for name in adapters if name.endswith(f".{IN}")]:
        key = f"{name}.weight"
        weights[key] = merge(weights[key], adapters[f"{name}.{IN}"], adapters[f"{name}.{OUT}"], scale)
    return weights
