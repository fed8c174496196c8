"""The text of each token: joined it is the whole text, and nothing in it acts on a terminal."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from areal_async.monitor.token_text import token_texts, visible


class Bytes:
    """One token per byte, as in a byte-level vocabulary."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        assert not skip_special_tokens
        return bytes(token_ids).decode(errors="replace")


@given(st.text(max_size=30))
def test_texts_of_the_tokens_are_the_text_of_all(text: str) -> None:
    ids = list(text.encode(errors="replace"))

    texts = token_texts(Bytes(), ids)

    assert len(texts) == len(ids)
    assert "".join(texts) == Bytes().decode(ids, skip_special_tokens=False)


def test_character_of_several_tokens_is_the_last_ones() -> None:
    assert token_texts(Bytes(), list("aé€".encode())) == ["a", "", "é", "", "", "€"]


class Words:
    """A token per word, whose space is written only where another word stands before it."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return " ".join("abc"[token] for token in token_ids)


def test_a_token_is_read_with_the_one_before_it() -> None:
    assert token_texts(Words(), [0, 1, 2], breaks={2}) == ["a", " b", " c"]


def test_nobody_is_given_the_rest_of_anothers_character() -> None:
    texts = token_texts(Bytes(), [*"€".encode()[:2], *b"ab"], breaks={2})

    assert texts[2:] == ["a", "b"]
    assert "�" in "".join(texts[:2])


def test_what_would_act_on_a_terminal_is_seen_instead() -> None:
    assert visible("\x1b[31m\r\x7f\x9b\u202e\tend\n") == "␛[31m␍␡\\x9b\\u202e␉end↵\n"
    assert visible("a\nb", newline=" ") == "a b"


@given(st.text())
def test_no_control_character_is_left_but_the_end_of_a_line(text: str) -> None:
    shown = visible(text)

    assert not any(ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0 for character in shown.replace("\n", ""))
