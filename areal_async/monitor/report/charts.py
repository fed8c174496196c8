"""Small charts as SVG: lines over steps, stacked bars over steps, bars by kind. Pure.

Colours are classes that the page's style sheet gives meaning to, in light and in dark. Every chart carries its own
numbers for the page's script, which shows them where the pointer is. Widths and heights are units of the view box,
which is scaled to the width of a card: about one unit to a pixel on a phone, a little more elsewhere.
"""

import bisect
import html
import itertools
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 8, 30
MAX_BARS = 60
"""More steps than that are drawn as means over neighbouring ones."""
MAX_POINTS = 1000
"""Points of a line; more steps are drawn as with bars. A chart has fewer pixels."""
NUM_Y_TICKS, NUM_X_TICKS = 4, 5

COLOURS = {
    "page": "#f3f3f1",
    "card": "#fcfcfb",
    "ink": "#14140f",
    "soft": "#55554f",
    "faint": "#6d6d65",
    "line": "#e2e1dc",
    "c1": "#2a78d6",
    "c2": "#d2551f",
    "c3": "#14855c",
    "c4": "#7a4fc4",
    "c5": "#a87000",
    "tint": "210, 85, 31",
    "bad": "#b3261e",
}
"""Colours by name: of pictures, and of the page by day."""


class Series(NamedTuple):
    """Values over steps; None, NaN and infinities are gaps."""

    name: str
    values: Sequence[float | None]
    has_marks: bool = False
    """A dot at each value, joined over gaps: few of them, far apart."""
    is_greatest: bool = False
    """Neighbouring steps that are drawn as one show their greatest value and not their mean."""


def over_steps(
    curves: Mapping[str, Mapping[int, float | None]], *, marked: Collection[str]
) -> tuple[list[int], list[Series]]:
    """Return every step that a curve has a value at, and each curve over them; the ``marked`` ones have few values."""
    steps = sorted({step for curve in curves.values() for step in curve})
    return steps, [
        Series(name, [curve.get(step) for step in steps], has_marks=name in marked) for name, curve in curves.items()
    ]


