"""Find what an answer puts between fences, as Markdown does.

Invariant: the time taken grows no faster than the text. Every repetition below is possessive where two could share
the same characters: a text without a newline would else be tried in as many ways as it has characters.
"""

import re
from collections.abc import Collection
from typing import Final

_BLOCK: Final = re.compile(
    r"^[ \t]*+```[ \t]*+(?P<language>[\w+-]*+)[^\n]*+\n(?P<content>.*?)^[ \t]*+```", re.DOTALL | re.MULTILINE
)


def last_block(text: str, languages: Collection[str]) -> str | None:
    """Return the last closed block in one of these languages (lower case, ``""`` for none named); None without one."""
    found = [match["content"] for match in _BLOCK.finditer(text) if match["language"].lower() in languages]
    return found[-1] if found else None
