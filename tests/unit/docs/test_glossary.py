"""The glossary gives each word one meaning, in at most 30 words."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
MAX_WORDS = 30


def test_each_word_stands_once_in_order_and_is_told_shortly() -> None:
    text = (ROOT / "tools" / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-Z][^|]*) \| ([^|]+) \|$", text, re.MULTILINE)

    words = [word for word, _ in rows]

    assert len(words) > 40
    assert words == sorted(set(words), key=str.lower)
    assert {word: meaning for word, meaning in rows if len(meaning.split()) > MAX_WORDS} == {}