def number_text(value: float) -> str:
    """Return a number as short as can be read: 1,234, 0.123, 1.2e-07, 3.4M."""
    size = abs(value)
    if value == 0:
        return "0"
    if size >= 1e5:
        for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size >= limit:
                return f"{value / limit:.3g}{unit}" if size < limit * 1000 else f"{value:.2e}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if size >= 1e-3 else f"{value:.1e}"


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return round numbers that cover ``low`` to ``high``, about ``count`` of them."""
    if high <= low:
        high = low + (abs(low) / 2 or 1.0)
    step = _round_step((high - low) / count, (1, 2, 2.5, 5, 10))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [place * step for place in range(first, last + 1)]


def step_ticks(first: int, last: int) -> list[int]:
    """Return a few round steps from ``first`` to ``last``."""
    step = int(_round_step(max(1.0, (last - first) / NUM_X_TICKS), (1, 2, 5, 10)))
    return [place for place in range(first, last + 1) if place % step == 0] or [first]


def _round_step(least: float, factors: Sequence[float]) -> float:
    unit = 10.0 ** math.floor(math.log10(least))
    return next(unit * factor for factor in factors if unit * factor >= least * 0.999)


def line_chart(steps: Sequence[int], series: Sequence[Series], *, unit: str, from_zero: bool = False) -> str:
    """Return lines over steps.

    Args:
        unit: of all series, as the reader sees it.
        from_zero: the axis begins at 0 whatever the values are.
    """
    groups = _grouped(len(steps), MAX_POINTS)
    names = [_steps_text(steps, start, end) for start, end in groups]
    series = [one._replace(values=[_joined(one, start, end) for start, end in groups]) for one in series]
    steps = [steps[end - 1] for _, end in groups]
    known = [value for one in series for value in one.values if _is_known(value)]
    if not known:
        return _empty("values" if steps else "steps")
    low, high = min(known), max(known)
    if from_zero or (0 <= low < 0.6 * high):
        low = min(0.0, low)
    marks = ticks(low, high, NUM_Y_TICKS)
    x, y = _scale(steps[0], steps[-1], LEFT, WIDTH - RIGHT), _scale(marks[0], marks[-1], HEIGHT - BOTTOM, TOP)
    parts = [*_axes(marks, y, ((x(step), str(step)) for step in step_ticks(steps[0], steps[-1])))]
    for place, one in enumerate(series, start=1):
        points = [
            (x(step), y(value)) if _is_known(value) else None for step, value in zip(steps, one.values, strict=True)
        ]
        parts.append(_path(points, place, is_joined=one.has_marks))
        drawn = [point for point in points if point is not None]
        if one.has_marks or len(drawn) == 1:
            parts += [f'<circle class="c{place}" cx="{px:.1f}" cy="{py:.1f}" r="3.5"/>' for px, py in drawn]
    told = [_told(one, [round(y(value), 1) if _is_known(value) else None for value in one.values]) for one in series]
    label = f"{', '.join(one.name for one in series)} in {unit} over steps"
    return _svg(parts, names, [x(step) for step in steps], told, unit=unit, label=label)


def stacked_bars(steps: Sequence[int], series: Sequence[Series], *, unit: str) -> str:
    """Return bars over steps, each the sum of its parts; None counts as 0."""
    groups = _grouped(len(steps), MAX_BARS)
    joined = [
        one._replace(
            values=[sum(value or 0.0 for value in one.values[start:end]) / (end - start) for start, end in groups]
        )
        for one in series
    ]
    if not groups:
        return _empty("steps")
    firsts = [steps[start] for start, _ in groups]
    # Each stands below the bar that its step is in.
    marked = [(bisect.bisect(firsts, step) - 1, str(step)) for step in step_ticks(steps[0], steps[-1])]
    names = [_steps_text(steps, start, end) for start, end in groups]
    label = f"{', '.join(one.name for one in series)} in {unit} over steps, stacked"
    return _bars(names, joined, marked, unit=unit, of="step", label=label, is_stacked=True)


def bars(values: Sequence[tuple[str, float]], *, unit: str, label: str) -> str:
    """Return upright bars, one for each name, with their values on them.

    Args:
        label: what the names are, below the axis.
    """
    if not any(value for _, value in values):
        return _empty("values")
    names = [name for name, _ in values]
    marked = list(enumerate(names))[:: math.ceil(len(values) / 10)]
    series = [Series(unit, [value for _, value in values])]
    return _bars(names, series, marked, unit=unit, of=label, label=f"{unit} by {label}", is_stacked=False)


def _bars(
    names: Sequence[str], series: Sequence[Series], marked: Sequence[tuple[int, str]], *,
    unit: str, of: str, label: str, is_stacked: bool,
) -> str:  # fmt: skip
    """Return bars; ``marked`` are the places of those that have a text below the axis, and the texts."""
    slot = (WIDTH - LEFT - RIGHT) / len(names)
    centres = [LEFT + (place + 0.5) * slot for place in range(len(names))]
    width = slot - (1.5 if slot > 5 else 0.0) if is_stacked else min(48.0, slot * 0.7)
    heights = [[value or 0.0 for value in one.values] for one in series]
    marks = ticks(0.0, max(map(sum, zip(*heights, strict=True))), NUM_Y_TICKS)
    y = _scale(marks[0], marks[-1], HEIGHT - BOTTOM, TOP if is_stacked else TOP + 10)
    parts = [*_axes(marks, y, ((centres[place], text) for place, text in marked), label=of)]
    for centre, values in zip(centres, zip(*heights, strict=True), strict=True):
        ends = [y(end) for end in itertools.accumulate(values, initial=0.0)]
        for colour, (lower, upper) in enumerate(itertools.pairwise(ends), start=1):
            if lower - upper > 0.05:
                parts.append(
                    f'<rect class="f{colour}" x="{centre - width / 2:.1f}" y="{upper:.1f}" width="{width:.1f}" '
                    f'height="{lower - upper:.2f}"/>'
                )
        if not is_stacked and len(names) <= 8:
            text = number_text(sum(values))
            parts.append(f'<text class="value" x="{centre:.1f}" y="{ends[-1] - 4:.1f}">{text}</text>')
    told = [_told(one, [None] * len(names)) for one in series]
    return _svg(parts, names, centres, told, unit=unit, label=label, of=of)


def coloured_names(names: Sequence[str], line_height: int) -> str:
    """Return what the colours mean, for a picture: SVG text, a line for each name, in its colour."""
    return "".join(
        f'<text class="f{place}" x="{LEFT}" y="{place * line_height}">\N{BLACK SQUARE} {html.escape(name)}</text>'
        for place, name in enumerate(names, start=1)
    )


def _is_known(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _scale(low: float, high: float, start: float, end: float) -> Any:
    if high == low:
        return lambda value: (start + end) / 2
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _joined(series: Series, start: int, end: int) -> float | None:
    """Return one value for neighbouring steps, of those that are known; None where none is."""
    known = [value for value in series.values[start:end] if _is_known(value)]
    if not known:
        return None
    return max(known) if series.is_greatest else sum(known) / len(known)


def _steps_text(steps: Sequence[int], start: int, end: int) -> str:
    return str(steps[start]) if end - start == 1 else f"{steps[start]} to {steps[end - 1]}, mean"


def _grouped(count: int, most: int) -> list[tuple[int, int]]:
    size = max(1, math.ceil(count / most))
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def _axes(marks: Sequence[float], y: Any, names: Iterable[tuple[float, str]], *, label: str = "step") -> Iterator[str]:
    for mark in marks:
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(mark):.1f}" y2="{y(mark):.1f}"/>'
        yield f'<text class="tick end" x="{LEFT - 6}" y="{y(mark) + 3.5:.1f}">{number_text(mark)}</text>'
    base = HEIGHT - BOTTOM
    yield f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>'
    yield from (f'<text class="tick" x="{px:.1f}" y="{base + 13}">{html.escape(name)}</text>' for px, name in names)
    yield f'<text class="tick" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 3}">{html.escape(label)}</text>'


def _path(points: Sequence[tuple[float, float] | None], place: int, *, is_joined: bool) -> str:
    """Return a line through the points, broken at the gaps unless it is joined over them."""
    words, is_down = [], False
    for point in points:
        if point is None:
            is_down = is_down and is_joined
        else:
            words.append(f"{'L' if is_down else 'M'}{point[0]:.1f} {point[1]:.1f}")
            is_down = True
    return f'<path class="l{place}" d="{"".join(words)}"/>'


def _told(series: Series, heights: Sequence[float | None]) -> dict[str, Any]:
    """Return what the page's script shows of a series where the pointer is, and at which height."""
    texts = [number_text(value) if _is_known(value) else None for value in series.values]
    return {"name": series.name, "text": texts, "py": heights}


def _svg(
    parts: Sequence[str], names: Sequence[str], centres: Sequence[float], series: Sequence[dict[str, Any]], *,
    unit: str, label: str, of: str = "step",
) -> str:  # fmt: skip
    told = {"x": names, "px": [round(one, 1) for one in centres], "unit": unit, "of": of, "series": series}
    data = html.escape(json.dumps(told, separators=(",", ":")), quote=True)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{html.escape(label, quote=True)}" data-chart="{data}">{"".join(parts)}'
        f'<line class="cross" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
    )


def _empty(what: str) -> str:
    return f'<p class="none">no {what} yet</p>'
