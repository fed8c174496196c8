"""How far the gradient of a bfloat16 head is from its exact one; a part of it where ranks share the words."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from areal_async.config.settings import TrainerSettings
from areal_async.trainer.engine.model import PolicyModel
from areal_async.trainer.engine.parallel.dims import ParallelDims, local_shard
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.parallel.tensor import divide_decoder
from areal_async.trainer.packing.rows import pack_rows, unsampled_row

NUM_TOKENS = 301


def head_errors(ranks: Ranks, model: Path) -> dict[str, float]:
    """Return the relative error of the head's gradient with all tokens at once, and with two in a chunk.

    The exact one is of float64, from the same states and weight.
    """
    dims = ParallelDims.of(ranks, TrainerSettings(num_ranks=ranks.size, tensor_parallel=ranks.size))
    return {name: _error(model, dims.tp_mesh, tokens) for name, tokens in (("whole", NUM_TOKENS), ("chunked", 2))}


def _error(model: Path, mesh: DeviceMesh | None, chunk_tokens: int) -> float:
    from transformers import AutoModelForCausalLM

    decoder: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    whole_VH = decoder.lm_head.weight.detach().double()
    random = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, len(whole_VH), (NUM_TOKENS,), generator=random).tolist()
    row = pack_rows([unsampled_row(token_ids, [False] + [True] * (NUM_TOKENS - 1))], torch.device("cpu"))
    # A part that all states share, as real ones have: the chunks' gradients then add up instead of cancelling.
    hidden_TH = torch.randn(NUM_TOKENS, whole_VH.shape[1], generator=random) * 0.3 + 0.5
    hidden_TH = hidden_TH.bfloat16()
    if mesh is not None:
        divide_decoder(decoder, mesh)
    policy = PolicyModel(decoder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "areal_async.trainer.engine.model.HEAD_CHUNK_ELEMENTS",
            chunk_tokens * len(local_shard(decoder.lm_head.weight)),
        )
        logprobs_S, _ = policy.read(hidden_TH, row)
    logprobs_S.sum().backward()
    exact_VH = _exact(hidden_TH[row.predicting_S].double(), whole_VH, row.targets_S)
    if mesh is not None:
        exact_VH = exact_VH.chunk(mesh.size())[mesh.get_local_rank()]
    return float((local_shard(decoder.lm_head.weight.grad).double() - exact_VH).norm() / exact_VH.norm())


def _exact(hidden_SH: Tensor, weight_VH: Tensor, targets_S: Tensor) -> Tensor:
    weight_VH.requires_grad_()
    (-F.cross_entropy(hidden_SH @ weight_VH.T, targets_S, reduction="sum")).backward()  # type: ignore[no-untyped-call]
    assert weight_VH.grad is not None
    return weight_VH.grad
