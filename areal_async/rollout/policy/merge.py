"""Turns become sequences. Pure.

While each prompt extends the tokens of an earlier turn (its prompt and its answer) and shows the same images, the
turns are one sequence, and its shared prefix is trained once. Where a template breaks the prefix, or another image
stands behind equal tokens, a new sequence starts.
Invariant: the loss mask is True exactly on sampled tokens, each sampled token is in exactly one sequence,
with the logprob, the version and the temperature it was sampled with.
"""

from collections.abc import Mapping

import numpy as np

from areal_async.protocol.types import NOT_CREDITED, NOT_SAMPLED, ImageRef, Sequence, Turn, Version


class _GrowingSequence:
    """One sequence while it grows."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.images: list[ImageRef] = []
        self.turns: list[tuple[int, Turn, int]] = []
        """Each with the position of its first sampled token, and the number of its credit."""

    def append(self, turn: Turn, credit: int) -> None:
        self.turns.append((len(turn.prompt_ids), turn, credit))
        self.token_ids = turn.prompt_ids + turn.output_ids
        self.images = turn.images

    def is_prefix_of(self, turn: Turn) -> bool:
        """Say whether the turn's prompt begins with it. Equal tokens may stand for two images of one size."""
        begins_so = turn.prompt_ids[: len(self.token_ids)] == self.token_ids
        return begins_so and turn.images[: len(self.images)] == self.images

    def sequence(self, *, has_credits: bool) -> Sequence:
        length = len(self.token_ids)
        loss_mask = np.zeros(length, dtype=np.bool_)
        logprobs = np.zeros(length, dtype=np.float32)
        versions = np.full(length, NOT_SAMPLED, dtype=np.int64)
        turns = np.full(length, NOT_CREDITED, dtype=np.int16) if has_credits else None
        temperatures = np.zeros(length, dtype=np.float32)
        is_steered = any(turn.is_steered and turn.output_ids for _, turn, _ in self.turns)
        steered = np.zeros(length, dtype=np.bool_) if is_steered else None
        end = 0
        for start, turn, credit in self.turns:
            before, end = end, start + len(turn.output_ids)
            # A prompt goes with its reply: so a sequence of one temperature holds one value.
            temperatures[before:end] = turn.temperature or 0.0
            loss_mask[start:end] = True
            if steered is not None:
                steered[start:end] = turn.is_steered
            if turns is not None:
                turns[start:end] = credit
            logprobs[start:end] = turn.logprobs
            for span in turn.spans:
                versions[start + span.start : start + span.end] = Version.parse(span.version).pack()
        token_ids = np.array(self.token_ids, dtype=np.int32)
        return Sequence(
            token_ids=token_ids,
            loss_mask=loss_mask,
            logprobs=logprobs,
            versions=versions,
            turns=turns,
            temperatures=None if any(turn.temperature is None for _, turn, _ in self.turns) else temperatures,
            steered=steered,
            images=self.images or None,
        )


def merge_turns(turns: list[Turn], credits: Mapping[int, int] | None = None) -> list[Sequence]:
    """Return the rows to train on, oldest first.

    Conversations that a workflow holds side by side each get a row of their own.

    Args:
        credits: place among ``turns`` -> number of its credit; None where one reward is for all of them.
    """
    rows: list[_GrowingSequence] = []
    for place, turn in enumerate(turns):
        row = next((row for row in reversed(rows) if row.is_prefix_of(turn)), None)
        if row is None:
            row = _GrowingSequence()
            rows.append(row)
        row.append(turn, NOT_CREDITED if credits is None else credits.get(place, NOT_CREDITED))
    return [row.sequence(has_credits=credits is not None) for row in rows]
