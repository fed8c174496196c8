"""How much there is in a JSON text, told before it is decoded: millions of empty lists take seconds.

A thread for them would not help: a decoder keeps the interpreter to itself.
"""

from typing import Any

import msgspec

MAX_JSON_VALUES = 1 << 17
"""A decoder takes some ten milliseconds for so many. A conversation has seven for each message."""


def has_too_many_values(text: str | bytes, *, most: int = MAX_JSON_VALUES) -> bool:
    """Say whether a JSON text has more strings, lists, objects and commas between them than may be decoded."""
    if len(text) <= most:
        return False
    written = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    written = written.replace(b"\\\\", b"").replace(b'\\"', b"")  # what quotes are left begin and end strings
    num_strings = written.count(b'"') // 2
    if num_strings > most:
        return True
    frame = b"".join(written.split(b'"')[::2])
    return num_strings + sum(map(frame.count, (b",", b"[", b"{"))) > most


def decode_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a text is; ``None`` where it is none, or has too many values."""
    try:
        value = None if has_too_many_values(text) else msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None
    return value if isinstance(value, dict) else None
