"""One attempt at a prompt, drawn: what the model was given and what it said, token by token.

Sampled tokens stand behind a bar and are coloured by their probability; all others, which are never trained, are dim.
Invariant: a token is drawn as sampled exactly where the loss mask is True.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from areal_async.monitor.token_text import Detokenizer, visible
from areal_async.monitor.token_views import TokenKind, TokenView, token_views
from areal_async.protocol.fields import CACHED_TOKENS, OWN_INFO, PROMPT_TOKENS
from areal_async.protocol.types import Sequence, SlotStatus
from areal_async.rollout.stopwatch import TimedTurn
from areal_async.rollout.trial import Attempt

GIVEN = "dim"
MASKED = "dim strike"
SAMPLED_BAR, GIVEN_BAR = "┃ ", "  "
BAR_STYLE = "blue"
SHADES = ((0.9, "green"), (0.5, "cyan"), (0.1, "yellow"), (0.01, "bold magenta"), (0.0, "bold underline red"))
"""Least probability -> how a sampled token looks. The unlikely ones also stand out without colours."""
STATUS_STYLES = {SlotStatus.SCORED: "bold green", SlotStatus.FAILED: "bold red", SlotStatus.REJECTED: "bold yellow"}
MAX_ROW_CHARACTERS = 400
LEAST_TOLD_S = 0.005
"""Less is written as 0.00 and would only take room."""


class TextSpan(NamedTuple):
    """Neighbouring tokens ``[start, end)`` of one kind."""

    start: int
    end: int
    is_sampled: bool
    turn: int | None
    """Index of the turn that said them; None where they were given."""


def shade_number(logprob: float) -> int:
    """Return which of ``SHADES`` a token has that was sampled with this logprob."""
    probability = math.exp(min(0.0, logprob))
    return next((place for place, (least, _) in enumerate(SHADES) if probability >= least), len(SHADES) - 1)


def shade(logprob: float) -> str:
    """Return the style of a token that was sampled with this logprob."""
    return SHADES[shade_number(logprob)][1]


def style_of(view: TokenView) -> str:
    """Return how a token looks."""
    if view.kind is TokenKind.GIVEN:
        return GIVEN
    return MASKED if view.kind is TokenKind.MASKED else shade(view.logprob)


def legend() -> RenderableType:
    """Explain the colours."""
    text = Text("sampled by the model, trained, by probability: ")
    for least, style in SHADES:
        text.append(f"{least:g}+" if least else "less", style).append(" ")
    return Group(
        Text.assemble((SAMPLED_BAR, BAR_STYLE), text),
        Text(f"{GIVEN_BAR}given to it (prompts, tool results), never trained", GIVEN),
    )


def spans_of(sequence: Sequence, turns: Iterable[TimedTurn], *, taken: set[int]) -> list[TextSpan]:
    """Part a sequence into what was given and what each turn said.

    Args:
        taken: turns that other sequences hold already; this one's are added.
    """
    ids = sequence.token_ids.tolist()
    said: dict[int, tuple[int, int]] = {}
    for number, timed in enumerate(turns):
        start, end = len(timed.turn.prompt_ids), len(timed.turn.prompt_ids) + len(timed.turn.output_ids)
        is_here = start not in said and ids[:end] == timed.turn.prompt_ids + timed.turn.output_ids
        if number not in taken and is_here and bool(sequence.loss_mask[start:end].all()):
            said[start] = (end, number)
            taken.add(number)
    spans: list[TextSpan] = []
    position = 0
    for start, (end, number) in sorted(said.items()):
        if start > position:
            spans.append(TextSpan(position, start, is_sampled=False, turn=None))
        spans.append(TextSpan(start, end, is_sampled=True, turn=number))
        position = end
    if position < len(ids):
        spans.append(TextSpan(position, len(ids), is_sampled=False, turn=None))
    return spans


@dataclass
class Transcript:
    """Draws attempts, one after the other."""

    decoder: Detokenizer
    with_tokens: bool = False
    """A table of every token below each conversation."""

    def __post_init__(self) -> None:
        self._shown: dict[tuple[int, ...], str] = {}
        """How a conversation began -> where that was shown: siblings begin alike."""

    def draw(self, attempt: Attempt) -> RenderableType:
        """Return the whole of one attempt."""
        parts: list[RenderableType] = []
        if attempt.trajectory.slot.sibling == 0:
            parts.append(_row(attempt))
        parts += [_title(attempt), Text(_numbers(attempt)), *_info(attempt)]
        taken: set[int] = set()
        for number, sequence in enumerate(attempt.sequences):
            if len(attempt.sequences) > 1:
                parts.append(Text(f"sequence {number + 1} of {len(attempt.sequences)}", "italic"))
            parts += self._conversation(attempt, sequence, taken)
        parts += _failure(attempt)
        return Group(*parts, Text())

    def _conversation(self, attempt: Attempt, sequence: Sequence, taken: set[int]) -> Iterator[RenderableType]:
        spans = spans_of(sequence, attempt.turns, taken=taken)
        views = token_views(sequence, self.decoder, breaks={span.start for span in spans})
        for span in spans:
            if span.turn is not None:
                yield Text.assemble((SAMPLED_BAR, BAR_STYLE), (_turn_text(attempt.turns, span.turn), "italic"))
            elif (same := self._shown_before(attempt, sequence, span)) is not None:
                yield Text(f"{GIVEN_BAR}[the same {span.end} tokens as {same}]", f"{GIVEN} italic")
                continue
            text = Text()
            for view in views[span.start : span.end]:
                text.append(visible(view.text), style_of(view))
            yield Barred(text, is_sampled=span.is_sampled)
        if self.with_tokens:
            yield token_table(views, sequence)

    def _shown_before(self, attempt: Attempt, sequence: Sequence, span: TextSpan) -> str | None:
        """Say where the beginning of a conversation was shown already."""
        if span.start:
            return None
        place = f"in sibling {attempt.trajectory.slot.sibling}"
        beginning = tuple(sequence.token_ids[: span.end].tolist())
        if beginning in self._shown:
            return "above" if self._shown[beginning] == place else self._shown[beginning]
        self._shown[beginning] = place
        return None


def token_table(views: list[TokenView], sequence: Sequence) -> RenderableType:
    """Return a table of every token: its id, text, mask, logprob and version; of an image's of the first alone."""
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for name in ("position", "id"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("text", overflow="fold")
    for name in ("mask", "logprob", "version"):
        table.add_column(name, justify="right", no_wrap=True)
    for position, view in enumerate(views):
        if view.image is not None and not view.text:
            continue
        is_sampled = view.kind is not TokenKind.GIVEN
        text = visible(view.text, newline="↵").replace(" ", "␣") or "(part of the next)"
        table.add_row(
            str(position),
            str(sequence.token_ids[position]),
            Text(text, shade(view.logprob) if is_sampled else GIVEN),
            str(int(is_sampled)),
            f"{view.logprob:.4f}" if is_sampled else "",
            view.version,
        )
    return table


class Barred:
    """Text, wrapped, behind a bar."""

    def __init__(self, text: Text, *, is_sampled: bool) -> None:
        self._text = text
        self._bar = Text(SAMPLED_BAR, BAR_STYLE) if is_sampled else Text(GIVEN_BAR)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(1, options.max_width - self._bar.cell_len)
        lines = self._text.wrap(console, width, overflow="fold", no_wrap=False)
        if self._text.plain.endswith("\n"):
            lines.pop()
        for line in lines:
            yield Text.assemble(self._bar, line)


def _row(attempt: Attempt) -> RenderableType:
    row = msgspec.json.encode(attempt.prompt.row, enc_hook=str).decode()
    if len(row) > MAX_ROW_CHARACTERS:
        row = f"{row[:MAX_ROW_CHARACTERS]}..."
    return Text.assemble((f"row {attempt.prompt.index} ", "bold"), visible(row))


def _title(attempt: Attempt) -> RenderableType:
    slot = attempt.trajectory.slot
    title = Text(f"row {attempt.prompt.index} sibling {slot.sibling}: ")
    title.append(f"reward {slot.reward:g}" if slot.status is SlotStatus.SCORED else slot.status, _style(attempt))
    return Rule(title, align="left", style="none")


def _style(attempt: Attempt) -> str:
    return STATUS_STYLES[attempt.trajectory.slot.status]


def _numbers(attempt: Attempt) -> str:
    times = attempt.times
    num_sampled = sum(len(timed.turn.output_ids) for timed in attempt.turns)
    num_tokens = sum(sequence.num_tokens for sequence in attempt.sequences)
    parts = [_count(len(attempt.turns), "turn"), f"{num_tokens} tokens, {num_sampled} sampled"]
    shares = {"model": times.model_s, "tools": times.tools_s, "rewards": times.rewards_s}
    known = ", ".join(f"{name} {seconds:.2f}" for name, seconds in shares.items() if seconds >= LEAST_TOLD_S)
    parts.append(f"{times.total_s:.2f} s" + (f" ({known})" if known else ""))
    if times.model_s > 0 and num_sampled:
        parts.append(f"{num_sampled / times.model_s:.0f} tokens/s")
    if num_breaks := int(attempt.trajectory.info.get(f"{OWN_INFO}num_breaks", 0)):
        parts.append(f"{_count(num_breaks, 'break')} of the prefix")
    return ", ".join(parts)


def _info(attempt: Attempt) -> Iterator[RenderableType]:
    """Yield what will be averaged in the metrics, the workflow's own as ``info/<key>``."""
    own = [f"{key} {value:g}" for key, value in attempt.trajectory.info.items() if key not in _KNOWN_INFO]
    if own:
        yield Text(f"info: {', '.join(own)}")


_KNOWN_INFO = [
    f"{OWN_INFO}{name}"
    for name in ("num_turns", "num_sequences", "num_breaks", "duration_s", PROMPT_TOKENS, CACHED_TOKENS)
]
"""Told otherwise."""


def _turn_text(turns: list[TimedTurn], number: int) -> str:
    timed = turns[number]
    end = {"stop": "stopped by itself", "length": "cut off by max_new_tokens or a full context"}
    return (
        f"turn {number + 1}: {_count(len(timed.turn.output_ids), 'token')} in {timed.duration_s:.2f} s "
        f"(first after {timed.first_token_s:.2f}), {end.get(timed.turn.finish_reason, timed.turn.finish_reason)}"
    )


def _failure(attempt: Attempt) -> Iterator[RenderableType]:
    slot = attempt.trajectory.slot
    if slot.status is SlotStatus.SCORED:
        return
    yield Text.assemble((f"{slot.status}: ", _style(attempt)), visible(slot.reason, newline=" "))
    for place in attempt.locations:
        yield Text.assemble("  ", (str(place), "bold"))
        yield Text(f"      {visible(place.source)}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
