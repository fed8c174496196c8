"""The plain decoder that most models are, from its files to its logits, with as few operations as it needs.

Of a decoding step of a small model a quarter or more is what transformers does around its layers, for every kind of
model there is, and of a server's start 2 seconds of a processor are its imports. Here is the one kind that Llama, Qwen2
and Qwen3 are: normalized before attention and before a gated network, rotated queries and keys. Others go through
transformers (``through_transformers.py``).

Modules have the names that they have there, so that weights and adapters are told apart as by any other server.

Letters: T tokens of this pass, E hidden size, D head size, Q query heads, H key-value heads.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.nn.functional as F
from torch import nn

from areal_async.inference.embedded.engine.compute.cache import ForwardPlan, SlotCache, attend

_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


class _Rope(msgspec.Struct, forbid_unknown_fields=True):
    rope_theta: float
    rope_type: Literal["default"] = "default"
    type: Literal["default"] = "default"
    partial_rotary_factor: None = None


class PlainConfig(msgspec.Struct, kw_only=True):
    """What is read of a ``config.json``, with what transformers takes where it says nothing.

    What has a value that is not computed here is of a type that does not take it.
    """

    model_type: Literal["llama", "qwen2", "qwen3"]
    architectures: list[Literal["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rms_norm_eps: float
    max_position_embeddings: int
    head_dim: int | None = None
    hidden_act: Literal["silu"] = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float | None = None
    rope_scaling: None = None
    partial_rotary_factor: None = None
    rope_parameters: _Rope | None = None
    sliding_window: int | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None
    eos_token_id: int | list[int] | None | msgspec.UnsetType = msgspec.UNSET
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: None = None
    auto_map: None = None

    def __post_init__(self) -> None:
        """Refuse what contradicts itself, as a value of another type is refused."""
        if self.eos_token_id is msgspec.UNSET:
            self.eos_token_id = 2 if self.model_type == "llama" else None
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"got {len(self.layer_types)} layer_types, need {self.num_hidden_layers}")

    def get_text_config(self) -> "PlainConfig":
        """Return itself, as transformers' configuration of a model that does not see."""
        return self

    @property
    def head_size(self) -> int:
        """D."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def theta(self) -> float | None:
        """Base of the rotation's frequencies; None where nothing says it."""
        return self.rope_parameters.rope_theta if self.rope_parameters is not None else self.rope_theta

    def window(self, index: int) -> int | None:
        """Return how many positions a layer sees; None for all, as with every layer of Llama."""
        if self.model_type == "llama" or not self.use_sliding_window:
            return None
        if self.layer_types is not None:
            is_sliding = self.layer_types[index] == "sliding_attention"
        else:
            is_sliding = index >= self.max_window_layers
        return self.sliding_window if is_sliding else None


class _Generation(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


class _Linear(nn.Module):
    """Torch's own would be filled with random numbers first, and for that import its compiler."""

    def __init__(self, num_in: int, num_out: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in))
        self.bias = nn.Parameter(torch.empty(num_out)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class _Embedding(nn.Module):
    def __init__(self, num_ids: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_ids, size))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Rounded to the model's precision before the weight is applied, as transformers does.
        return F.rms_norm(x, x.shape[-1:], None, self._eps).mul_(self.weight)


class _Attention(nn.Module):
    def __init__(self, config: PlainConfig, index: int) -> None:
        super().__init__()
        hidden, head = config.hidden_size, config.head_size
        queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
        is_qwen2 = config.model_type == "qwen2"
        has_bias = config.attention_bias or is_qwen2
        self.q_proj = _Linear(hidden, queries, bias=has_bias)
        self.k_proj = _Linear(hidden, keys, bias=has_bias)
        self.v_proj = _Linear(hidden, keys, bias=has_bias)
        self.o_proj = _Linear(queries, hidden, bias=has_bias and not is_qwen2)
        self.norms_heads = config.model_type == "qwen3"
        if self.norms_heads:
            self.q_norm, self.k_norm = _Norm(head, config.rms_norm_eps), _Norm(head, config.rms_norm_eps)
        self.head_size = head
        self.scaling = head**-0.5
        self.window = config.window(index)


class _Network(nn.Module):
    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        hidden, inner, has_bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = _Linear(hidden, inner, bias=has_bias)
        self.up_proj = _Linear(hidden, inner, bias=has_bias)
        self.down_proj = _Linear(inner, hidden, bias=has_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, config: PlainConfig, index: int) -> None:
        super().__init__()
        self.self_attn = _Attention(config, index)
        self.mlp = _Network(config)
        self.input_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)


