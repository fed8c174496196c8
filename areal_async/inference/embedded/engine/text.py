"""Text around the tokens: encoding, incremental decoding and stop strings.

Invariant: the pieces a ``TextStream`` hands out, joined, are the decoding of all its tokens, whatever the chunks they
came in; a character split over several tokens is held back until it is whole or the stream ends.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from areal_async.inference.embedded.engine.errors import in_one_sentence
from areal_async.inference.model_files import read_files

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    """The part of a tokenizer that text is had from."""

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool) -> str: ...


class Tokenizer:
    """The tokenizer found beside the model."""

    def __init__(self, path: Path) -> None:
        tokenizer = _read(path)
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.whole = tokenizer
        """Transformers' own object, for a library that wants all of it."""
        self._decoder = decoder_of(tokenizer)

    def encode(self, text: str) -> list[int]:
        return list(self.whole.encode(text))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self._decoder.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


def decoder_of(tokenizer: Any) -> Any:
    """Return what decodes as a tokenizer of transformers' does.

    The Rust object behind a fast one is ten times faster than its Python wrapper, which is only needed where it edits
    the text afterwards.
    """
    is_edited = getattr(tokenizer, "clean_up_tokenization_spaces", False)
    return tokenizer if is_edited else getattr(tokenizer, "backend_tokenizer", tokenizer)


def load_tokenizer(path: Path) -> Tokenizer | None:
    """Load the tokenizer beside the model, or return None where there is none (token ids only).

    Raises:
        UserError: there is one that cannot be loaded.
    """
    if not any((path / name).exists() for name in _TOKENIZER_FILES):
        return None
    with in_one_sentence(f"tokenizer at {path}"):
        return Tokenizer(path)


def _read(path: Path) -> Any:
    if (found := read_files(str(path))) is not None:
        return found.tokenizer
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


class TextStream:
    """The text of one growing answer, handed out piece by piece."""

    def __init__(self, tokenizer: Decoder, *, skip_special_tokens: bool, no_stop_trim: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._no_stop_trim = no_stop_trim
        self._ids: list[int] = []
        self._context_start = 0
        """Tokens from here to ``_read`` are decoded again as context: a token's text may depend on the one before."""
        self._read = 0
        self._context_text = ""
        self._pieces: list[str] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that is now certain."""
        self._ids.extend(token_ids)
        text = self._decode(self._context_start)
        if len(text) <= len(self._context_text) or text.endswith(_UNFINISHED):
            return ""
        piece = text[len(self._context_text) :]
        self._pieces.append(piece)
        start, self._context_start, self._read = self._context_start, self._read, len(self._ids)
        self._context_text = text if start == self._context_start else self._decode(self._context_start)
        return piece

    def finish(self, token_ids: Sequence[int], matched: int | str | None) -> str:
        """Add the last tokens and return the rest of the text, without the stop that ``matched``."""
        self._ids.extend(token_ids)
        if isinstance(matched, int) and not self._no_stop_trim:
            self._ids.pop()
        rest = self._decode(self._context_start)[len(self._context_text) :]
        if not isinstance(matched, str):
            return rest
        sent = "".join(self._pieces)
        position = (sent + rest).find(matched)
        if position < 0:
            return rest
        end = position + len(matched) if self._no_stop_trim else position
        return (sent + rest)[len(sent) : end]

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._ids[start:], skip_special_tokens=self._skip_special_tokens)


class StopStrings:
    """Watches the tail of one sequence for its stop strings."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        # A token writes at least one byte, so this many tokens always hold a whole stop string.
        self._window_tokens = max(len(text.encode()) for text in stop) + 1

    def match(self, output_ids: Sequence[int]) -> tuple[str | None, bool]:
        """Return the stop string just completed, if any, and whether the text may be on its way to one."""
        tail = self._tokenizer.decode(output_ids[-self._window_tokens :], skip_special_tokens=False)
        matched = next((text for text in self._stop if text in tail), None)
        if matched is not None:
            return matched, True
        is_partial = any(
            tail.endswith(text[:length]) for text in self._stop for length in range(1, min(len(text), len(tail)) + 1)
        )
        return None, is_partial or tail.endswith(_UNFINISHED)
