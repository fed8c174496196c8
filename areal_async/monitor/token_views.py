"""What each token of a recorded trajectory was: given, trained, or sampled and left out of the loss. Pure.

Shared by the terminal and the report: both draw the same kinds.
"""

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from areal_async.monitor.token_text import Detokenizer, token_texts
from areal_async.protocol.types import NOT_SAMPLED, Version
from areal_async.protocol.types import Sequence as TokenSequence


class TokenKind(StrEnum):
    """What became of a token."""

    GIVEN = "given"
    """Prompt or tool result: never trained."""
    TRAINED = "trained"
    """Sampled and in the loss, or to be."""
    MASKED = "masked"
    """Sampled and left out of the loss: too old, or of a reply without credit."""


class TokenView(NamedTuple):
    """One token."""

    text: str
    kind: TokenKind
    logprob: float
    """The server's; 0 where it was given."""
    version: str
    """Version of the weights that sampled it; empty where it was given."""
    begins_version: bool
    """The first of a stretch that one version sampled."""


class IdDetokenizer:
    """Stands in for a tokenizer that is not there: tokens are shown as their ids."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(f"<{token_id}>" for token_id in token_ids)


def token_views(
    sequence: TokenSequence, decoder: Detokenizer, trained: Sequence[bool] | None = None, breaks: Collection[int] = ()
) -> list[TokenView]:
    """Return a view of every token.

    Args:
        trained: whether each is in the loss; None where that is not decided yet.
        breaks: positions at which another begins to speak, besides where sampled tokens and given ones meet.
    """
    sampled = sequence.loss_mask.tolist()
    meetings = {place for place in range(1, len(sampled)) if sampled[place] != sampled[place - 1]}
    texts = token_texts(decoder, sequence.token_ids.tolist(), breaks=meetings.union(breaks))
    views: list[TokenView] = []
    before = ""
    for place, text in enumerate(texts):
        version = version_text(int(sequence.versions[place])) or ""
        is_trained = sampled[place] and (trained is None or trained[place])
        kind = TokenKind.TRAINED if is_trained else TokenKind.MASKED if sampled[place] else TokenKind.GIVEN
        begins = bool(version) and version != before
        views.append(TokenView(text, kind, float(sequence.logprobs[place]), version, begins))
        before = version
    return views


def version_text(packed: int) -> str | None:
    """Return a token's weights version as it is written; None for one that no model sampled."""
    return None if packed == NOT_SAMPLED else str(Version.unpack(packed))


def token_lists(sequence: TokenSequence) -> dict[str, Any]:
    """Return what a sequence has of each token, as plain lists."""
    return {
        "token_ids": sequence.token_ids.tolist(),
        "loss_mask": sequence.loss_mask.tolist(),
        "logprobs": sequence.logprobs.tolist(),
        "versions": [version_text(packed) for packed in sequence.versions.tolist()],
    }
