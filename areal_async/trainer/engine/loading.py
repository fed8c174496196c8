"""Weights from a Hugging Face folder into a model that is laid out already: each rank reads its own shards alone.

A decoder is made without memory (on torch's meta device), cut and sharded, and only then given some: a rank never
holds more than its own part of the model and one shard as the file has it.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from areal_async.errors import UserError
from areal_async.process.gc_pauses import importing
from areal_async.trainer.engine.attention import PACKED, register_packed_attention
from areal_async.trainer.engine.tower_attention import WITHIN_IMAGES, register_tower_attention
from areal_async.trainer.engine.vision import sees, stored_name

CAUSAL_LM, CLASSIFIER = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
SEEING_LM = "AutoModelForImageTextToText"
"""What transformers has a causal language model that sees under."""
KINDS = {CAUSAL_LM: "causal language model", CLASSIFIER: "decoder with a head of one output"}


def empty_decoder(kind: str, folder: Path, *, stored: torch.dtype) -> Any:
    """Return a model of the folder's config by one of transformers' auto classes, its parameters on the meta device.

    What is computed instead of stored, such as the frequencies of rotary embeddings, is there.

    Args:
        stored: type of the parameters.

    Raises:
        UserError: there is no such model, or it is stored in another layout than it is trained in.
    """
    # Imported here: it takes seconds, and the processes that only make batches never need it.
    with importing():
        import transformers
        import transformers.modeling_utils
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

    register_packed_attention()
    register_tower_attention()
    labels = {"num_labels": 1} if kind == CLASSIFIER else {}
    with _refused(kind, folder):
        config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, **labels)
        with torch.device("meta"):
            # One name for both would reach the tower too, which looks both ways.
            attention: Any = {"text_config": PACKED, "vision_config": "sdpa"} if sees(config) else PACKED
            if kind == CLASSIFIER and sees(config):
                decoder = _seeing_classifier(config)._from_config(config, dtype=stored, attn_implementation=attention)
            else:
                auto_class: Any = getattr(transformers, SEEING_LM if sees(config) else kind)
                decoder = auto_class.from_config(config, dtype=stored, attn_implementation=attention)
    if sees(config):  # not before: transformers looks for a package behind each name that it does not know so
        decoder.base_model.visual.config._attn_implementation = WITHIN_IMAGES
    is_quantized = getattr(config, "quantization_config", None) is not None
    conversions = get_model_conversion_mapping(decoder, add_legacy=False)
    if is_quantized or any(isinstance(one, WeightConverter) for one in conversions):
        raise UserError(
            f"model: got {folder} of type {config.model_type}, whose weights are stored in another layout than they "
            "are trained in; need a dense decoder such as Qwen2, Qwen3 or Llama"
        )
    stored_buffers = decoder.state_dict().keys() - dict(decoder.named_parameters(remove_duplicate=False)).keys()
    if stored_buffers:
        raise UserError(
            f"model: got {folder} of type {config.model_type}, which stores {min(stored_buffers)} beside its "
            "parameters; need a decoder that stores parameters alone, such as Qwen2, Qwen3 or Llama"
        )
    _compute_buffers(decoder)
    return decoder.eval()


def _seeing_classifier(config: Any) -> Any:
    """Return the class of a sequence classifier that sees, made as transformers makes those that do not."""
    from transformers import MODEL_MAPPING
    from transformers.modeling_layers import GenericForSequenceClassification

    model: Any = MODEL_MAPPING[type(config)]
    base = model.__base__
    return type(base.__name__.replace("PreTrainedModel", "Classifier"), (GenericForSequenceClassification, base), {})


class StoredWeights:
    """The safetensors of a folder, and what each of a decoder's parameters is called there."""

    def __init__(self, folder: Path, names: Mapping[str, str], files: Mapping[str, str]) -> None:
        """Make it with ``of``.

        Args:
            names: of the decoder's parameters -> in the files.
            files: the latter -> path of the file.
        """
        self._folder = folder
        self._names = names
        self._files = files

    @classmethod
    def of(cls, decoder: Any, kind: str, folder: Path, *, optional: Sequence[str] = ()) -> Self:
        """Find the parameters of a whole decoder in the files' heads. No collective.

        Args:
            optional: parameters that may be missing.

        Raises:
            UserError: others are missing, or have another shape.
        """
        from torch.distributed.checkpoint import HuggingFaceStorageReader

        with _refused(kind, folder):
            heads = HuggingFaceStorageReader(str(folder)).read_metadata()
        entries = heads.state_dict_metadata
        prefix = f"{decoder.base_model_prefix}."
        names: dict[str, str] = {}
        for name, aliases in _aliases(decoder).items():
            # Tied weights lie in the files under one of their names; a model without its head leaves the prefix out.
            names_of = [(alias, alias.removeprefix(prefix), stored_name(alias, decoder.config)) for alias in aliases]
            known = [one for names in names_of for one in names if one in entries]
            if not known and name not in optional:
                raise UserError(f"model: cannot load {folder} as a {KINDS[kind]}: no safetensors there hold {name}")
            shape = decoder.get_parameter(name).shape
            if known and cast(Any, entries[known[0]]).size != shape:
                raise UserError(
                    f"model: cannot load {folder} as a {KINDS[kind]}: {known[0]} has shape "
                    f"{list(cast(Any, entries[known[0]]).size)}, and config.json says {list(shape)}"
                )
            names |= dict.fromkeys(aliases, known[0]) if known else {}
        return cls(folder, names, {index.fqn: one.relative_path for index, one in heads.storage_data.items()})

    def __contains__(self, name: str) -> bool:
        """Say whether the files have a parameter."""
        return name in self._names

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return all of one parameter, on the CPU. No collective."""
        from safetensors import safe_open

        stored = self._names[name]
        with safe_open(self._files[stored], framework="pt") as file:
            tensor: Tensor = file.get_tensor(stored).to(dtype)
        return tensor

    def fill(self, decoder: nn.Module, kind: str) -> None:
        """Read this rank's shards into the decoder's parameters, whose memory is there. No collective.

        Raises:
            UserError: a file cannot be read.
        """
        import torch.distributed.checkpoint as dcp

        shards = {self._names[name]: one.detach() for name, one in decoder.named_parameters() if name in self._names}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # nobody else has to know
                dcp.load(shards, storage_reader=dcp.HuggingFaceStorageReader(str(self._folder)), no_dist=True)
        except dcp.CheckpointException as exc:
            reasons = "; ".join(sorted({f"{type(one).__name__}: {one}" for one, _ in exc.failures.values()}))
            raise UserError(f"model: cannot load {self._folder} as a {KINDS[kind]}: {reasons}") from exc


def materialize(decoder: nn.Module, device: torch.device) -> None:
    """Give the parameters that this rank holds memory on ``device``. After sharding; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    values: dict[str, nn.Parameter] = {}
    for name, parameter in decoder.named_parameters(remove_duplicate=False):
        if id(parameter) not in made:
            made[id(parameter)] = nn.Parameter(
                torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad
            )
        values[name] = made[id(parameter)]
    decoder.load_state_dict(values, assign=True)


def _aliases(decoder: nn.Module) -> dict[str, list[str]]:
    """Return {name: all names} of every parameter; tied ones come once."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in decoder.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in by_id.values()}


def _compute_buffers(decoder: Any) -> None:
    """Have the model fill its buffers as transformers has it do after loading; on the meta device nothing else is."""
    for module in decoder.modules():
        if module._buffers:
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else torch.empty_like(buffer, device="cpu")
            decoder._init_weights(module)


@contextmanager
def _refused(kind: str, folder: Path) -> Iterator[None]:
    """Make one sentence of what transformers and safetensors say of a folder that they cannot read."""
    from safetensors import SafetensorError

    try:
        yield
    except (ValueError, OSError, KeyError, ImportError, RuntimeError, SafetensorError) as exc:
        reason = str(exc).strip().partition("\n")[0]
        raise UserError(f"model: cannot load {folder} as a {KINDS[kind]}: {reason}") from exc
