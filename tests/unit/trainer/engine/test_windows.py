"""A packed row of a model with windows is each sequence alone in transformers' own attention, forward and backward.

No kernel of flash attention runs on a CPU. Its arithmetic is written out here for torch's two operators, by what torch
says of their arguments, and all that lies above them is torch's and ours as on a GPU.
"""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from areal_async.errors import UserError
from areal_async.trainer.engine import attention
from areal_async.trainer.engine.attention import PACKED, Documents, check_attention, register_packed_attention

LENGTHS = [9, 1, 30, 5, 12]
WINDOW = 6
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "mistral": {},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16},
}


@pytest.fixture(params=["batches", "kernel"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Attend as on a CPU, and as on a GPU in half precision."""
    library = torch.library.Library("aten", "IMPL")
    if request.param == "kernel":
        monkeypatch.setattr(attention, "has_kernel", lambda *_: True)
        library.impl("_flash_attention_forward", _forward, "CPU")
        library.impl("_flash_attention_backward", _backward, "CPU")
    yield request.param
    library._destroy()


@pytest.mark.parametrize("family", MODELS)
def test_a_packed_row_with_windows_is_each_sequence_alone_with_its_mask(family: str, path: str) -> None:
    model = _model(family)
    windows = [getattr(layer.self_attn, "sliding_window", WINDOW) for layer in model.model.layers]
    ids = torch.randint(0, 61, (1, sum(LENGTHS)))
    direction = torch.randn(sum(LENGTHS), 32)

    alone = torch.cat([model.model(input_ids=part).last_hidden_state[0] for part in ids.split(LENGTHS, dim=1)])
    expected = [alone, *torch.autograd.grad((alone * direction).sum(), list(model.model.parameters()))]
    model.set_attn_implementation(PACKED)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    documents = Documents(lengths=LENGTHS, device=ids.device)
    packed = model.model(input_ids=ids, position_ids=positions, documents=documents, use_cache=False)
    packed = packed.last_hidden_state[0]
    seen = [packed, *torch.autograd.grad((packed * direction).sum(), list(model.model.parameters()))]

    assert WINDOW in windows
    for one, other in zip(seen, expected, strict=True):
        assert torch.linalg.norm(one - other) <= 1e-4 * torch.linalg.norm(other)


def test_a_package_that_only_looks_like_flash_attention_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    model = _model("qwen2")

    model.set_attn_implementation(PACKED)
    documents = Documents(lengths=[3, 2], device=torch.device("cpu"))
    model.model(input_ids=torch.arange(5)[None], documents=documents, use_cache=False)

    assert "flash_attn" not in sys.modules


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"softcap": 50.0}, "soft caps"),
        ({"s_aux": torch.zeros(4)}, "sinks"),
        ({"attention_mask": torch.ones(1, 1, 5, 5)}, "a mask"),
    ],
)
def test_what_is_not_carried_is_refused_by_name(asked: dict[str, Any], told: str) -> None:
    states = torch.zeros(1, 4, 5, 8)

    with pytest.raises(UserError, match=f"got attention with {told}.*, need plain causal attention"):
        attention.packed_attention(
            torch.nn.Identity(), states, states, states,
            documents=Documents(lengths=[5], device=states.device), **{"attention_mask": None, **asked},
        )  # fmt: skip


def test_a_window_that_a_model_keeps_by_its_mask_alone_is_refused() -> None:
    module = cast(Any, torch.nn.Identity())
    module.config, module.layer_idx = _model("qwen2").config, 1
    states = torch.zeros(1, 4, 5, 8)
    documents = Documents(lengths=[5], device=states.device)

    with pytest.raises(UserError, match="a window by a mask alone"):
        attention.packed_attention(module, states, states, states, None, documents=documents)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"model_type": "gemma2"}, "attn_logit_softcapping=50.0"),
        ({"model_type": "qwen3_next", "num_experts": 0}, "layers of linear_attention"),
    ],
)
def test_a_model_of_other_attention_is_refused_when_it_is_loaded(given: dict[str, Any], told: str) -> None:
    from transformers import AutoConfig

    with pytest.raises(UserError, match=f"got some/model of type {given['model_type']} with {told}, need plain"):
        check_attention(AutoConfig.for_model(**given), "some/model")


def _model(family: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    register_packed_attention()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=128, sliding_window=WINDOW, initializer_range=0.2,
        **MODELS[family],
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def _attend(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, scale: float, left: int) -> Tensor:
    """Attend by the definition; ``left``: tokens seen before one's own, -1 for all."""
    assert bounds.dtype == torch.int32
    assert bounds[0] == 0
    assert bounds[-1] == len(query)
    key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for part in (key, value))
    outputs = []
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        scores = torch.einsum("qhd,khd->hqk", query[start:end], key[start:end]) * scale
        ago = torch.arange(end - start)[:, None] - torch.arange(end - start)
        is_hidden = (ago < 0) | (ago > left) if left >= 0 else ago < 0
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, value[start:end]))
    return torch.cat(outputs)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, bounds_k: Tensor, longest: int, longest_k: int,
    dropout: float, is_causal: bool, debug: bool, *, scale: float, window_size_left: int, window_size_right: int,
    **unset: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert longest == longest_k == max(LENGTHS)
    assert torch.equal(bounds, bounds_k)
    # torch says causal only of a window without an end; the kernel, of any that ends at one's own token.
    assert is_causal == (window_size_left < 0)
    assert window_size_right == 0
    assert not any(value is not None for value in unset.values())
    none = torch.empty(0)
    return _attend(q, k, v, bounds, scale, window_size_left), torch.zeros(q.shape[1], len(q)), none, none, none


def _backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, bounds: Tensor, bounds_k: Tensor,
    longest: int, longest_k: int, dropout: float, is_causal: bool, seed: Tensor, unused: Tensor,
    *, scale: float, window_size_left: int, window_size_right: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    parts = [part.detach().requires_grad_() for part in (q, k, v)]

    def differentiate() -> tuple[Tensor, ...]:
        return torch.autograd.grad(_attend(*parts, bounds, scale, window_size_left), parts, gradient)

    with ThreadPoolExecutor() as thread:  # below an operator nothing is recorded, in its own thread
        return thread.submit(differentiate).result()
