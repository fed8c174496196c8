"""Score a text against the expected one, or the nearest of several: the same but for spelling, or by shared words.

The answer is what is marked (`####` or a box), else the whole text. Upper and lower case, punctuation, articles and
blanks do not count. What changes a number or a name does: signs (`-5`, `<5`, `C++`, `C#`, `5%`), what stands between
two digits (`1.5`, `1/5`, `10-15`), digits that only look the same (full-width or other ones).

Invariant: no text makes anything here raise; the time taken grows no faster than the text.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Final

from areal_async import reward
from rewards.final_answer import marked_answer
from rewards.thought import after_thought

MOST_TIMES_AS_LONG: Final = 2
MOST_MORE_CHARACTERS: Final = 100
"""What is longer than the expected answer by more than these is another one, even if the rest is punctuation."""
MOST_TIMES_AS_LONG_TO_SHARE: Final = 100
"""Beyond it, every expected word is worth less than 0.02 even if all are there."""
_ARTICLES: Final = re.compile(r"\b(?:a|an|the)\b")
_DASHES: Final = str.maketrans(dict.fromkeys("−–‐‑﹣", "-"))
_NO_WORD: Final = re.compile(
    r"(?P<sign>(?<=[0-9])[.,:/-](?=[0-9])|(?<![^\W_])(?:-\s?(?=[.$€£]?[0-9])|-(?=[a-z]\b)|\.(?=[0-9]))"
    r"|(?<=[0-9])%|(?<=\w)#|[+<>=≤≥≠±×÷^√])|[^\w\s]|_"
)


@reward(timeout_s=5.0)
def text_matches(text: str, answers: str | Sequence[str]) -> float:
    """Return 1.0 when the answer is one of those expected, else 0.0.

    Raises:
        ValueError: no answer is expected, or an empty one.
    """
    said = marked_answer(text)
    said = after_thought(text) if said is None else said
    return float(any(same_text(said, answer) for answer in _checked(answers)))


@reward(timeout_s=5.0)
def token_f1(text: str, answers: str | Sequence[str], *, at_least: float = 0.0) -> float:
    """Return the harmonic mean of precision and recall of words, 0.0 to 1.0, against the nearest expected answer.

    Args:
        at_least: what is below it becomes 0.0; some shared words are no answer yet.

    Raises:
        ValueError: no answer is expected, or an empty one.

    Source: Rajpurkar et al. 2016 (SQuAD), section 6.1.
    """
    said = marked_answer(text)
    score = max(shared_words(after_thought(text) if said is None else said, answer) for answer in _checked(answers))
    return score if score >= at_least else 0.0


def same_text(said: str, expected: str) -> bool:
    """Compare without case, punctuation, articles and blanks; with them where nothing else is expected."""
    if len(said) > MOST_TIMES_AS_LONG * len(expected) + MOST_MORE_CHARACTERS:
        return False
    words = normalized(expected)
    return normalized(said) == words if words else _plainly(said) == _plainly(expected)


def shared_words(said: str, expected: str) -> float:
    """Return the F1 of two bags of words: saying a word twice does not count twice, and every needless word costs."""
    if len(said) > MOST_TIMES_AS_LONG_TO_SHARE * (len(expected) + MOST_MORE_CHARACTERS):
        return 0.0
    said_words, expected_words = normalized(said).split(), normalized(expected).split()
    num_shared = sum((Counter(said_words) & Counter(expected_words)).values())
    if num_shared == 0:
        return float(not expected_words and _plainly(said) == _plainly(expected))
    return 2 * num_shared / (len(said_words) + len(expected_words))


def normalized(text: str) -> str:
    """Return a text's words and signs in lower case, without articles and punctuation, one blank between."""
    text = unicodedata.normalize("NFC", text).casefold().translate(_DASHES)
    return " ".join(_ARTICLES.sub(" ", _NO_WORD.sub(_kept, text)).split())


def _kept(sign: re.Match[str]) -> str:
    """Return a sign that says something, a blank for punctuation."""
    return sign[0].strip() if sign["sign"] else " "


def _plainly(text: str) -> list[str]:
    return text.casefold().split()


def _checked(answers: str | Sequence[str]) -> Sequence[str]:
    answers = [answers] if isinstance(answers, str) else answers
    if not answers or not all(answer.strip() for answer in answers):
        raise ValueError(f"answers: got {list(answers)!r:.100}, need at least one and none that is empty")
    return answers
