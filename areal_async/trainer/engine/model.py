"""Hugging Face decoders over packed rows: the policy answers with logprobs instead of logits, the critic with values.

Legend: T tokens of a packed row, S of them scored, H hidden, V vocabulary. Dropout is off always: the logprobs
trained on must be those the server reports.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from areal_async.config.settings import TrainerSettings
from areal_async.errors import UserError
from areal_async.trainer.engine.attention import Documents, check_attention
from areal_async.trainer.engine.compiled import check_compiler, compile_layers
from areal_async.trainer.engine.head import weight_of_chunks
from areal_async.trainer.engine.loading import CAUSAL_LM, CLASSIFIER, StoredWeights, empty_decoder, materialize
from areal_async.trainer.engine.lora import adapt, adapters
from areal_async.trainer.engine.parallel.dims import PP, ParallelDims, local_shard
from areal_async.trainer.engine.parallel.stages import Skipped, StagedModel
from areal_async.trainer.engine.parallel.tensor import divide_decoder, divided_scores, is_divided, num_local_words
from areal_async.trainer.engine.vision import embedded, prepare_tower, vision_tower
from areal_async.trainer.engine.weights import base_witnesses
from areal_async.trainer.packing.flops import language_model
from areal_async.trainer.packing.rows import PackedRow

M = TypeVar("M", bound=nn.Module)

HEAD_CHUNK_ELEMENTS = 1 << 28
"""Logits held at once, in elements: with 150,000 words about 1,800 tokens, 1 GiB in float32. Each chunk reads the whole
weight and writes its gradient: with fewer tokens that traffic, not the arithmetic, would set the pace."""
HEAD_SCALES = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Settings of models whose logits are more than their head's output."""
HEAD = "score.weight"
"""A critic's, which a folder may lack."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class DecoderModel(nn.Module):
    """A decoder over packed rows: what it says of their scored tokens, its kinds ``read`` from its last states."""

    num_outputs: int
    """Tensors of [S] that it answers a row with; a tuple where there are several."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, row: PackedRow) -> Any:
        """Return what ``read`` does of the row's tokens."""
        return self.read(self.states(row)[0], row)

    def states(self, row: PackedRow, received: Tensor | None = None) -> Tensor:
        """Return the decoder's last states [1, T, H], of the row's tokens or of another stage's states (``stages``)."""
        given = {"input_ids": row.token_ids_T[None]} if received is None else {"inputs_embeds": received}
        position_ids = row.position_ids_T[None]
        if row.images is not None:
            given = embedded(self.decoder, row.token_ids_T, row.images)
            position_ids = row.images.position_ids_4T[:, None]
        documents = Documents(lengths=row.lengths, device=row.token_ids_T.device)
        hidden: Tensor = language_model(self.decoder)(
            **given, position_ids=position_ids, documents=documents, use_cache=False
        ).last_hidden_state
        return hidden

    def read(self, hidden_TH: Tensor, row: PackedRow) -> Any:
        """Return what the last states [T, H] say of the row's scored tokens, in float32."""
        raise NotImplementedError


