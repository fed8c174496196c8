"""What each token of a recorded trajectory was: given, trained, or sampled and left out of the loss. Pure.

Shared by the terminal and the report: both draw the same kinds. The tokens of an image say nothing one by one: the
first stands for it, the others have no text.
"""

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
import numpy as np

from areal_async.monitor.token_text import Detokenizer, token_texts
from areal_async.protocol.types import NOT_SAMPLED, ImageRef, Version
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
    image: int | None = None
    """Number of the image among those of the sequence, from 0, that the token shows a part of."""


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
    images = _image_spans(sequence, decoder)
    texts = token_texts(decoder, sequence.token_ids.tolist(), breaks=meetings.union(breaks))
    number_of: dict[int, int] = {}
    for number, ((start, end), ref) in enumerate(zip(images, sequence.images or (), strict=bool(images))):
        texts[start:end] = [image_text(number, ref), *[""] * (end - start - 1)]
        number_of |= dict.fromkeys(range(start, end), number)
    views: list[TokenView] = []
    before = ""
    for place, text in enumerate(texts):
        version = version_text(int(sequence.versions[place])) or ""
        is_trained = sampled[place] and (trained is None or trained[place])
        kind = TokenKind.TRAINED if is_trained else TokenKind.MASKED if sampled[place] else TokenKind.GIVEN
        begins = bool(version) and version != before
        views.append(TokenView(text, kind, float(sequence.logprobs[place]), version, begins, number_of.get(place)))
        before = version
    return views


def image_text(number: int, ref: ImageRef) -> str:
    """Return what stands for the image of this number, from 0."""
    return f"[image {number + 1}: {ref.width}x{ref.height}, sha256 {ref.sha256[:12]}…]"


def _image_spans(sequence: TokenSequence, decoder: Detokenizer) -> list[tuple[int, int]]:
    """Return the tokens ``[start, end)`` of each image; none where the tokenizer does not know which they are."""
    vision = getattr(decoder, "vision", None)
    if vision is None or not sequence.images:
        return []
    edges = np.flatnonzero(np.diff(sequence.token_ids == vision.image_token_id, prepend=False, append=False)).tolist()
    spans = list(zip(edges[::2], edges[1::2], strict=True))
    return spans if len(spans) == len(sequence.images) else []


def version_text(packed: int) -> str | None:
    """Return a token's weights version as it is written; None for one that no model sampled."""
    return None if packed == NOT_SAMPLED else str(Version.unpack(packed))


def token_lists(sequence: TokenSequence) -> dict[str, Any]:
    """Return what a sequence has of each token, and the images that they show, as plain lists."""
    return {
        "token_ids": sequence.token_ids.tolist(),
        "loss_mask": sequence.loss_mask.tolist(),
        "logprobs": sequence.logprobs.tolist(),
        "versions": [version_text(packed) for packed in sequence.versions.tolist()],
        "images": [msgspec.structs.asdict(ref) for ref in sequence.images or ()],
    }
