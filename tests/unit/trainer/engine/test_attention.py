"""Attention over a packed row is each document's own, whatever its neighbours' lengths, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from areal_async.trainer.engine.attention import SIMILAR_TOKENS, DocumentBatches, Documents, packed_attention

CPU = torch.device("cpu")
HEADS, WIDTH = 4, 8


def alone(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    """Attend with the matrices of the definition, one document and one pair of heads at a time."""
    shared = HEADS // key.shape[1]
    outputs = []
    for q, k, v in zip(*(part.split(lengths, dim=2) for part in (query, key, value)), strict=True):
        heads = []
        for head in range(HEADS):
            scores = q[0, head] @ k[0, head // shared].T / WIDTH**0.5
            future = torch.ones_like(scores, dtype=torch.bool).triu(1)
            heads.append(F.softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ v[0, head // shared])
        outputs.append(torch.stack(heads, dim=1))
    return torch.cat(outputs)[None]


@given(
    st.lists(st.sampled_from([1, 2, 3, 7, 20, 39]), min_size=1, max_size=12),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 99),
)
@settings(deadline=None, max_examples=50)
def test_packed_attention_is_that_of_each_document_alone(lengths: list[int], shared_heads: int, seed: int) -> None:
    torch.manual_seed(seed)
    total = sum(lengths)
    # As models give them: a transposed view of the projection.
    parts = [torch.randn(1, total, heads, WIDTH, requires_grad=True) for heads in (HEADS, shared_heads, shared_heads)]
    direction = torch.randn(1, total, HEADS, WIDTH)
    results = []
    for attend in (_packed, alone):
        output = attend(*(part.transpose(1, 2) for part in parts), lengths)
        results.append([output, *torch.autograd.grad((output * direction).sum(), parts)])

    for seen, expected in zip(*results, strict=True):
        assert torch.allclose(seen, expected, atol=1e-5)


def _packed(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    return packed_attention(nn.Identity(), query, key, value, None, documents=Documents(lengths=lengths, device=CPU))[0]


def test_documents_of_similar_length_are_attended_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    attend = F.scaled_dot_product_attention

    def watched(query: Tensor, *given: Tensor, **more: object) -> Tensor:
        shapes.append(tuple(query.shape))
        return attend(query, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    lengths = [5, 40, 3, SIMILAR_TOKENS + 5, 41]
    query, key = torch.randn(1, HEADS, sum(lengths), WIDTH), torch.randn(1, 2, sum(lengths), WIDTH)

    _packed(query, key, key, lengths)

    assert shapes == [(2, HEADS, 41, WIDTH), (1, HEADS, SIMILAR_TOKENS + 5, WIDTH), (2, HEADS, 5, WIDTH)]


def test_what_fills_up_a_batch_gets_no_gradient_and_gives_none() -> None:
    batches = DocumentBatches.of([2, 4], CPU)

    assert batches.shapes == [(2, 4)]
    assert batches.taken_P.tolist() == [2, 3, 4, 5, 0, 1, 1, 1]
    assert batches.kept_T.tolist() == [4, 5, 0, 1, 2, 3]
    assert batches.spare.tolist() == [6, 7]
