"""What a comparison came to, for people: in sentences, and as Markdown. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence

from areal_async.protocol.types import Record
from areal_async.versions.comparison import Answer, Changed, Compared, Comparison, Side
from areal_async.versions.evaluated import answers, measured

MAX_ROWS = 20
"""Rows that Markdown shows of those that differ."""
MAX_CHARACTERS = 2000
"""Of an answer, and of a row."""
NO_FIGURE = "–"
NO_TEXT = "(no text is kept)"


def sentences(comparison: Comparison) -> Iterator[str]:
    """Yield what each task came to, and all of them where there are several: a line, and one for each side."""
    a, b = comparison.a, comparison.b
    for one in parts(comparison):
        difference = told_difference(one, comparison.alpha)
        yield f"{one.task or 'all tasks'}: {b.name} {difference} against {a.name}, {told_rows(one)}"
        for side, scores in ((a, one.a), (b, one.b)):
            yield f"  {side.name}: {told_scores(scores)}"


def parts(comparison: Comparison) -> list[Compared]:
    """Return what is told of: each task, and all of them together where there are several."""
    overall = [] if comparison.overall is None or len(comparison.tasks) < 2 else [comparison.overall]
    return [*comparison.tasks, *overall]


def told_difference(one: Compared, alpha: float) -> str:
    """Return ``+0.052 (95 % interval +0.012 to +0.094)``."""
    if one.difference is None:
        return "has no row that both have answered"
    return f"{one.difference:+.3f}" + (f" ({ends})" if (ends := told_interval(one, alpha)) else "")


def told_interval(one: Compared, alpha: float) -> str:
    """Return ``95 % interval +0.012 to +0.094``, by the chance that it is wrong; nothing where it has none."""
    if one.low is None or one.high is None:
        return ""
    return f"{told_level(alpha)} {one.low:+.3f} to {one.high:+.3f}"


def told_level(alpha: float) -> str:
    """Return ``95 % interval`` of one that is wrong with this chance."""
    return f"{100 * (1 - alpha):g} % interval"


def told_rows(one: Compared) -> str:
    """Return ``256 rows: 21 won, 227 tied, 8 lost, McNemar p 0.024``, and how many were left out."""
    chance = "" if one.mcnemar_p is None else f", McNemar p {one.mcnemar_p:.3g}"
    left_out = f", {one.num_left_out} left out, which one of them has not answered" if one.num_left_out else ""
    return f"{one.num_rows} rows: {one.wins} won, {one.ties} tied, {one.losses} lost{chance}{left_out}"


def told_scores(scores: Record) -> str:
    """Return ``avg@8 0.412, pass@8 0.700, 2048 answers scored, 0 failed, 31.5 tokens``."""
    line = {name: getattr(scores, name) for name in scores.__struct_fields__}
    length = "" if line["num_tokens_mean"] is None else f", {line['num_tokens_mean']:.1f} tokens"
    return f"{measured(line)}, {line['num_scored']} {answers(line)} scored, {line['num_failed']} failed{length}"


def told_side(side: Side) -> str:
    """Return what answers, in full."""
    where = side.server or side.model or f"{side.run}, version {side.version or 'unknown'}"
    return ", ".join([where, *(f"{name}={value}" for name, value in side.settings.items())])


def told_samples(comparison: Comparison) -> str:
    """Return ``8 sampled answers``."""
    return "one greedy answer" if comparison.num_samples == 1 else f"{comparison.num_samples} sampled answers"


def told_rewards(given: Sequence[Answer]) -> str:
    """Return the rewards of a row's answers, with an error in the place of what has none."""
    return ", ".join("error" if one.reward is None else f"{one.reward:g}" for one in given)


def markdown(comparison: Comparison, changed: Sequence[Changed], rows: Mapping[tuple[str, int], str]) -> str:
    """Return the result with the first rows that differ and what each side said.

    Args:
        rows: text of those rows.
    """
    a, b, interval = comparison.a, comparison.b, told_level(comparison.alpha)
    lines = [
        f"# {_plain(b.name)} against {_plain(a.name)}",
        "",
        f"- a: {_plain(told_side(a))}",
        f"- b: {_plain(told_side(b))}",
        f"- {told_samples(comparison)} to each row",
        f"- begun {comparison.at} by {_plain(comparison.by)}",
        "",
        f"| task | b less a, {interval} | rows | won | tied | lost | left out | McNemar p | a | b |",
        "|---|--:|--:|--:|--:|--:|--:|--:|---|---|",
        *(_table_row(one) for one in parts(comparison)),
        "",
        f"## Rows that differ: {len(changed)}",
    ]
    for one in changed[:MAX_ROWS]:
        lines += ["", f"### {_plain(one.task)}, row {one.row}: {one.difference:+.3f}", ""]
        lines += _fenced(rows.get((one.task, one.row), ""))
        for side, given in (("a", one.a), ("b", one.b)):
            lines += ["", f"{side}: {told_rewards(given)}", ""]
            for answer in given[:1]:
                lines += _fenced(answer.error or answer.text or NO_TEXT)
    if len(changed) > MAX_ROWS:
        lines += ["", f"{len(changed) - MAX_ROWS} more are in answers.jsonl."]
    return "\n".join(lines) + "\n"


def _table_row(one: Compared) -> str:
    ends = "" if one.low is None or one.high is None else f", {one.low:+.3f} to {one.high:+.3f}"
    difference = NO_FIGURE if one.difference is None else f"{one.difference:+.3f}{ends}"
    chance = NO_FIGURE if one.mcnemar_p is None else f"{one.mcnemar_p:.3g}"
    counts = (one.num_rows, one.wins, one.ties, one.losses, one.num_left_out)
    cells = (_plain(one.task or "all"), difference, *counts, chance, told_scores(one.a), told_scores(one.b))
    return f"| {' | '.join(map(str, cells))} |"


def _plain(text: str) -> str:
    """Return text on one line in which nothing is markup."""
    return re.sub(r"([\\`*_{}\[\]<>|#~&])", r"\\\1", " ".join(text.split()))


def _fenced(text: str) -> list[str]:
    """Return a block of text as it is, whatever is in it: its fence is longer than any there."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    shown = text[:MAX_CHARACTERS] + ("..." if len(text) > MAX_CHARACTERS else "")
    return [f"{fence}text", *shown.splitlines(), fence]
