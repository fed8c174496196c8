"""The report as one HTML page. Pure: what it tells is given, what it needs is inside."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from areal_async.monitor.report.charts import COLOURS, Series, bars, line_chart, number_text, over_steps, stacked_bars
from areal_async.monitor.report.data import ReportData
from areal_async.monitor.token_text import visible
from areal_async.monitor.transcript import shade_number
from areal_async.monitor.view import STEP_PARTS, number
from areal_async.protocol.types import mean
from areal_async.versions.arms import arm_text
from areal_async.versions.evaluated import figure

FOLDER = Path(__file__).parent
"""Folder of ``page.html``, its style sheet ``page.css`` and its scripts: ``page.js``, and of a page that is watched
``answer.js`` and ``follow.js``. All of it stands in the page: nothing is fetched but, by a watched one, the page.
``page.comparison.html`` has the same style, and no script."""
MAX_TOKENS = 4000
"""Tokens that are shown of one sample; the rest is left to ``trajectories --show``."""
MAX_TAGS = 3
"""Tags that are shown."""
TABLE_STEPS = 20
TABLE = {
    "step": "step", "weights_version": "weights", "reward_mean": "reward", "loss": "loss", "grad_norm": "grad norm",
    "entropy_mean": "entropy, nats", "staleness_mean": "age, versions", "num_tokens": "tokens",
    "time_step_s": "time, s",
}  # fmt: skip
HEALTH = (
    ("loss", "Loss", "", "of the policy, as it is aggregated"),
    ("entropy_mean", "Entropy", "nats per token", "of the policy where it was trained; falls as it grows sure"),
    ("grad_norm", "Gradient norm", "", "before clipping, mean over the step's updates"),
    ("logprob_gap_all_mean", "Gap to the servers", "nats per token", "mean |trainer − server| logprob, all tokens"),
    ("clip_fraction", "Clipped", "share of tokens", "at which the clip acted"),
    ("kl_mean", "Distance to the reference", "nats per token", "estimated KL divergence"),
    ("value_loss", "Critic's loss", "", "half the squared error"),
)  # fmt: skip


class Card(NamedTuple):
    """A chart with what is said about it."""

    title: str
    unit: str
    chart: Markup
    names: Sequence[str] = ()
    """What the colours mean, in their order; shown where there are several."""
    note: str = ""
    newest: str = ""
    """The newest value."""


def render(data: ReportData, *, refresh_s: float | None = None) -> str:
    """Return the whole page.

    Args:
        refresh_s: the page looks every so many seconds for what was written since; None leaves that to its button.
    """
    counts = bars([(name, float(count)) for name, count in data.outcomes], unit="groups", label="outcome")
    return (
        make_environment()
        .get_template("page.html")
        .render(
            data=data,
            refresh_s=refresh_s,
            colours=COLOURS,
            tiles=_tiles(data),
            progress=_progress(data),
            speed=_speed(data),
            health=_health(data),
            outcomes=[Card("Groups", "by outcome", Markup(counts))],
            max_tokens=MAX_TOKENS,
            table=TABLE,
            num_steps=TABLE_STEPS,
            number_text=number_text,
            shade_number=shade_number,
        )
    )


def make_environment() -> jinja2.Environment:
    """Return what pages are made with: whatever they are given is text, and no markup."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals |= {
        "asset": lambda name: Markup((FOLDER / name).read_text(encoding="utf-8")),
        "visible": visible,
    }
    return environment


def _tiles(data: ReportData) -> Iterator[tuple[str, str]]:
    lines = data.lines
    recent = [value for value in _column(lines[-10:], "reward_mean") if value is not None]
    seconds, trajectories, tokens = (
        sum(value or 0 for value in _column(lines, key)) for key in ("time_step_s", "num_trajectories", "num_tokens")
    )
    yield number_text(mean(recent)) if recent else "–", f"mean reward, last {len(recent)} steps"
    if data.evaluations:
        newest = data.evaluations[-1]
        yield figure(newest), f"held-out reward at step {newest['step']}"
    yield from ((version, f"is {tag}") for tag, version in list(data.tags.items())[:MAX_TAGS])
    yield number_text(trajectories), "trajectories trained"
    yield number_text(tokens), "tokens trained"
    yield _duration(seconds), "in training steps"
    yield f"{seconds / len(lines):.2f} s" if lines else "–", "per step, mean"


