"""The report as one HTML page. Pure: what it tells is given, what it needs is inside."""

import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areal_async.monitor.evaluated import figure
from areal_async.monitor.report.assets import ANSWER, FOLLOW, SCRIPT, STYLE
from areal_async.monitor.report.charts import Series, bars, legend, line_chart, number, stacked_bars
from areal_async.monitor.report.data import ReportData, ReportTrajectory
from areal_async.monitor.token_text import visible
from areal_async.monitor.token_views import TokenKind, TokenView
from areal_async.monitor.transcript import shade_number

MAX_TOKENS = 4000
"""Of one sample; the rest is left to ``trajectories --show``."""
TABLE_STEPS = 20
TABLE = (
    ("step", "step"), ("weights_version", "weights"), ("reward_mean", "reward"), ("loss", "loss"),
    ("grad_norm", "grad norm"), ("entropy_mean", "entropy, nats"), ("staleness_mean", "age, versions"),
    ("num_tokens", "tokens"), ("time_step_s", "time, s"),
)  # fmt: skip
HEALTH = (
    ("loss", "Loss", "", "of the policy, as it is aggregated"),
    ("entropy_mean", "Entropy", "nats per token", "of the policy where it was trained; falls as it grows sure"),
    ("grad_norm", "Gradient norm", "", "before clipping, mean over the step's updates"),
    ("logprob_gap_all_mean", "Gap to the servers", "nats per token", "mean |trainer − server| logprob, all tokens"),
    ("clip_fraction", "Clipped", "share of tokens", "whose gradient the clip took away"),
    ("kl_mean", "Distance to the reference", "nats per token", "estimated KL divergence"),
    ("value_loss", "Critic's loss", "", "half the squared error"),
)  # fmt: skip


def render(data: ReportData, *, refresh_s: float | None = None) -> str:
    """Return the whole page.

    Args:
        refresh_s: the page looks every so many seconds for what was written since; None leaves that to its button.
    """
    refresh = _refresh(data, refresh_s) if refresh_s is not None else ""
    script = SCRIPT + (FOLLOW if refresh_s is not None else "start();")
    sections = [
        ("Reward and age of the data", _cards(_progress(data))),
        ("Time and throughput", _cards(_speed(data))),
        ("Health of learning", _cards(_health(data))),
        ("What became of groups", _outcomes(data)),
        ("Samples by reward", _samples(data)),
        ("Newest steps", _table(data)),
        ("Settings and versions", _settings(data)),
    ]
    body = "".join(f"<section><h2>{_text(title)}</h2>{content}</section>" for title, content in sections)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{refresh}<title>run {_text(data.run)}</title><style>{STYLE}</style></head><body><main>"
        f'<h1>{_text(data.run)}</h1><p class="about"><span>step {_newest(data)} of {data.steps}</span>'
        f"<span>written {data.written_at:%Y-%m-%d %H:%M:%S %Z}</span>"
        '<button onclick="location.reload()">reload</button></p>'
        f'{_tiles(data)}{body}</main><div id="tip" role="status"></div><script>{script}</script></body></html>\n'
    )


def _refresh(data: ReportData, refresh_s: float) -> str:
    known = f"const STAMP = {json.dumps(data.written_at.isoformat())}, LOOK_MS = {1000 * refresh_s:g};"
    without_scripts = f'<noscript><meta http-equiv="refresh" content="{math.ceil(refresh_s)}"></noscript>'
    return f"{without_scripts}<script>{known}{ANSWER}</script>"


def _tiles(data: ReportData) -> str:
    lines = data.lines
    recent = [value for value in _column(lines[-10:], "reward_mean") if value is not None]
    seconds = sum(value or 0.0 for value in _column(lines, "time_step_s"))
    tiles = [(number(sum(recent) / len(recent)) if recent else "–", f"mean reward, last {len(recent)} steps")]
    if data.evaluations:
        newest = data.evaluations[-1]
        tiles.append((figure(newest), f"held-out reward at step {newest['step']}"))
    tiles += [
        (number(sum(value or 0 for value in _column(lines, "num_trajectories"))), "trajectories trained"),
        (number(sum(value or 0 for value in _column(lines, "num_tokens"))), "tokens trained"),
        (_duration(seconds), "in training steps"),
        (f"{seconds / len(lines):.2f} s" if lines else "–", "per step, mean"),
    ]
    items = "".join(f'<div class="tile"><b>{_text(value)}</b><span>{_text(what)}</span></div>' for value, what in tiles)
    return f'<div class="tiles">{items}</div>'


