"""How much more seldom a node speaks where there are many: what all of them say in a second stays the same."""

from areal_async.bus import MOST_TIMES

NODES_AT_FULL_PACE = 32


def times_of(num_nodes: int) -> float:
    """Return what to multiply a pause with, where so many nodes have servers."""
    return min(MOST_TIMES, max(1.0, num_nodes / NODES_AT_FULL_PACE))
