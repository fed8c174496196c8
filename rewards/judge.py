"""A model as judge: it reads an answer and writes a score, or reads two and says which is better.

    async def essay(prompt, policy, judge):
        reply = await policy.chat([{"role": "user", "content": prompt["topic"]}])
        return await judge_score(judge, question=prompt["topic"], answer=reply.text)

The judge is a policy that the workflow takes by name, usually a frozen one (``policies.judge.path``). What it writes is
read for its last score. One that wrote no score has not judged: that is a ``RewardError`` on the trajectory, never a
zero. What is judged stands between marks which it cannot close; a judge may be talked round all the same, so watch a
number that it does not give (``policy.info``).
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import anyio

from areal_async import Policy
from areal_async.errors import RewardError, leaves_of

MAX_SHOWN: Final = 200
"""Characters of the judge's own words in an error."""


class Scale(NamedTuple):
    """The scores that a judge may give, both ends included; ``low`` becomes 0.0 and ``high`` 1.0."""

    low: float = 0.0
    high: float = 10.0


TEN: Final = Scale()

SCORE_TEMPLATE: Final = """Question:
{question}

Answer to grade:
<answer>
{answer}
</answer>

How good is this answer? End with one line "Score: N", with N from {low} (useless) to {high} (perfect)."""

REFERENCE_TEMPLATE: Final = """Question:
{question}

Right answer:
{reference}

Answer to grade:
<answer>
{answer}
</answer>

Does this answer come to the same as the right one? End with one line "Score: N", with N from {low} (no) to {high} \
(yes)."""

PAIR_TEMPLATE: Final = """Question:
{question}

<answer_a>
{first}
</answer_a>

<answer_b>
{second}
</answer_b>

Which answer is better? End with one line "Better: A", "Better: B" or "Better: tie"."""

_FIELD: Final = re.compile(r"\{(question|answer|reference|low|high|first|second)\}")
_CLOSING: Final = re.compile(r"</?\s*answer(?:_[ab])?\s*>", re.IGNORECASE)
_NUMBER: Final = (
    r"(?P<score>[-+]?[0-9]+(?:\.[0-9]+)?)(?:\s*(?:/|out of)\s*(?P<most>[0-9]+(?:\.[0-9]+)?))?(?!\w|\.[0-9])"
)
_SCORE: Final = re.compile(rf"\bscore\b[\s\W]{{0,8}}?(?:(?:is|of)\s+)?[\s*_\[\"'`]{{0,6}}{_NUMBER}", re.IGNORECASE)
_BARE: Final = re.compile(rf"\W*?{_NUMBER}\W*")
_BETTER: Final = re.compile(
    r"\bbetter\b\W{0,8}?(?:is\s+)?\W{0,6}(?:answer\W{1,3})?(?P<better>a|b|tie)\b", re.IGNORECASE
)
_WORTH: Final = {"a": 1.0, "b": 0.0, "tie": 0.5}


async def judge_score(
    judge: Policy,
    *,
    question: str,
    answer: str,
    reference: str | None = None,
    scale: Scale = TEN,
    template: str | None = None,
    num_votes: int = 1,
    **sampling: Any,
) -> float:
    """Have an answer graded; return 0.0 for the lowest score of the scale to 1.0 for the highest.

    Args:
        reference: a right answer to compare with, where there is one.
        template: what the judge is asked, with ``{answer}`` and, as needed, ``{question}``, ``{reference}``, ``{low}``
            and ``{high}``; ``None`` takes ``REFERENCE_TEMPLATE`` where there is a reference, else ``SCORE_TEMPLATE``.
        num_votes: gradings, sampled side by side, of which the mean is taken. One without a score does not count, and
            at least half must have one. They differ only where the judge is sampled above temperature 0.
        sampling: overrides for the judge's calls.

    Raises:
        RewardError: too few of the votes hold a score on the scale.
        GenerationError: the judge's servers could not finish a vote.
        ValueError: the template has no place for the answer, or the scale no two ends.
    """
    if not scale.low < scale.high:
        raise ValueError(f"scale: got {scale.low:g} to {scale.high:g}, need a low end below the high one")
    if template is None:
        template = SCORE_TEMPLATE if reference is None else REFERENCE_TEMPLATE
    request = score_request(template, question=question, answer=answer, reference=reference, scale=scale)
    votes = await _ask(judge, request, num_votes, sampling)
    score = _mean(votes, lambda text: parse_score(text, scale), f"a score from {scale.low:g} to {scale.high:g}")
    return (score - scale.low) / (scale.high - scale.low)


