"""The operator that SGLang takes from vLLM on a CPU, in plain torch: rotary position embedding, in place.

Letters: T tokens, H heads, D the head's size, R its rotated part (the first R of D), P positions the table covers.
"""

import torch


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """Turn every head of ``query`` and ``key`` by the angles of its token's position.

    Args:
        query: [T, H * D] or [T, H, D]; so is ``key``, with its own H. Both are overwritten.
        cos_sin_cache: [P, R]: R / 2 cosines, then as many sines.
        is_neox: pairs are (i, i + R / 2); otherwise neighbours (2 i, 2 i + 1).
    """
    angles_TR = cos_sin_cache.index_select(0, positions.reshape(-1)).float()
    cos_T1r, sin_T1r = angles_TR.unsqueeze(1).chunk(2, dim=-1)
    num_rotated = angles_TR.shape[-1]
    for tensor in (query, key):
        if tensor is not None:
            heads_THD = tensor.view(len(angles_TR), -1, head_size)
            _rotate(heads_THD[..., :num_rotated], cos_T1r, sin_T1r, is_neox=is_neox)


def _rotate(heads_THR: torch.Tensor, cos_T1r: torch.Tensor, sin_T1r: torch.Tensor, *, is_neox: bool) -> None:
    half = heads_THR.shape[-1] // 2
    first_THr = heads_THR[..., :half] if is_neox else heads_THR[..., 0::2]
    second_THr = heads_THR[..., half:] if is_neox else heads_THR[..., 1::2]
    x_THr, y_THr = first_THr.float(), second_THr.float()
    first_THr.copy_(x_THr * cos_T1r - y_THr * sin_T1r)
    second_THr.copy_(y_THr * cos_T1r + x_THr * sin_T1r)
