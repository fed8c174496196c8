"""How ``try`` tells of its attempts: conversations for people, or one JSON object per line for programs."""

import statistics
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec
from rich.console import Console
from rich.rule import Rule

from areal_async.monitor.token_views import token_lists
from areal_async.monitor.transcript import Transcript, legend
from areal_async.process.stdio import say
from areal_async.protocol.types import SlotStatus, mean
from areal_async.rollout.policy.text import TextCodec
from areal_async.rollout.stopwatch import TimedTurn
from areal_async.rollout.trial import Attempt

MANY_DIGITS = 1e6


class Output(ABC):
    """Tells of the attempts, and counts them."""

    def __init__(self) -> None:
        self.attempts: list[tuple[SlotStatus, float]] = []

    @abstractmethod
    def tell(self, line: str) -> None:
        """Say something about the whole."""

    @abstractmethod
    def begin(self, codec: TextCodec) -> None:
        """Get ready for attempts, whose tokens ``codec`` reads."""

    def show(self, attempt: Attempt) -> None:
        """Show one."""
        self.attempts.append((attempt.trajectory.slot.status, attempt.trajectory.slot.reward))

    def summarise(self) -> None:
        """Say what the attempts came to."""
        self.tell(summary(self.attempts))

    def num_of(self, status: SlotStatus) -> int:
        return sum(one == status for one, _ in self.attempts)


class TerminalOutput(Output):
    """Conversations for people, in colour on a terminal."""

    def __init__(self, *, with_tokens: bool) -> None:
        super().__init__()
        self._with_tokens = with_tokens
        self._console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)

    def tell(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)

    def begin(self, codec: TextCodec) -> None:
        self._transcript = Transcript(codec, with_tokens=self._with_tokens)
        self._console.print(legend())
        self._console.print()

    def show(self, attempt: Attempt) -> None:
        super().show(attempt)
        self._console.print(self._transcript.draw(attempt))

    def summarise(self) -> None:
        self._console.print(Rule(style="none"))
        super().summarise()


class JsonOutput(Output):
    """One object per line on stdout; what is said besides goes to stderr."""

    def tell(self, line: str) -> None:
        sys.stderr.write(f"{line}\n")

    def begin(self, codec: TextCodec) -> None:
        self._codec = codec

    def show(self, attempt: Attempt) -> None:
        super().show(attempt)
        say(attempt_json(attempt, self._codec))


def attempt_json(attempt: Attempt, codec: TextCodec) -> str:
    """Return one line. Token lists of a sequence have one entry per token, None for a version that nobody sampled."""
    slot = attempt.trajectory.slot
    described = {
        "index": attempt.prompt.index,
        "sibling": slot.sibling,
        "status": slot.status,
        "reward": slot.reward if slot.status == "scored" else None,
        "reason": slot.reason,
        "places": [location._asdict() for location in attempt.locations],
        "row": attempt.prompt.row,
        "turns": [_turn(timed, codec) for timed in attempt.turns],
        "sequences": [token_lists(sequence) for sequence in attempt.sequences],
        "info": attempt.trajectory.info,
        "times": asdict(attempt.times),
    }
    return msgspec.json.encode(described, enc_hook=str).decode()


def _turn(timed: TimedTurn, codec: TextCodec) -> dict[str, Any]:
    return {
        **msgspec.structs.asdict(timed.turn),
        "text": codec.decode(timed.turn.output_ids),
        "duration_s": timed.duration_s,
        "first_token_s": timed.first_token_s,
    }


def summary(attempts: Sequence[tuple[SlotStatus, float]]) -> str:
    """Return the last line."""
    rewards = [reward for status, reward in attempts if status is SlotStatus.SCORED]
    counts = ", ".join(f"{sum(one == status for one, _ in attempts)} {status}" for status in SlotStatus)
    attempted = f"{len(attempts)} attempt{'s' if len(attempts) != 1 else ''}"
    if not rewards:
        return f"{attempted}: {counts}"
    spread = statistics.pstdev(rewards)
    alike = "; with rewards all alike a group trains nothing" if len(rewards) > 1 and not spread else ""
    return f"{attempted}: reward {figure(mean(rewards))}, std {figure(spread)}; {counts}{alike}"


def figure(value: float) -> str:
    """Return a mean of rewards for people: some decimals, or a power of ten where there would be many digits."""
    return f"{value:.3f}" if abs(value) < MANY_DIGITS else f"{value:.3e}"
