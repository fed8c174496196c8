"""A tower attends within each segment, both ways, and computes those of a length together."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from areal_async.trainer.engine import attention
from areal_async.trainer.engine.tower_attention import attend_within_images, segments_of

HEADS, WIDTH = 2, 8


def together(parts: list[Tensor], lengths: list[int]) -> Tensor:
    bounds = F.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    segments = segments_of(bounds, torch.device("cpu"))
    query, key, value = parts
    return attend_within_images(nn.Identity(), query, key, value, None, cu_seq_lens_q=segments, scaling=0.3)[0]


def alone(parts: list[Tensor], lengths: list[int]) -> Tensor:
    """Attend with the matrices of the definition, one segment at a time."""
    own = [part.split(lengths, dim=2) for part in parts]
    attended = [F.softmax(q @ k.transpose(2, 3) * 0.3, dim=-1) @ v for q, k, v in zip(*own, strict=True)]
    return torch.cat(attended, dim=2).transpose(1, 2)


@given(st.lists(st.sampled_from([1, 4, 6, 16]), min_size=1, max_size=8), st.integers(0, 99))
@settings(deadline=None, max_examples=50)
def test_attention_is_that_of_each_segment_alone(lengths: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    parts = [torch.randn(1, HEADS, sum(lengths), WIDTH, requires_grad=True) for _ in range(3)]
    direction = torch.randn(1, sum(lengths), HEADS, WIDTH)
    results = []
    for attend in (together, alone):
        output = attend(parts, lengths)
        results.append([output, *torch.autograd.grad((output * direction).sum(), parts)])

    for seen, expected in zip(*results, strict=True):
        assert torch.allclose(seen, expected, atol=1e-5)


def test_segments_of_a_length_are_attended_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As windows are, of which a large image has hundreds."""
    shapes: list[tuple[int, ...]] = []
    attend = F.scaled_dot_product_attention

    def watched(query: Tensor, *given: Tensor, **more: float) -> Tensor:
        shapes.append(tuple(query.shape))
        return attend(query, *given, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    lengths = [4, 4, 2, 4, 2]

    together([torch.randn(1, HEADS, sum(lengths), WIDTH) for _ in range(3)], lengths)

    assert shapes == [(2, HEADS, 2, WIDTH), (3, HEADS, 4, WIDTH)]


def test_a_gpu_is_given_the_segments_bounds_and_looks_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [4, 6, 1]
    library = torch.library.Library("aten", "IMPL")
    monkeypatch.setattr(attention, "has_kernel", lambda *_: True)
    library.impl("_flash_attention_forward", _forward, "CPU")
    parts = [torch.randn(1, HEADS, sum(lengths), WIDTH) for _ in range(3)]

    attended = together(parts, lengths)
    library._destroy()

    assert torch.allclose(attended, alone(parts, lengths), atol=1e-5)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, bounds_k: Tensor, longest: int, longest_k: int,
    dropout: float, is_causal: bool, debug: bool, *, scale: float, **windows: int | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Attend as torch's kernel does, said by the meaning of its arguments."""
    assert longest == longest_k == 6
    assert bounds.dtype == torch.int32
    assert torch.equal(bounds, bounds_k)
    assert not is_causal
    assert all(side in (None, -1) for side in windows.values())
    assert scale == 0.3
    none = torch.empty(0)
    parts = [part.transpose(0, 1)[None] for part in (q, k, v)]
    return alone(parts, bounds.diff().tolist())[0], torch.zeros(q.shape[1], len(q)), none, none, none