class PolicyModel(DecoderModel):
    """A decoder with its head of words, run together so that they are one unit for sharding."""

    num_outputs = 2

    def __init__(self, decoder: nn.Module, *, base_sha256: Mapping[str, str] | None = None) -> None:
        super().__init__(decoder)
        self.base_sha256 = dict(base_sha256 or {})
        """Where adapters are trained, hashes that tell what they are trained over (``weights.base_witnesses``)."""

    @property
    def chunk_tokens(self) -> int:
        """Tokens whose logits are held at once, in the forward pass."""
        return max(1, HEAD_CHUNK_ELEMENTS // num_local_words(self._head))

    def read(self, hidden_TH: Tensor, row: PackedRow) -> tuple[Tensor, Tensor]:
        """Return logprob and entropy of every scored token, both [S]."""
        hidden_SH = hidden_TH.index_select(0, row.predicting_S)
        if len(row.targets_S) <= self.chunk_tokens:
            return self._score(hidden_SH, row.targets_S, row.temperature)
        # The logits of one chunk are thrown away and made again in the backward pass.
        hidden, targets = hidden_SH.split(self.chunk_tokens), row.targets_S.split(self.chunk_tokens)
        one = row.temperature
        temperatures = one.split(self.chunk_tokens) if isinstance(one, Tensor) else [one] * len(hidden)
        weights = weight_of_chunks(self._head.weight, len(hidden))
        chunks = zip(hidden, targets, temperatures, weights, strict=True)
        scored = [checkpoint(self._score, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.cat([logprobs for logprobs, _ in scored]), torch.cat([entropy for _, entropy in scored])

    @property
    def _head(self) -> nn.Linear:
        return cast(nn.Linear, cast(Any, self.decoder).get_output_embeddings())

    def _score(
        self, hidden_SH: Tensor, targets_S: Tensor, temperature: float | Tensor, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        head = self._head
        outputs_SV = functional_call(head, {} if weight is None else {"weight": weight}, hidden_SH)
        logits_SV = outputs_SV.float() / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
        if is_divided(head):
            return divided_scores(head, logits_SV, targets_S)
        log_probs_SV = F.log_softmax(logits_SV, dim=-1)
        entropy_S = -(log_probs_SV.exp() * log_probs_SV).sum(-1)
        return -F.nll_loss(log_probs_SV, targets_S, reduction="none"), entropy_S


class Critic(DecoderModel):
    """A decoder with a head of one output: the value of what stands before a token, in units of reward.

    The whole is what transformers calls a sequence classifier of one label, read at every scored token instead of the
    last; so a reward model's folder starts a critic as it is.
    """

    num_outputs = 1

    def read(self, hidden_TH: Tensor, row: PackedRow) -> Tensor:
        """Return the value before every scored token [S]."""
        hidden_SH = hidden_TH.index_select(0, row.predicting_S)
        values_S1: Tensor = cast(Any, self.decoder).score(hidden_SH).float()
        return values_S1.sum(-1)  # of one; a view would be no output that FSDP can hook


def load_policy(
    folder: Path, dims: ParallelDims, trainer: TrainerSettings, *, dtype: torch.dtype, is_frozen: bool = False
) -> PolicyModel | StagedModel:
    """Load the model's weights in float32 and shard them over the ranks, layer by layer.

    Args:
        trainer: the layout, how FSDP2 shards, and the adapters that are trained in the model's stead, if any.
        dtype: of the forward and backward pass; parameters and gradients are float32.
        is_frozen: never trained; the parameters are then kept in ``dtype`` too, which gives the same numbers.

    Raises:
        UserError: the folder holds no causal language model that this can train.
    """
    has_adapters = trainer.lora.is_on and not is_frozen
    in_memory = dtype if is_frozen or has_adapters else torch.float32
    causal_lm = empty_decoder(CAUSAL_LM, folder, stored=in_memory)
    _check_trainable(causal_lm, folder)
    stored = StoredWeights.of(causal_lm, CAUSAL_LM, folder)
    causal_lm.requires_grad_(not is_frozen)
    prepare_tower(causal_lm, trainer, dtype)
    base_sha256: dict[str, str] = {}
    if has_adapters:
        adapt(causal_lm, trainer.lora, tower=vision_tower(causal_lm) if trainer.vision == "lora" else None)
        base_sha256 = base_witnesses(causal_lm, functools.partial(stored.read, dtype=in_memory))
    model = _laid_out(
        causal_lm, dims, trainer, dtype=dtype, wrap=functools.partial(PolicyModel, base_sha256=base_sha256)
    )
    for adapter in adapters(model.decoder).values():
        adapter.reset_adapter()
    stored.fill(model.decoder, CAUSAL_LM)
    return model


def load_critic(
    folder: Path, dims: ParallelDims, trainer: TrainerSettings, *, dtype: torch.dtype
) -> Critic | StagedModel:
    """Load a critic as ``load_policy`` does a policy; of a folder without a head for it, with a head of zeros.

    So a new critic's values are 0 everywhere, on any number of ranks, and no random number is drawn.

    Raises:
        UserError: the folder holds no decoder that this can train, or one with several labels.
    """
    classifier = empty_decoder(CLASSIFIER, folder, stored=torch.float32)
    _check_trainable(classifier, folder)
    if not hasattr(classifier, "score"):
        raise UserError(
            f"model: got {folder} of type {classifier.config.model_type}, whose classifier has no head named score; "
            "need a decoder such as Qwen2, Qwen3 or Llama for a critic"
        )
    stored = StoredWeights.of(classifier, CLASSIFIER, folder, optional=(HEAD,))
    prepare_tower(classifier, trainer, dtype)
    model = _laid_out(classifier, dims, trainer, dtype=dtype, wrap=Critic)
    for name, parameter in model.decoder.named_parameters():
        if name == HEAD and name not in stored:
            nn.init.zeros_(local_shard(parameter))
    stored.fill(model.decoder, CLASSIFIER)
    return model


def _laid_out(
    decoder: Any,
    dims: ParallelDims,
    trainer: TrainerSettings,
    *,
    dtype: torch.dtype,
    wrap: Callable[[nn.Module], M],
) -> M | StagedModel:
    """Return the model, whole or in stages, sharded; what its parameters are is still to be said."""
    if trainer.compile:
        check_compiler(dims.all.device)
    if dims.sizes[PP] == 1:
        model = wrap(decoder)
        _shard(model, decoder, dims, trainer, dtype)
        return model
    staged = StagedModel(decoder, dims, dtype=dtype, stages_per_rank=trainer.stages_per_rank, wrap=wrap)
    for stage in staged.own_stages:
        _shard(stage, stage.decoder, dims, trainer, dtype)
    return staged


def _shard(whole: nn.Module, decoder: Any, dims: ParallelDims, trainer: TrainerSettings, dtype: torch.dtype) -> None:
    if dims.tp_mesh is not None:
        divide_decoder(decoder, dims.tp_mesh)
    layers = [layer for layer in language_model(decoder).layers if not isinstance(layer, Skipped)]
    tower = vision_tower(decoder)
    blocks = [] if tower is None else list(cast(Any, tower).blocks)
    if trainer.compile:
        compile_layers(layers)
    if trainer.activation_checkpointing and any(one.requires_grad for one in whole.parameters()):
        for layer in (*layers, *blocks):
            # The forward alone, so that FSDP's hooks around it do not run again in the backward pass.
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=DTYPES[trainer.reduce_dtype]
    )
    # Pinned memory is a GPU's; without one the shards lie where they would anyway.
    offload = CPUOffloadPolicy(pin_memory=dims.all.device.type == "cuda") if trainer.cpu_offload else OffloadPolicy()
    for block in blocks:  # the angles of their positions stay in float32, as transformers has them
        uncast = replace(precision, cast_forward_inputs=False)
        fully_shard(block, mesh=dims.dp_mesh, mp_policy=uncast, offload_policy=offload)
    for module in (*layers, whole):
        fully_shard(module, mesh=dims.dp_mesh, mp_policy=precision, offload_policy=offload)
    materialize(decoder, torch.device("cpu") if trainer.cpu_offload else dims.all.device)


def _check_trainable(causal_lm: Any, path: Path) -> None:
    config, kind = causal_lm.config.get_text_config(), causal_lm.config.model_type
    if not hasattr(language_model(causal_lm), "layers"):
        raise UserError(f"model: got {path} of type {kind}, need a decoder with a list of layers")
    scaled = [name for name in HEAD_SCALES if getattr(config, name, None) not in (None, 1)]
    if scaled:
        raise UserError(
            f"model: got {path} of type {kind} with {scaled[0]}={getattr(config, scaled[0])}, "
            "need a head without scaling, such as Qwen2's, Qwen3's or Llama's"
        )
    check_attention(config, str(path))
