"""Which of a rank's sequences share a row, so that the rows which ranks compute side by side are alike.

Ranks wait for the slowest in every row: its layers are gathered for all of them together. So each rank divides its
sequences into as many rows as the rank that needs the most, and of the ways to do that they take the one whose rows
cost least when the k-th costs what the dearest k-th of any rank does.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from areal_async.algorithms.aggregation import Aggregation, TokenShare
from areal_async.trainer.engine.parallel.dims import ParallelDims
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.packing.flops import DecoderFlops
from areal_async.trainer.packing.images import row_costs, with_images
from areal_async.trainer.packing.pack import Parts, fill, pack, part_costs, spread
from areal_async.trainer.packing.rows import PackedRow, TrainRow, empty_row, pack_rows, unsampled_row
from areal_async.vision.spec import VisionSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPacker:
    """Packs the rows of one model's ranks, so that the mini-batches of all have as many packed ones."""

    dims: ParallelDims
    flops: DecoderFlops
    token_budget: int
    """Most tokens of a packed row."""
    fit: Callable[[int], int]
    """Makes of the rows that are needed the number that suits the model's layout, not a smaller one."""
    num_together: int
    """Rows, one after the other, that always share a packed one."""
    vision: VisionSpec | None = None
    """How the model sees; None where it does not."""

    def minibatches(
        self, rows: Sequence[TrainRow], *, num_minibatches: int, aggregation: Aggregation, columns: Sequence[str] = ()
    ) -> list[list[PackedRow]]:
        """Return the packed rows of each update; those that train nothing are left out. A collective.

        Args:
            columns: that the rows of every rank bring.
        """
        trained = [row for row in rows if row.loss_mask.any()]
        # A trajectory's rows share its position, and are together on one rank and in one mini-batch.
        lengths = Counter[int]()
        for row in trained:
            lengths[row.index] += int(row.loss_mask.sum())
        minibatches = []
        for turn in range(num_minibatches):
            own = [row for row in trained if row.index % num_minibatches == turn]
            shares = [aggregation.share(lengths[row.index]) for row in own]
            minibatches.append(self.pack(own, self.divide(own), shares, columns))
        return minibatches

    def divide(self, rows: Sequence[TrainRow]) -> Parts:
        """Return which rows share a packed one: as many parts on every rank, some perhaps empty. A collective."""
        count = self.num_together
        # As one sequence the attention of rows that stay together costs more than it does: alike for all, which is all
        # that counts.
        joined = rows if count == 1 else [_joined(rows[place : place + count]) for place in range(0, len(rows), count)]
        parts = divide(
            joined,
            flops=self.flops,
            token_budget=self.token_budget,
            ranks=self.dims.data,
            fit=self.fit,
            vision=self.vision,
        )
        return [[count * member + place for member in part for place in range(count)] for part in parts]

    def pack(
        self,
        rows: Sequence[TrainRow],
        parts: Parts,
        shares: Sequence[TokenShare] | None = None,
        columns: Sequence[str] = (),
    ) -> list[PackedRow]:
        """Return the packed rows of ``divide``'s parts, an empty one for each that is empty.

        A collective where the model sees.

        Raises:
            ValueError: images are none of this model's, or other ones than the tokens say.
        """
        device = self.dims.all.device
        packed = [
            pack_rows([rows[i] for i in members], device, [shares[i] for i in members] if shares else None)
            if members
            else empty_row(device, columns)
            for members in parts
        ]
        has_images = any(row.images for row in rows)
        if self.vision is None:
            if has_images:
                raise ValueError("packing: got rows with images for a model that does not see, need rows of text")
            return packed
        # The tower is gathered as it runs, and its gradients are summed: all rows of all ranks have them, or none.
        if not self.dims.data.largest(int(has_images)):
            return packed
        return with_images(packed, [[rows[i] for i in members] for members in parts], self.vision)


def divide(
    rows: Sequence[TrainRow],
    *,
    flops: DecoderFlops,
    token_budget: int,
    ranks: Ranks,
    fit: Callable[[int], int] | None = None,
    vision: VisionSpec | None = None,
) -> Parts:
    """Return the indices of the sequences in each row; as many rows on every rank, the last of which may be empty.

    A collective, of one number and of two per row.

    Args:
        fit: makes of the rows that are needed the number that suits the model's layout, not a smaller one.
        vision: how the model sees; None where it does not.

    Raises:
        UserError: a sequence is longer than a row.
    """
    lengths = [row.num_tokens for row in rows]
    costs = row_costs(rows, flops, vision)
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


def _joined(rows: Sequence[TrainRow]) -> TrainRow:
    """Return a row as long as these together, for the arithmetic of packing alone."""
    token_ids = [token_id for row in rows for token_id in row.token_ids]
    loss_mask = [is_trained for row in rows for is_trained in row.loss_mask]
    return unsampled_row(token_ids, loss_mask, index=rows[0].index)