def _progress(data: ReportData) -> Iterator[str]:
    lines, steps = data.lines, _steps(data)
    held_out: dict[int, list[float]] = {}
    for one in data.evaluations:
        if one["accuracy"] is not None:
            held_out.setdefault(int(one["step"]), []).append(float(one["accuracy"]))
    every = sorted({*steps, *held_out})
    rewards = dict(zip(steps, _column(lines, "reward_mean"), strict=True))
    series = [Series("training", [rewards.get(step) for step in every])]
    if held_out:
        means = {step: sum(values) / len(values) for step, values in held_out.items()}
        series.append(Series("held-out", [means.get(step) for step in every], has_marks=True))
    yield _card("Reward", "mean", line_chart(every, series, unit="reward") if every else "", series=series)
    tasks = sorted({key for line in lines for key in line if key.startswith("reward/")})[:5]
    if tasks:
        by_task = [Series(key.removeprefix("reward/"), _column(lines, key)) for key in tasks]
        yield _card("Reward by task", "mean", line_chart(steps, by_task, unit="reward"), series=by_task)
    ages = [
        Series("mean", _column(lines, "staleness_mean")),
        Series("oldest", _column(lines, "staleness_max"), is_greatest=True),
    ]
    chart = line_chart(steps, ages, unit="versions", from_zero=True) if steps else ""
    yield _card("Staleness", "versions", chart, series=ages, note="age of trained tokens; 0 is on-policy")
    total = sum(data.ages.values())
    shares = [(str(age), 100 * count / total) for age, count in data.ages.items()]
    first, last = data.aged_steps
    yield _card(
        "Tokens by age", "% of tokens", bars(shares, unit="%", label="age in versions"),
        note=f"trained in steps {first} to {last}" if last else "",
    )  # fmt: skip
    lengths = [Series("sampled tokens", _column(lines, "output_tokens_mean"))]
    yield _card("Length of answers", "tokens", _over(steps, lengths, "tokens"), series=lengths, note="mean, sampled")
    cut = [Series("cut off", [None if one is None else 100 * one for one in _column(lines, "truncated_share")])]
    yield _card(
        "Answers cut off", "% of trajectories", _over(steps, cut, "%"), series=cut, note="by max_new_tokens"
    )  # fmt: skip


def _speed(data: ReportData) -> Iterator[str]:
    lines, steps = data.lines, _steps(data)
    whole = _column(lines, "time_step_s")
    parts = {
        "waiting for data": _column(lines, "time_wait_data_s"),
        "training": _column(lines, "time_train_s"),
        "weights": _column(lines, "time_weights_s"),
    }
    rest: list[float | None] = [
        max(0.0, (total or 0.0) - sum(values[place] or 0.0 for values in parts.values()))
        for place, total in enumerate(whole)
    ]
    parts |= {"other": rest, "checkpoint": [data.checkpoints_s.get(step, 0.0) for step in steps]}
    times = [Series(name, values) for name, values in parts.items()]
    yield _card("Time of a step", "s", stacked_bars(steps, times, unit="s"), series=times, has_newest=False)
    for title, unit, key in (("Tokens", "trained/s", "num_tokens"), ("Trajectories", "trained/s", "num_trajectories")):
        rates = [
            count / seconds if count is not None and seconds else None
            for count, seconds in zip(_column(lines, key), whole, strict=True)
        ]
        series = [Series(title.lower(), rates)]
        yield _card(title, unit, _over(steps, series, f"{title.lower()}/s", from_zero=True), series=series)


def _health(data: ReportData) -> Iterator[str]:
    for key, title, unit, note in HEALTH:
        values = _column(data.lines, key)
        if key in ("kl_mean", "value_loss") and not any(values):
            continue
        series = [Series(title.lower(), values)]
        yield _card(title, unit, _over(_steps(data), series, unit), series=series, note=note)


def _outcomes(data: ReportData) -> str:
    counts = bars([(name, float(count)) for name, count in data.fates], unit="groups", label="outcome")
    cards = [_card("Groups", "by outcome", counts)]
    if data.reasons:
        rows = "".join(
            f'<tr><td>{count}</td><td class="words bad">{_text(visible(reason, newline=" "))[:300]}</td></tr>'
            for reason, count in data.reasons
        )
        cards.append(
            '<div class="card" data-name="why"><header><h3>Why not trained</h3></header>'
            f'<div class="wide"><table>{rows}</table></div></div>'
        )
    return f'<div class="charts">{"".join(cards)}</div>'


