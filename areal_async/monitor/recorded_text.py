"""A recorded trajectory on a terminal: as ``try`` draws one, and which tokens were left out of the loss.

Given tokens are dim, sampled ones stand behind a bar, shaded by their probability; what was masked is struck out, and
the weights version is named wherever it changes.
"""

import itertools
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from areal_async.monitor.token_text import Detokenizer, visible
from areal_async.monitor.token_views import TokenKind, TokenView, token_views
from areal_async.monitor.trajectory_list import Entry
from areal_async.monitor.transcript import MASKED, Barred, legend, style_of, token_table
from areal_async.protocol.types import Trajectory
from areal_async.trainer.output.archive_reader import ArchivedTrajectory

BOUNDARY = "bold blue"


def draw(
    entry: Entry,
    trajectory: Trajectory,
    decoder: Detokenizer,
    *,
    recorded: ArchivedTrajectory | None,
    with_tokens: bool,
    images_in: str = "",
) -> RenderableType:
    """Return the whole of one trajectory.

    Args:
        recorded: how it was trained; None for one that is not.
        with_tokens: a table of every token below each sequence.
        images_in: where the images are that it shows.
    """
    parts: list[RenderableType] = [legend(), _own_legend(), Text()]
    parts += [Rule(Text(f"{entry.id}: {_reward(entry)}", "bold"), align="left", style="none"), Text(_numbers(entry))]
    if trajectory.info:
        parts.append(Text("info: " + ", ".join(f"{key} {value:g}" for key, value in sorted(trajectory.info.items()))))
    parts += _credits(trajectory, recorded)
    for number, sequence in enumerate(trajectory.sequences):
        if len(trajectory.sequences) > 1:
            parts.append(Text(f"sequence {number + 1} of {len(trajectory.sequences)}", "italic"))
        views = token_views(sequence, decoder, recorded.trained_mask(sequence) if recorded is not None else None)
        parts += _blocks(views)
        if with_tokens:
            parts.append(token_table(views, sequence))
    if shown := trajectory.images:
        parts.append(Text(f"images, in {images_in}:"))
        parts += [
            Text(f"  sha256 {ref.sha256}, {ref.width}x{ref.height}, {ref.num_bytes} bytes") for ref in shown.values()
        ]
    if entry.error:
        parts.append(Text(visible(entry.error, newline=" "), "bold red"))
    return Group(*parts)


def _blocks(views: list[TokenView]) -> Iterator[RenderableType]:
    for is_sampled, block in itertools.groupby(views, key=lambda view: view.kind is not TokenKind.GIVEN):
        text = Text()
        for view in block:
            if view.begins_version:
                text.append(f"‹{view.version}›", BOUNDARY)
            text.append(visible(view.text), style_of(view))
        yield Barred(text, is_sampled=is_sampled)


def _own_legend() -> Text:
    return Text.assemble(
        "  ", ("struck out", MASKED), ": sampled, but left out of the loss; ", ("‹1-4›", BOUNDARY),
        ": from here on sampled by this weights version",
    )  # fmt: skip


def _reward(entry: Entry) -> str:
    return entry.state if entry.reward is None else f"reward {entry.reward:g}"


def _numbers(entry: Entry) -> str:
    parts = [f"step {entry.step}"] if entry.step is not None else []
    parts += [entry.state, f"workflow {entry.workflow}"]
    if entry.advantage is not None:
        parts.append(f"advantage {entry.advantage:+.3f}")
    parts.append(f"{entry.tokens} tokens, {entry.output_tokens} sampled")
    parts.append(f"weights {entry.versions}")
    if entry.truncated:
        parts.append(f"{entry.truncated} turns cut off by max_new_tokens or a full context")
    return ", ".join(parts)


def _credits(trajectory: Trajectory, recorded: ArchivedTrajectory | None) -> Iterator[RenderableType]:
    """Yield what each reply was worth, where the workflow says it reply by reply."""
    credits = trajectory.slot.credits
    advantages = recorded.advantages if recorded is not None else (None,) * len(credits)
    for number, (credit, advantage) in enumerate(zip(credits, advantages, strict=False), start=1):
        role = f" of {credit.role}" if credit.role else ""
        told = f", advantage {advantage:+.3f}" if advantage is not None else ""
        yield Text(f"reply {number}{role}: reward {credit.reward:g}{told}, {credit.num_tokens} tokens")
