"""Which nodes are gone for good, by their silence. Pure: it is told who speaks and when.

A node speaks every second, and whenever it writes what one of its servers runs. Its silence counts only while the
controller hears itself over the same broker: a broker that restarts, a network that is away from here or a controller
that was stopped make nobody silent.
"""

from collections.abc import Iterable

LOST_S = 30.0
"""Seconds for which a ticket that was leased stays a node's own (``ack_wait``); then another node runs its work too."""
DEAF_S = 3.0
"""Seconds of not hearing itself from which on the controller counts no time; it speaks every second."""


class FailureDetector:
    """What was heard of every node, by a clock that runs while the controller can hear."""

    def __init__(self, *, lost_s: float = LOST_S, deaf_s: float = DEAF_S) -> None:
        self.lost_s = lost_s
        self._deaf_s = deaf_s
        self._clock_s = 0.0
        self._ticked_s: float | None = None
        self._heard_s: dict[str, float] = {}
        self._revisions: dict[str, int] = {}

    def tick(self, now_s: float) -> None:
        """Take in that the controller has heard itself."""
        passed_s = 0.0 if self._ticked_s is None else now_s - self._ticked_s
        if passed_s <= self._deaf_s:
            self._clock_s += passed_s
        self._ticked_s = now_s

    def on_report(self, node_id: str) -> None:
        """Take in that a node has spoken."""
        self._heard_s[node_id] = self._clock_s

    def on_server_state(self, key: str, node_id: str, revision: int) -> None:
        """Take in what the bucket holds of a node's server; a value not seen before is a word of that node."""
        if self._revisions.get(key) != revision:
            self._revisions[key] = revision
            self.on_report(node_id)

    def note_own(self, key: str, revision: int) -> None:
        """Take in that this value is the controller's own word, and not the node's."""
        self._revisions[key] = revision

    def silent_s(self, node_id: str) -> float:
        """Return for how long a node has not been heard, as far as that can be known."""
        return self._clock_s - self._heard_s.setdefault(node_id, self._clock_s)

    def gone(self, node_ids: Iterable[str]) -> set[str]:
        """Return those of these nodes that have been silent for too long."""
        return {node_id for node_id in node_ids if self.silent_s(node_id) > self.lost_s}
