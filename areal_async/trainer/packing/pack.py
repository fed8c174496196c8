"""How sequences share rows, and how rows share ranks. Pure; no torch.

Every index comes back exactly once; no row is over its budget; the same input gives the same answer everywhere.

What is minimised: ranks step through their rows together and in each wait for the slowest, so a step takes
``sum over k of max over ranks of cost(row k of the rank)``, never less than the dearest rank's sum. ``balance``
makes that sum small; ``pack`` finds the fewest rows; ``spread`` and ``fill`` then give every rank as many rows as the
one with the most, dearest first, so that the rows that meet are alike (``division`` chooses between them).
"""

import heapq
from bisect import insort
from collections.abc import Sequence

from areal_async.errors import UserError

Parts = list[list[int]]
"""Indices, divided."""


def pack(lengths: Sequence[int], *, token_budget: int) -> Parts:
    """Return the indices of the sequences in each row: first fit decreasing.

    Needs at most 11/9 of the fewest possible rows, plus 6/9.

    Raises:
        UserError: a sequence is longer than a row.

    Source: G. Dosa, The tight bound of first fit decreasing bin-packing algorithm, ESCAPE 2007.
    """
    order = _decreasing(lengths)
    if order and lengths[order[0]] > token_budget:
        raise UserError(
            f"packing: got a sequence of {lengths[order[0]]} tokens, need at most trainer.token_budget={token_budget}; "
            "raise it, or keep sequences shorter"
        )
    rows: Parts = []
    room: list[int] = []
    for index in order:
        place = next((row for row, free in enumerate(room) if free >= lengths[index]), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(token_budget)
        rows[place].append(index)
        room[place] -= lengths[index]
    return rows


def spread(lengths: Sequence[int], costs: Sequence[int], *, token_budget: int, num_rows: int) -> Parts:
    """Return the indices of the sequences in each of ``num_rows`` rows of even cost, the dearest row first.

    Of the divisions that stay within the budget (``balance``'s, the dearest sequence to the cheapest row with room,
    ``pack``'s) it is the one whose dearest row is cheapest. Rows are left empty where there are fewer sequences.

    Raises:
        UserError: a sequence is longer than a row.
        ValueError: the rows are too few even for ``pack``.
    """
    ways = [fill(pack(lengths, token_budget=token_budget), costs, num_rows=num_rows)]
    if num_rows:
        ways.append(balance(costs, num_ranks=num_rows))
        ways.append(_cheapest_first(costs, num_rows, lengths=lengths, room=token_budget))
    within = [rows for rows in ways if rows and max(part_costs(rows, lengths)) <= token_budget]
    return _dearest_first(min(within, key=lambda rows: max(part_costs(rows, costs))), costs) if within else []


def fill(rows: Parts, costs: Sequence[int], *, num_rows: int) -> Parts:
    """Return the rows, the dearest first, and empty ones after them until there are ``num_rows``.

    Raises:
        ValueError: there are more of them already.
    """
    if len(rows) > num_rows:
        raise ValueError(f"packing: got {len(rows)} rows, need at most {num_rows}")
    return _dearest_first(rows + [[] for _ in range(num_rows - len(rows))], costs)


def balance(costs: Sequence[int], *, num_ranks: int) -> Parts:
    """Return the indices that each rank takes, so that the dearest rank is cheap. Ranks may be left without any.

    Of the largest differencing method and of the greedy one (the dearest first, always to the rank with the least so
    far) it is the one whose largest sum is smaller: at most 4/3 of the smallest possible. Sums differ by one cost at
    most.

    Source: Karmarkar and Karp, The differencing method of set partitioning, UCB/CSD 82/113, 1982; the bound is
    Graham's, SIAM J. Appl. Math. 17 (1969), for the greedy one.
    """
    divisions = (_differenced(costs, num_ranks), _cheapest_first(costs, num_ranks, lengths=[0] * len(costs), room=0))
    return min(divisions, key=lambda parts: max(part_costs(parts, costs)))


def part_costs(parts: Parts, costs: Sequence[int]) -> list[int]:
    """Return each part's sum."""
    return [sum(costs[index] for index in part) for part in parts]


def _differenced(costs: Sequence[int], num_parts: int) -> Parts:
    """Take the two divisions that differ most inside, and join the heavy parts of one to the light parts of the other.

    It starts from one division per index. A division is kept as (sum, indices) of the parts that are not empty,
    heaviest first, which keeps early joins cheap.
    """
    if num_parts == 1:
        return [list(range(len(costs)))]
    heap = [(-cost, number, [(cost, [number])]) for number, cost in enumerate(costs)]
    heapq.heapify(heap)
    for number in range(len(costs), 2 * len(costs) - 1):
        _, _, left = heapq.heappop(heap)
        _, _, right = heapq.heappop(heap)
        num_alone = max(num_parts - len(right), 0)
        joined = left[:num_alone] + right[: num_parts - len(left)]
        for place in range(num_alone, len(left)):
            (load, members), (other_load, others) = left[place], right[num_parts - 1 - place]
            joined.append((load + other_load, members + others))
        joined.sort(key=lambda part: -part[0])
        lightest = joined[-1][0] if len(joined) == num_parts else 0
        heapq.heappush(heap, (lightest - joined[0][0], number, joined))
    parts = [members for _, members in heap[0][2]] if heap else []
    return parts + [[] for _ in range(num_parts - len(parts))]


def _cheapest_first(costs: Sequence[int], num_parts: int, *, lengths: Sequence[int], room: int) -> Parts:
    """Give each index, the dearest first, to the part with the least so far of those with ``room`` for its length.

    Return nothing where there is none.
    """
    parts: Parts = [[] for _ in range(num_parts)]
    free = [room] * num_parts
    loads = [(0, part) for part in range(num_parts)]
    for index in _decreasing(costs):
        for place, (load, part) in enumerate(loads):
            if free[part] >= lengths[index]:
                del loads[place]
                insort(loads, (load + costs[index], part))
                parts[part].append(index)
                free[part] -= lengths[index]
                break
        else:
            return []
    return parts


def _decreasing(values: Sequence[int]) -> list[int]:
    return sorted(range(len(values)), key=lambda index: -values[index])


def _dearest_first(rows: Parts, costs: Sequence[int]) -> Parts:
    # Empty ones stay last even where nothing costs anything.
    return sorted(rows, key=lambda row: (-sum(costs[index] for index in row), not row))