def _progress(data: ReportData) -> Iterator[Card]:
    lines, steps = data.lines, _steps(data)
    held_out: dict[int, list[float]] = {}
    for one in data.evaluations:
        if one["accuracy"] is not None:
            held_out.setdefault(int(one["step"]), []).append(float(one["accuracy"]))
    curves = {"training": dict(zip(steps, _column(lines, "reward_mean"), strict=True))}
    if held_out:
        curves["held-out"] = {step: mean(values) for step, values in held_out.items()}
    if data.abandoned:  # of each step the newest
        curves["given up"] = dict(zip(map(_step, data.abandoned), _column(data.abandoned, "reward_mean"), strict=True))
    note = "; ".join(_given_up(data.abandoned))
    yield _lines("Reward", "mean", *over_steps(curves, marked=["held-out"]), axis="reward", note=note)
    tasks = sorted({key for line in lines for key in line if key.startswith("reward/")})[:5]
    if tasks:
        by_task = [Series(key.removeprefix("reward/"), _column(lines, key)) for key in tasks]
        yield _lines("Reward by task", "mean", steps, by_task, axis="reward")
    yield from _arms(data)
    ages = [
        Series("mean", _column(lines, "staleness_mean")),
        Series("oldest", _column(lines, "staleness_max"), is_greatest=True),
    ]
    yield _lines("Staleness", "versions", steps, ages, note="age of trained tokens; 0 is on-policy", from_zero=True)
    total = sum(data.ages.values())
    shares = [(str(age), 100 * count / total) for age, count in data.ages.items()]
    first, last = data.aged_steps
    note = f"trained in steps {first} to {last}" if last else ""
    ages_chart = Markup(bars(shares, unit="%", label="age in versions"))
    yield Card("Tokens by age", "% of tokens", ages_chart, note=note)
    lengths = [Series("sampled tokens", _column(lines, "output_tokens_mean"))]
    yield _lines("Length of answers", "tokens", steps, lengths, note="mean, sampled")
    cut = [Series("cut off", [None if one is None else 100 * one for one in _column(lines, "truncated_share")])]
    yield _lines("Answers cut off", "% of trajectories", steps, cut, axis="%", note="by max_new_tokens")


def _arms(data: ReportData) -> Iterator[Card]:
    """Yield how much better each arm was than the weights of each step, with its interval."""
    for name in dict.fromkeys(str(line.get("name")) for line in data.arms):
        own = [line for line in data.arms if line.get("name") == name]
        curves = {
            key: {int(number(line, "step")): line[key] for line in own if isinstance(line.get(key), int | float)}
            for key in ("difference", "low", "high")
        }
        yield _lines(f"Arm {name}", "reward", *over_steps(curves, marked=()), note=arm_text(own[-1]))


def _given_up(abandoned: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say which steps each lineage has gone back behind."""
    steps: dict[int, list[int]] = {}
    for line in abandoned:
        steps.setdefault(int(line["abandoned_by"]), []).append(_step(line))
    for lineage, own in sorted(steps.items()):
        yield f"lineage {lineage} went back behind steps {min(own)} to {max(own)}"


def _speed(data: ReportData) -> Iterator[Card]:
    lines, steps = data.lines, _steps(data)
    whole = _column(lines, "time_step_s")
    parts = {name: _column(lines, key) for name, key in STEP_PARTS.items()}
    rest: list[float | None] = [
        max(0.0, (total or 0.0) - sum(values[place] or 0.0 for values in parts.values()))
        for place, total in enumerate(whole)
    ]
    parts |= {"other": rest, "checkpoint": [data.checkpoints_s.get(step, 0.0) for step in steps]}
    times = [Series(name, values) for name, values in parts.items()]
    yield Card("Time of a step", "s", Markup(stacked_bars(steps, times, unit="s")), names=list(parts))
    for what, key in (("Tokens", "num_tokens"), ("Trajectories", "num_trajectories")):
        counts = zip(_column(lines, key), whole, strict=True)
        rates = [count / seconds if count is not None and seconds else None for count, seconds in counts]
        series = [Series(what.lower(), rates)]
        yield _lines(what, "trained/s", steps, series, axis=f"{what.lower()}/s", from_zero=True)


def _health(data: ReportData) -> Iterator[Card]:
    for key, title, unit, note in HEALTH:
        values = _column(data.lines, key)
        if any(values) or key not in ("kl_mean", "value_loss"):
            yield _lines(title, unit, _steps(data), [Series(title.lower(), values)], note=note)


def _lines(
    title: str, unit: str, steps: Sequence[int], series: Sequence[Series], *, axis: str | None = None, note: str = "",
    from_zero: bool = False,
) -> Card:  # fmt: skip
    """Return lines over steps; ``axis`` is the unit of the values where it is not that of the title."""
    chart = line_chart(steps, series, unit=unit if axis is None else axis, from_zero=from_zero)
    newest = next((value for value in reversed(series[0].values) if value is not None), None)
    told = "" if newest is None else number_text(newest)
    return Card(title, unit, Markup(chart), names=[one.name for one in series], note=note, newest=told)


def _steps(data: ReportData) -> list[int]:
    return [_step(line) for line in data.lines]


def _step(line: Mapping[str, Any]) -> int:
    return int(line["step"])


def _column(lines: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    return [float(line[name]) if isinstance(line.get(name), int | float) else None for line in lines]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