def score_request(template: str, *, question: str, answer: str, reference: str | None, scale: Scale = TEN) -> str:
    """Return what ``judge_score`` asks, which a model that is to judge has to learn to read.

    Raises:
        ValueError: the template has no place for the answer.
    """
    fields = {
        "question": question,
        "answer": _unmarked(answer),
        "reference": reference or "",
        "low": f"{scale.low:g}",
        "high": f"{scale.high:g}",
    }
    return _filled(template, fields, need=("answer",))


async def judge_prefers(
    judge: Policy,
    *,
    question: str,
    first: str,
    second: str,
    template: str = PAIR_TEMPLATE,
    num_votes: int = 1,
    **sampling: Any,
) -> float:
    """Have two answers compared; return 1.0 where the first is better, 0.0 where the second is, 0.5 for a tie.

    Each is shown first once and second once, and the mean taken: a judge that prefers a place gives a tie.

    Args:
        template: as of ``judge_score``, with ``{first}``, ``{second}`` and, as needed, ``{question}``.
        num_votes: for each of the two orders.

    Raises:
        RewardError: in one order, too few of the votes name the better answer.
        GenerationError: the judge's servers could not finish a vote.
        ValueError: the template has no place for both answers.
    """
    answers = _unmarked(first), _unmarked(second)
    found: dict[bool, float] = {}

    async def ask(is_swapped: bool) -> None:
        shown = reversed(answers) if is_swapped else answers
        fields = {"question": question, **dict(zip(("first", "second"), shown, strict=True))}
        request = _filled(template, fields, need=("first", "second"))
        worth = _mean(await _ask(judge, request, num_votes, sampling), parse_preference, "Better: A, B or tie")
        found[is_swapped] = 1.0 - worth if is_swapped else worth

    try:
        async with anyio.create_task_group() as tasks:
            for is_swapped in (False, True):
                tasks.start_soon(ask, is_swapped)
    except ExceptionGroup as errors:
        raise leaves_of(errors)[0] from errors
    return (found[False] + found[True]) / 2


def parse_score(text: str, scale: Scale) -> float | None:
    """Return the last score that a judge wrote; None where there is none, or it is not on the scale.

    ``Score: 7``, ``**Score:** 7/10``, ``score = [[7.5]]`` and a bare ``7`` are scores. One out of something else than
    the scale's highest is none.
    """
    found = [*_SCORE.finditer(text)][-1:] or [one for one in [_BARE.fullmatch(text)] if one]
    if not found:
        return None
    score, most = float(found[0]["score"]), found[0]["most"]
    if most is not None and float(most) != scale.high:
        return None
    return score if math.isfinite(score) and scale.low <= score <= scale.high else None


def parse_preference(text: str) -> float | None:
    """Return 1.0 for a judge that last called A better, 0.0 for B, 0.5 for a tie; None for one that named none."""
    found = [*_BETTER.finditer(text)]
    return _WORTH[found[-1]["better"].lower()] if found else None


async def _ask(judge: Policy, request: str, num_votes: int, sampling: Mapping[str, Any]) -> list[str]:
    if num_votes < 1:
        raise ValueError(f"num_votes: got {num_votes}, need at least 1")
    messages = [{"role": "user", "content": request}]
    return [reply.text for reply in await judge.chat(messages, n=num_votes, **sampling)]


def _mean(votes: list[str], parse: Callable[[str], float | None], need: str) -> float:
    found = [value for text in votes if (value := parse(text)) is not None]
    if 2 * len(found) < len(votes) or not found:
        silent = next(text for text in votes if parse(text) is None)
        raise RewardError(
            f"judge: {len(found)} of {len(votes)} votes hold a verdict, need {need} from at least half; got "
            f"{' '.join(silent.split())[-MAX_SHOWN:]!r}"
        )
    return math.fsum(found) / len(found)


def _filled(template: str, fields: Mapping[str, str], *, need: tuple[str, ...]) -> str:
    """Return the question to the judge. Filled in one go: what is judged cannot name a field of its own."""
    missing = [name for name in need if f"{{{name}}}" not in template]
    if missing:
        raise ValueError(f"template: got none with {{{missing[0]}}}, need a place for what is judged")
    return _FIELD.sub(lambda field: fields.get(field[1], field[0]), template)


def _unmarked(answer: str) -> str:
    """Return the answer without the marks that enclose it: it cannot end itself and speak as the asker."""
    return _CLOSING.sub("", answer)
