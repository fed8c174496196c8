"""The text of each single token, such that joined they are the text of all, and safe to show on a terminal. Pure."""

import unicodedata
from collections.abc import Collection, Sequence
from typing import Protocol

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
NEWLINE = "↵\n"
"""How the end of a line is shown: models are trained on it too."""
MAX_CHARACTERS = 1000
"""Characters that are shown of one value, which may have any length: more than any terminal shows on a line."""
_PICTURES = 0x2400
"""Unicode's pictures of the control characters stand here, in their order."""


class Detokenizer(Protocol):
    """What of a codec is needed."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


def token_texts(decoder: Detokenizer, token_ids: Sequence[int], *, breaks: Collection[int] = ()) -> list[str]:
    """Return what each token adds to the text, special tokens too.

    A character that is spread over several tokens is the last one's.

    Args:
        breaks: positions before which a character is not waited for any longer: another begins to speak there.
    """
    texts: list[str] = []
    start = read = 0
    known = ""
    for end in range(1, len(token_ids) + 1):
        # Decoded again with the tokens before it, on which a token's text may depend.
        text = decoder.decode(token_ids[start:end], skip_special_tokens=False)
        if text.endswith(UNFINISHED) and end < len(token_ids) and end not in breaks:
            texts.append("")
            continue
        texts.append(text[len(known) :])
        start, read = read, end
        known = decoder.decode(token_ids[start:read], skip_special_tokens=False)
    return texts


def visible(text: str, *, newline: str = NEWLINE) -> str:
    """Return text in which everything that would act on a terminal (escapes, direction marks) is seen instead."""
    return "".join(_visible(character, newline) for character in text)


def shown(value: str) -> str:
    """Return a value as it can be shown on one line, whatever bytes it is made of."""
    return visible(value[:MAX_CHARACTERS], newline=" ")


def _visible(character: str, newline: str) -> str:
    if character == "\n":
        return newline
    category = unicodedata.category(character)
    if category == "Cc":
        code = ord(character)
        return chr(_PICTURES + code) if code < 0x20 else "\N{SYMBOL FOR DELETE}" if code == 0x7F else f"\\x{code:02x}"
    if category in ("Cf", "Zl", "Zp", "Cs") and character != "\N{ZERO WIDTH JOINER}":
        return f"\\u{ord(character):04x}"
    return character
