"""Which of a rank's sequences share a row, so that the rows which ranks compute side by side are alike.

Ranks wait for the slowest in every row: its layers are gathered for all of them together. So each rank divides its
sequences into as many rows as the rank that needs the most, and of the ways to do that they take the one whose rows
cost least when the k-th costs what the dearest k-th of any rank does.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.packing.flops import DecoderFlops
from areal_async.trainer.packing.pack import Parts, fill, pack, part_costs, spread
from areal_async.trainer.packing.rows import TrainRow


def divide(
    rows: Sequence[TrainRow],
    *,
    flops: DecoderFlops,
    token_budget: int,
    ranks: Ranks,
    fit: Callable[[int], int] | None = None,
) -> Parts:
    """Return the indices of the sequences in each row; as many rows on every rank, the last of which may be empty.

    A collective, of one number and of two per row.

    Args:
        fit: makes of the rows that are needed the number that suits the model's layout, not a smaller one.

    Raises:
        UserError: a sequence is longer than a row.
    """
    lengths = [row.num_tokens for row in rows]
    costs = [flops.forward(row.num_tokens, int(row.loss_mask.sum())) for row in rows]
    num_rows = ranks.largest(len(pack(lengths, token_budget=token_budget)))
    if fit is not None and num_rows:
        num_rows = fit(num_rows)
    ways = divisions(lengths, costs, token_budget=token_budget, num_rows=num_rows)
    if ranks.size == 1 or not num_rows:
        return ways[0]
    dearest = torch.tensor([part_costs(way, costs) for way in ways], dtype=torch.float64, device=ranks.device)
    takes = ranks.reduce(dearest, dist.ReduceOp.MAX).sum(1)
    return ways[int(takes.argmin().item())]


def divisions(lengths: Sequence[int], costs: Sequence[int], *, token_budget: int, num_rows: int) -> list[Parts]:
    """Return the ways to divide one rank's sequences into ``num_rows`` rows, of which ranks choose one together. Pure.

    Raises:
        UserError: a sequence is longer than a row.
    """
    packed = pack(lengths, token_budget=token_budget)
    return [
        spread(lengths, costs, token_budget=token_budget, num_rows=num_rows),
        fill(packed, costs, num_rows=num_rows),
    ]
