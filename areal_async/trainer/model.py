"""The policy: a Hugging Face decoder that answers with logprobs instead of logits.

Legend: T tokens of a packed row, S of them scored, H hidden, V vocabulary. Dropout is off always: the logprobs
trained on must be those the server reports.
"""

import functools
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from areal_async.errors import UserError
from areal_async.trainer.attention import attention_for, document_arguments, register_packed_attention
from areal_async.trainer.distributed import Ranks
from areal_async.trainer.rows import PackedRow

HEAD_CHUNK_ELEMENTS = 1 << 24
"""Logits held at once, in elements: with 150,000 words about 110 tokens, 64 MB in float32."""
HEAD_SCALES = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Settings of models whose logits are more than their head's output."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Policy(nn.Module):
    """The decoder and its head, run together so that they are one unit for sharding."""

    def __init__(self, causal_lm: nn.Module, *, temperature: float) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.temperature = temperature or 1.0
        """Divides the logits; 0 (greedy) leaves them, as servers report them."""
        config = cast(Any, causal_lm).config
        self.chunk_tokens = max(1, HEAD_CHUNK_ELEMENTS // config.vocab_size)
        self.attention = config._attn_implementation

    def forward(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        """Return logprob and entropy of every scored token, both float32 [S]."""
        causal_lm = cast(Any, self.causal_lm)
        hidden_TH = causal_lm.base_model(
            input_ids=row.token_ids_T[None],
            position_ids=row.position_ids_T[None],
            use_cache=False,
            **document_arguments(row.lengths, self.attention, row.token_ids_T.device),
        ).last_hidden_state[0]
        hidden_SH = hidden_TH.index_select(0, row.predicting_S)
        if len(row.targets_S) <= self.chunk_tokens:
            return self._score(hidden_SH, row.targets_S)
        # The logits of one chunk are thrown away and made again in the backward pass.
        chunks = zip(hidden_SH.split(self.chunk_tokens), row.targets_S.split(self.chunk_tokens), strict=True)
        scored = [checkpoint(self._score, hidden, targets, use_reentrant=False) for hidden, targets in chunks]
        return torch.cat([logprobs for logprobs, _ in scored]), torch.cat([entropy for _, entropy in scored])

    def _score(self, hidden_SH: Tensor, targets_S: Tensor) -> tuple[Tensor, Tensor]:
        head = cast(Any, self.causal_lm).get_output_embeddings()
        logits_SV = head(hidden_SH).float() / self.temperature
        log_probs_SV = F.log_softmax(logits_SV, dim=-1)
        entropy_S = -(log_probs_SV.exp() * log_probs_SV).sum(-1)
        return -F.nll_loss(log_probs_SV, targets_S, reduction="none"), entropy_S


def load_policy(
    folder: Path, ranks: Ranks, *, dtype: torch.dtype, temperature: float, activation_checkpointing: bool
) -> Policy:
    """Load the model's weights in float32 and shard them over the ranks, layer by layer.

    Args:
        dtype: of the forward and backward pass; parameters, gradients and their reduction are float32.

    Raises:
        UserError: the folder holds no causal language model that this can train.
    """
    # Imported here: it takes seconds, and the processes that only make batches never need it.
    import transformers

    register_packed_attention()
    transformers.utils.logging.disable_progress_bar()
    try:
        causal_lm = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention_for(ranks.device, dtype), local_files_only=True
        )
    except (ValueError, OSError, KeyError, ImportError) as exc:
        reason = str(exc).strip().partition("\n")[0]
        raise UserError(f"model: cannot load {folder} as a causal language model: {reason}") from exc
    _check_trainable(causal_lm, folder)
    causal_lm.eval()
    layers = list(cast(Any, causal_lm).base_model.layers)
    if activation_checkpointing:
        for layer in layers:
            # The forward alone, so that FSDP's hooks around it do not run again in the backward pass.
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    policy = Policy(causal_lm, temperature=temperature)
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    precision = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    return policy


def _check_trainable(causal_lm: Any, path: Path) -> None:
    config = causal_lm.config
    if not hasattr(causal_lm.base_model, "layers"):
        raise UserError(f"model: got {path} of type {config.model_type}, need a decoder with a list of layers")
    if getattr(causal_lm, "_weight_conversions", None):
        raise UserError(
            f"model: got {path} of type {config.model_type}, whose weights are stored in another layout than they are "
            "trained in; need a dense decoder such as Qwen2, Qwen3 or Llama"
        )
    scaled = [name for name in HEAD_SCALES if getattr(config, name, None) not in (None, 1)]
    if scaled:
        raise UserError(
            f"model: got {path} of type {config.model_type} with {scaled[0]}={getattr(config, scaled[0])}, "
            "need a head without scaling, such as Qwen2's, Qwen3's or Llama's"
        )
