"""A checkpoint's policy as a plain Hugging Face folder: what ``model.path``, and any other program, can load.

Needs no process group, and no more of the model in memory than one file of the folder: it does not matter on how many
ranks and in which layout the checkpoint was made. The folder is the one that the trainer would have written.
"""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal_async.config.settings import LoraSettings, ModelSettings
from areal_async.errors import UserError
from areal_async.inference.weight_group import describe
from areal_async.process.atomic_folders import LEDGER
from areal_async.process.hub import local_model
from areal_async.trainer.engine.checkpoint import PARAMETERS, STATE
from areal_async.trainer.engine.digests import damage
from areal_async.trainer.engine.loading import CAUSAL_LM, StoredWeights, empty_decoder
from areal_async.trainer.engine.lora import IN, OUT, is_adapter, merge
from areal_async.trainer.engine.model import DTYPES
from areal_async.trainer.engine.model_folder import ModelFolder
from areal_async.trainer.engine.vision import stored_name
from areal_async.trainer.engine.weights import Bucket

PREFIX = f"{PARAMETERS}."


def export_policy(
    checkpoint: Path, directory: Path, *, model: ModelSettings, lora: LoraSettings | None = None
) -> dict[str, str]:
    """Write the folder atomically, in the dtype that is served; return {safetensors file: sha256}.

    Takes as much host memory as a file's weights (``model_folder.FILE_BYTES``) and a rank's shard of a parameter.
    Adapters are merged into ``model.path``.

    Raises:
        UserError: there is no checkpoint, it is of another model, or a live run has removed it meanwhile.
    """
    if not (checkpoint / LEDGER).is_file():
        raise UserError(f"checkpoint: {checkpoint} is not one; name one of those in {checkpoint.parent}")
    source, dtype = local_model(model.path), DTYPES[model.dtype]
    decoder = empty_decoder(CAUSAL_LM, source, stored=dtype)
    saved = _SavedPolicy(checkpoint, decoder.config)
    folder = ModelFolder.of(decoder, source, dtype)
    if lora is None or not lora.is_on:
        return folder.write(saved.read, directory)
    saved.check_adapters(folder.files)
    weights = StoredWeights.of(decoder, CAUSAL_LM, source)
    names = {stored_name(name, decoder.config): name for name, _ in decoder.named_parameters(remove_duplicate=False)}
    adapters = saved.read([describe(name, one.to(dtype)) for name, one in saved.parameters.items() if is_adapter(name)])

    def read(name: str) -> Tensor:
        return weights.read(names[name], dtype)

    return folder.write(functools.partial(_merged, read, adapters, lora.scale), directory)


class _SavedPolicy:
    """The parameters in a checkpoint, read some at a time."""

    def __init__(self, checkpoint: Path, config: Any) -> None:
        """Read what is there, and no parameter. Parameters are called here as in the folder of a model of ``config``.

        Raises:
            UserError: some of its files are damaged, or have gone meanwhile.
        """
        import torch.distributed.checkpoint as dcp  # imported here: it takes seconds

        self._checkpoint = checkpoint
        reason, self._files = damage(checkpoint), set(checkpoint.rglob("*"))
        if reason and checkpoint.is_dir():
            raise UserError(f"checkpoint: {checkpoint}: {reason}; take another one")
        with self._still_there():
            self._reader = dcp.FileSystemReader(checkpoint / STATE)
            entries = self._reader.read_metadata().state_dict_metadata
        saved = {
            stored_name(name.removeprefix(PREFIX), config): (name, entry.size)
            for name, entry in entries.items()
            if name.startswith(PREFIX) and hasattr(entry, "size")
        }
        self._saved_names = {name: one for name, (one, _) in saved.items()}
        self.parameters = {name: torch.empty(size, device="meta") for name, (_, size) in saved.items()}
        """Their names and shapes, without content."""

    def read(self, bucket: Bucket) -> dict[str, Tensor]:
        """Return some of the parameters, in the bucket's types.

        Raises:
            UserError: some are not there, are of another shape, or have gone meanwhile.
        """
        import torch.distributed.checkpoint as dcp

        for spec in bucket:
            found = self.parameters.get(spec.name)
            if found is None or list(found.shape) != spec.shape:
                got = "none" if found is None else f"one of {list(found.shape)}"
                raise self._stranger(f"got {got} for {spec.name}, need one of {spec.shape}")
        tensors = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in bucket}
        with self._still_there(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            named = {self._saved_names[name]: tensor for name, tensor in tensors.items()}
            dcp.load(named, storage_reader=self._reader, no_dist=True)
        return tensors

    def check_adapters(self, files: Iterable[Bucket]) -> None:
        """Make sure that there are adapters, and that each is of one of these weights.

        Raises:
            UserError: they are of another model, or none are there.
        """
        shapes = {spec.name: spec.shape for bucket in files for spec in bucket}
        layers = [name.removesuffix(f".{IN}") for name in self.parameters if name.endswith(f".{IN}")]
        if not layers:
            raise self._stranger("got no adapters, need some, as trainer.lora.rank says")
        for layer in layers:
            got = [self.parameters[f"{layer}.{OUT}"].shape[0], self.parameters[f"{layer}.{IN}"].shape[1]]
            need = shapes.get(f"{layer}.weight")
            if got != need:
                raise self._stranger(
                    f"got an adapter of {got} for {layer}, need {f'one of {need}' if need else 'none'}"
                )

    def _stranger(self, what: str) -> UserError:
        return UserError(
            f"checkpoint: {self._checkpoint} is of another model than model.path: {what}; "
            "name the model that it was trained from"
        )

    @contextmanager
    def _still_there(self) -> Iterator[None]:
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            yield
        except (OSError, CheckpointException) as exc:
            if self._files <= set(self._checkpoint.rglob("*")):
                raise
            gone = f"checkpoint: {self._checkpoint} has gone meanwhile"
            raise UserError(f"{gone}, as its run keeps the newest alone; take a newer one") from exc


def _merged(
    read: Callable[[str], Tensor], adapters: dict[str, Tensor], scale: float, bucket: Bucket
) -> dict[str, Tensor]:
    """Return weights that adapters were trained over, merged with them."""
    tensors = {spec.name: read(spec.name) for spec in bucket}
    for name, weight in tensors.items():
        layer = name.removesuffix(".weight")
        if f"{layer}.{IN}" in adapters:
            tensors[name] = merge(weight, adapters[f"{layer}.{IN}"], adapters[f"{layer}.{OUT}"], scale)
    return tensors
