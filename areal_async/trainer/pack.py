"""How sequences share rows, and how rows share ranks. Pure; no torch.

Every index comes back exactly once; no row is over its budget; the same input gives the same answer everywhere.
"""

from bisect import insort
from collections.abc import Sequence

from areal_async.errors import UserError


def pack(lengths: Sequence[int], *, token_budget: int) -> list[list[int]]:
    """Return the indices of the sequences in each row: first fit decreasing.

    Needs at most 11/9 of the fewest possible rows, plus one.

    Raises:
        UserError: a sequence is longer than a row.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    if order and lengths[order[0]] > token_budget:
        raise UserError(
            f"packing: got a sequence of {lengths[order[0]]} tokens, need at most trainer.token_budget={token_budget}; "
            "raise it, or keep sequences shorter"
        )
    rows: list[list[int]] = []
    room: list[int] = []
    for index in order:
        place = next((row for row, free in enumerate(room) if free >= lengths[index]), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(token_budget)
        rows[place].append(index)
        room[place] -= lengths[index]
    return rows


def balance(costs: Sequence[int], *, num_ranks: int) -> list[list[int]]:
    """Return the indices that each rank takes: the dearest first, always to the rank with the least so far.

    The largest sum is at most 4/3 of the smallest possible. Ranks may be left without any.
    """
    loads = [(0, rank) for rank in range(num_ranks)]
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, rank = loads.pop(0)
        shares[rank].append(index)
        insort(loads, (load + costs[index], rank))
    return shares
