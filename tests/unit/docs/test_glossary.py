"""The glossary has at most 30 words, and gives each one meaning, in a sentence or two."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
MAX_ENTRIES = 30
MAX_WORDS = 30
"""Words of a meaning."""


def test_each_word_stands_once_in_order_and_is_told_shortly() -> None:
    text = (ROOT / "tools" / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-Z][^|]*) \| ([^|]+) \|$", text, re.MULTILINE)

    words = [word for word, _ in rows]

    assert 20 < len(words) <= MAX_ENTRIES
    assert words == sorted(set(words), key=str.lower)
    assert {word: meaning for word, meaning in rows if len(meaning.split()) > MAX_WORDS} == {}