def _samples(data: ReportData) -> str:
    if not data.samples:
        return '<p class="none">nothing is archived yet</p>'
    return _shades() + "".join(_sample(one) for one in data.samples)


def _shades() -> str:
    keys = " ".join(
        f'<span class="t{f" p{place}" if place else ""}">{name}</span>'
        for place, name in enumerate(("likely", "50–90 %", "10–50 %", "1–10 %", "under 1 %"))
    )
    return (
        f'<p class="tokens"><span class="g">given</span> {keys} <span class="m">sampled, left out of the loss</span> '
        '<span class="v">1-4</span>sampled by these weights from here on</p>'
    )


def _sample(sample: ReportTrajectory) -> str:
    entry = sample.entry
    facts = [f"step {entry.step}", entry.id, entry.workflow, f"advantage {entry.advantage:+.2f}"]
    facts += [f"{entry.tokens} tokens, {entry.output_tokens} sampled", f"weights {entry.versions}"]
    if entry.truncated:
        facts.append("cut off")
    told = "".join(f"<span>{_text(fact)}</span>" for fact in facts)
    body, room = "", MAX_TOKENS
    for place, views in enumerate(sample.sequences, start=1):
        title = f"<p>sequence {place} of {len(sample.sequences)}</p>" if len(sample.sequences) > 1 else ""
        body += f'{title}<div class="tokens">{"".join(map(_token, views[:room]))}</div>'
        room -= len(views)
        if room < 0:
            body += f"<p>{-room} tokens of it, and what follows: trajectories --show {_text(entry.id)}</p>"
            break
    name = f"{sample.what}-{entry.id}"
    return (
        f'<details id="{_text(name)}"><summary><b>{sample.what}: reward {number(entry.reward or 0.0)}</b>{told}'
        f"</summary>{body}</details>"
    )


def _token(view: TokenView) -> str:
    mark = f'<span class="v">{view.version}</span>' if view.begins_version else ""
    text = _text(visible(view.text))
    if view.kind is TokenKind.GIVEN:
        return f'{mark}<span class="g">{text}</span>'
    level = shade_number(view.logprob)
    classes = "m" if view.kind is TokenKind.MASKED else f"t p{level}" if level else "t"
    return f'{mark}<span class="{classes}" title="logprob {view.logprob:.3f}, weights {view.version}">{text}</span>'


def _table(data: ReportData) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for _, name in TABLE)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_cell(line.get(key))}</td>" for key, _ in TABLE) + "</tr>"
        for line in reversed(data.lines[-TABLE_STEPS:])
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="card wide" data-name="steps">{table}</div>'


def _settings(data: ReportData) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in data.versions.items())
    return (
        f'<p class="note">This report was written by {_text(versions)}.</p>'
        f'<details id="settings"><summary>every setting of the run</summary><pre>{_text(data.settings)}</pre></details>'
    )


def _card(
    title: str, unit: str, chart: str, *, series: Sequence[Series] = (), note: str = "", has_newest: bool = True
) -> str:
    newest = next((value for value in reversed(series[0].values) if value is not None), None) if series else None
    told = f"<output>{number(newest)}</output>" if newest is not None and has_newest else ""
    told_unit = f' <span class="unit">{_text(unit)}</span>' if unit else ""
    told_note = f'<p class="note">{_text(note)}</p>' if note else ""
    head = f"<header><h3>{_text(title)}{told_unit}</h3>{told}</header>"
    return (
        f'<div class="card" data-name="{_text(title)}">{head}{told_note}'
        f"{legend([one.name for one in series])}{chart or '<p class=none>no steps yet</p>'}</div>"
    )


def _cards(cards: Iterator[str]) -> str:
    return f'<div class="charts">{"".join(cards)}</div>'


def _over(steps: Sequence[int], series: Sequence[Series], unit: str, *, from_zero: bool = False) -> str:
    return line_chart(steps, series, unit=unit, from_zero=from_zero) if steps else ""


def _steps(data: ReportData) -> list[int]:
    return [int(line["step"]) for line in data.lines]


def _newest(data: ReportData) -> int:
    return int(data.lines[-1]["step"]) if data.lines else 0


def _column(lines: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    return [float(line[name]) if isinstance(line.get(name), int | float) else None for line in lines]


def _cell(value: Any) -> str:
    return number(value) if isinstance(value, int | float) else _text(str(value if value is not None else ""))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _text(text: str) -> str:
    return html.escape(text, quote=True)