class _Decoder(nn.Module):
    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.embed_tokens = _Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm = _Norm(config.hidden_size, config.rms_norm_eps)


class PlainModel(nn.Module):
    """A causal language model of plain layers."""

    def __init__(self, config: PlainConfig) -> None:
        """Make its modules, without numbers."""
        super().__init__()
        self.config = config
        self.generation_config = _Generation()
        with torch.device("meta"):
            self.model = _Decoder(config)
            self.lm_head = _Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        assert config.theta is not None
        exponents_D = torch.arange(0, config.head_size, 2, dtype=torch.int64).float() / config.head_size
        self._frequencies_D = 1.0 / (config.theta**exponents_D)

    @classmethod
    def read(
        cls, folder: Path, tensors: Mapping[str, torch.Tensor], *, dtype: str, device: torch.device
    ) -> "PlainModel | None":
        """Return the model in a folder; None for one of another kind, or of other tensors.

        Args:
            tensors: what its checkpoint holds, by name; copied.
            dtype: of the numbers; ``auto`` is what the configuration says, else that of all tensors.
        """
        try:
            config = msgspec.json.decode((folder / "config.json").read_bytes(), type=PlainConfig)
            generation = folder / "generation_config.json"
            ends = msgspec.json.decode(generation.read_bytes() if generation.is_file() else b"{}", type=_Generation)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        stored = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
        kind = config.dtype or config.torch_dtype or "".join(stored)
        wanted = _DTYPES.get(kind if dtype == "auto" else dtype)
        if config.theta is None or wanted is None:
            return None
        model = cls(config)
        own = model.state_dict(keep_vars=True)
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        tied = {head} if config.tie_word_embeddings else set()
        names = own.keys() - tied
        if tensors.keys() - tied != names or any(tensors[name].shape != own[name].shape for name in names):
            return None
        if tied & tensors.keys() and not torch.equal(tensors[head], tensors[embedding]):
            return None  # transformers does not tie what was stored as two
        made = {name: tensors[name].to(device, wanted, copy=True) for name in names}
        made |= dict.fromkeys(tied, made[embedding])
        model.load_state_dict(made, assign=True)
        if config.tie_word_embeddings:  # one parameter under two names, as before
            model.lm_head.weight = model.model.embed_tokens.weight
        model.generation_config, model._frequencies_D = ends, model._frequencies_D.to(device)
        return model.eval().requires_grad_(False)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.lm_head.weight.device

    def forward(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        plan: ForwardPlan,
        cache: SlotCache,
        kept: torch.Tensor | None,
    ) -> torch.Tensor:
        """Feed the tokens of one pass; return the logits [len(kept), V], or [T, V] for None.

        Args:
            kept: indices of the tokens whose logits are wanted.
        """
        cache.plan = plan
        hidden_TE = self.model.embed_tokens(ids_T)
        angles_TD = positions_T[:, None].float() * self._frequencies_D
        cos_TD, sin_TD = (part.to(hidden_TE.dtype) for part in (angles_TD.cos(), angles_TD.sin()))
        # The halves are exchanged, not negated, so the sine has the sign.
        cos_T1D = torch.cat((cos_TD, cos_TD), dim=-1)[:, None]
        sin_T1D = torch.cat((-sin_TD, sin_TD), dim=-1)[:, None]
        half = sin_TD.shape[-1]
        layer: Any
        for layer, slots in zip(self.model.layers, cache.layers, strict=True):
            attention = layer.self_attn
            normed_TE = layer.input_layernorm(hidden_TE)
            shape = (len(ids_T), -1, attention.head_size)
            query = attention.q_proj(normed_TE).view(shape)
            key = attention.k_proj(normed_TE).view(shape)
            value = attention.v_proj(normed_TE).view(shape)
            if attention.norms_heads:
                query, key = attention.q_norm(query), attention.k_norm(key)
            query, key = (x * cos_T1D + x.roll(half, -1) * sin_T1D for x in (query, key))
            key, value = slots.update(plan.laid_out(key), plan.laid_out(value))
            mixed, _ = attend(
                attention,
                plan.laid_out(query),
                key,
                value,
                None,
                attention.scaling,
                attention.window,
                slot_plan=plan,
            )
            hidden_TE = hidden_TE + attention.o_proj(mixed.reshape(len(ids_T), -1))
            hidden_TE = hidden_TE + layer.mlp(layer.post_attention_layernorm(hidden_TE))
        if kept is not None:
            hidden_TE = hidden_TE[kept]
        logits: torch.Tensor = self.lm_head(self.model.norm(hidden_TE))
        return logits
