"""How many requests one server is sent at once, learnt from what it says about its own load. Pure.

Additive increase, multiplicative decrease: while the limit holds requests back and none waits at the server, it
grows by a step; when, twice in a row, more wait there than keep it busy or its cache is about to overflow, it
shrinks by a fifth. Twice, since after a weight swap everything waits for a moment. What is held back waits in the
pool instead, from where it can go to any server.
"""

import msgspec

SMALLEST_LIMIT = 4
GROWTH_STEPS = 16
"""The first limit is reached in so many steps from nothing."""
SHRINK_FACTOR = 0.8
WAITING_SHARE = 0.125
"""Requests that may wait at the server for each that runs there: the next ones are then at hand."""
FULL_TOKEN_USAGE = 0.95
"""Share of the cache beyond which a server retracts running requests and computes them again later."""
ROOMY_TOKEN_USAGE = 0.85


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What ``/v1/loads`` says of each data-parallel rank, and what is said of all of them together."""

    num_running: int = msgspec.field(name="num_running_reqs")
    num_waiting: int = msgspec.field(name="num_waiting_reqs")
    token_usage: float
    """Share of the key-value cache in use, of the fullest rank."""


class ConcurrencyLimit:
    """The limit of one server. ``observe`` at regular intervals; ``value`` is what to keep to until the next."""

    def __init__(self, first: int) -> None:
        self.value = max(SMALLEST_LIMIT, first)
        self._step = max(1, first // GROWTH_STEPS)
        self._was_over = False

    def observe(self, load: Load, *, num_requests: int) -> int:
        """Take the load of a server that has ``num_requests`` of ours; return the new limit."""
        max_waiting = max(1, WAITING_SHARE * load.num_running)
        is_over = load.num_waiting > max_waiting or load.token_usage > FULL_TOKEN_USAGE
        if is_over and self._was_over:
            self.value = max(SMALLEST_LIMIT, int(SHRINK_FACTOR * min(self.value, num_requests)))
            self._was_over = False
        else:
            self._was_over = is_over
            has_room = load.num_waiting == 0 and load.token_usage < ROOMY_TOKEN_USAGE
            if has_room and num_requests >= self.value:
                self.value += self._step
        return self.value
