"""Where the time of one trajectory goes: in the model, in tools, in rewards."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_async.inference.pool import ServerHandle
from areal_async.protocol.types import Turn
from areal_async.rollout.policy.generation import Generator
from areal_async.telemetry.wait_graph import EndedWait
from areal_async.vision.images import Image

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedTurn:
    """A turn and how long it took."""

    turn: Turn
    duration_s: float
    first_token_s: float
    """All of it where no token was told of before the end."""


class TimedGenerator:
    """A generator that notes when each call began, gave its first token, and ended."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.calls: list[Interval] = []
        """When the model was called, by the monotonic clock; those that failed, or whose end nobody awaited, too."""
        self._turns: dict[int, TimedTurn] = {}

    def timed(self, turn: Turn) -> TimedTurn:
        """Find a turn, which is the very object that its call returned."""
        return self._turns[id(turn)]

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: Mapping[str, Any],
        *,
        preferred: ServerHandle | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
        images: Sequence[Image] = (),
    ) -> tuple[Turn, ServerHandle]:
        since_s = time.monotonic()
        first_s: float | None = None

        def hear(token_ids: list[int]) -> None:
            nonlocal first_s
            first_s = first_s or time.monotonic()
            if on_tokens is not None:
                on_tokens(token_ids)

        try:
            turn, server = await self._generator.generate(
                prompt_ids, sampling_params, preferred=preferred, on_tokens=hear, images=images
            )
            until_s = time.monotonic()
            self._turns[id(turn)] = TimedTurn(
                turn=turn, duration_s=until_s - since_s, first_token_s=(first_s or until_s) - since_s
            )
            return turn, server
        finally:
            self.calls.append((since_s, time.monotonic()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds. What happens side by side counts once in each line, so that the parts may exceed the whole."""

    total_s: float
    model_s: float
    tools_s: float
    rewards_s: float
    """Time in ``@reward`` functions, waiting for a worker included; other rewards are the workflow's own time."""

    @classmethod
    def of(cls, *, total_s: float, calls: Iterable[Interval], waits: Iterable[EndedWait]) -> "Times":
        """Add up."""
        ended = list(waits)

        def waited_for(kind: str) -> float:
            return covered_s((one.since_s, one.until_s) for one in ended if one.on.startswith(kind))

        return cls(
            total_s=total_s,
            model_s=covered_s(calls),
            tools_s=waited_for("tool "),
            rewards_s=waited_for("reward "),
        )


def covered_s(intervals: Iterable[Interval]) -> float:
    """Return how long at least one of the intervals lasted."""
    total_s, end_s = 0.0, float("-inf")
    for since_s, until_s in sorted(intervals):
        total_s += max(0.0, until_s - max(since_s, end_s))
        end_s = max(end_s, until_s)
    return total_s
