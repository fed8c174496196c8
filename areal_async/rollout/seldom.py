"""How much more seldom a node speaks where there are many: what all of them say in a second stays the same."""

NODES_AT_FULL_PACE = 32
MOST_TIMES = 8.0
"""Beyond that a node would be taken for silent."""


class Seldom:
    """Kept by a node, which counts all of them now and then."""

    def __init__(self) -> None:
        self.times = 1.0
        """To multiply a pause with."""

    def note(self, num_nodes: int) -> None:
        """Take in how many nodes have servers."""
        self.times = min(MOST_TIMES, max(1.0, num_nodes / NODES_AT_FULL_PACE))
