"""Small charts as SVG: lines over steps, stacked bars over steps, bars by kind. Pure.

Colours are classes that the page's style sheet gives meaning to, in light and in dark. Every chart carries its own
numbers for the page's script, which shows them where the pointer is. Widths and heights are units of the view box,
which is scaled to the width of a card: about one unit to a pixel on a phone, a little more elsewhere.
"""

import html
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 8, 30
MAX_BARS = 60
"""More steps than that are drawn as means over neighbouring ones."""
MAX_POINTS = 1000
"""Of a line; as with bars. A chart has fewer pixels."""
NUM_Y_TICKS, NUM_X_TICKS = 4, 5


class Series(NamedTuple):
    """Values over steps; None, NaN and infinities are gaps."""

    name: str
    values: Sequence[float | None]
    has_marks: bool = False
    """A dot at each value, joined over gaps: few of them, far apart."""
    is_greatest: bool = False
    """Where neighbouring steps are drawn as one, it is their greatest value and not their mean."""


def number(value: float) -> str:
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
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [place * step for place in range(first, last + 1)]


def step_ticks(first: int, last: int) -> list[int]:
    """Return a few round steps from ``first`` to ``last``."""
    raw = max(1.0, (last - first) / NUM_X_TICKS)
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    return [place for place in range(first, last + 1) if place % step == 0] or [first]


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
        return _empty()
    low, high = min(known), max(known)
    if from_zero or (0 <= low < 0.6 * high):
        low = min(0.0, low)
    marks = ticks(low, high, NUM_Y_TICKS)
    x, y = _scale(steps[0], steps[-1], LEFT, WIDTH - RIGHT), _scale(marks[0], marks[-1], HEIGHT - BOTTOM, TOP)
    parts = _axes(marks, y, [(x(step), str(step)) for step in step_ticks(steps[0], steps[-1])])
    for place, one in enumerate(series, start=1):
        points = [
            (x(step), y(value)) if _is_known(value) else None for step, value in zip(steps, one.values, strict=True)
        ]
        parts.append(_path(points, place, is_joined=one.has_marks))
        drawn = [point for point in points if point is not None]
        if one.has_marks or len(drawn) == 1:
            parts += [f'<circle class="c{place}" cx="{px:.1f}" cy="{py:.1f}" r="3.5"/>' for px, py in drawn]
    told = {
        "x": names,
        "px": [round(x(step), 1) for step in steps],
        "unit": unit,
        "series": [
            {
                "name": one.name,
                "text": [number(value) if _is_known(value) else None for value in one.values],
                "py": [round(y(value), 1) if _is_known(value) else None for value in one.values],
            }
            for one in series
        ],
    }
    return _svg(parts, told, f"{', '.join(one.name for one in series)} in {unit} over steps")


def stacked_bars(steps: Sequence[int], series: Sequence[Series], *, unit: str) -> str:
    """Return bars over steps, each the sum of its parts; None counts as 0."""
    if not steps:
        return _empty()
    groups = _grouped(len(steps), MAX_BARS)
    heights = [
        [sum(value or 0.0 for value in one.values[start:end]) / (end - start) for start, end in groups]
        for one in series
    ]
    marks = ticks(0.0, max(map(sum, zip(*heights, strict=True))), NUM_Y_TICKS)
    y = _scale(marks[0], marks[-1], HEIGHT - BOTTOM, TOP)
    width = (WIDTH - LEFT - RIGHT) / len(groups)
    centres = [LEFT + (place + 0.5) * width for place in range(len(groups))]
    named = {steps[start]: centre for (start, _), centre in zip(groups, centres, strict=True)}
    wanted = step_ticks(steps[0], steps[-1])
    parts = _axes(marks, y, [(centre, str(step)) for step, centre in _nearest(named, wanted)])
    gap = 1.5 if width > 5 else 0.0
    for place, centre in enumerate(centres):
        below = 0.0
        for colour, values in enumerate(heights, start=1):
            top, bottom = y(below + values[place]), y(below)
            if bottom - top > 0.05:
                parts.append(
                    f'<rect class="f{colour}" x="{centre - width / 2 + gap / 2:.1f}" y="{top:.1f}" '
                    f'width="{width - gap:.1f}" height="{bottom - top:.2f}"/>'
                )
            below += values[place]
    told = {
        "x": [_steps_text(steps, start, end) for start, end in groups],
        "px": [round(centre, 1) for centre in centres],
        "unit": unit,
        "series": [
            {"name": one.name, "text": [number(value) for value in values], "py": [None] * len(values)}
            for one, values in zip(series, heights, strict=True)
        ],
    }
    return _svg(parts, told, f"{', '.join(one.name for one in series)} in {unit} over steps, stacked")


def bars(values: Sequence[tuple[str, float]], *, unit: str, label: str) -> str:
    """Return upright bars, one for each name, with their values on them.

    Args:
        label: what the names are, below the axis.
    """
    if not values or not any(value for _, value in values):
        return _empty()
    marks = ticks(0.0, max(value for _, value in values), NUM_Y_TICKS)
    y = _scale(marks[0], marks[-1], HEIGHT - BOTTOM, TOP + 10)
    slot = (WIDTH - LEFT - RIGHT) / len(values)
    width = min(48.0, slot * 0.7)
    centres = [LEFT + (place + 0.5) * slot for place in range(len(values))]
    every = math.ceil(len(values) / 10)
    named = [(centre, name) for place, (centre, (name, _)) in enumerate(zip(centres, values, strict=True))]
    parts = _axes(marks, y, named[::every], label=label)
    for centre, (_, value) in zip(centres, values, strict=True):
        top = y(value)
        parts.append(
            f'<rect class="f1" x="{centre - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{HEIGHT - BOTTOM - top:.2f}" rx="2"/>'
        )
        if len(values) <= 8:
            parts.append(f'<text class="value" x="{centre:.1f}" y="{top - 4:.1f}">{number(value)}</text>')
    told = {
        "x": [name for name, _ in values],
        "px": [round(centre, 1) for centre in centres],
        "unit": unit,
        "of": label,
        "series": [{"name": unit, "text": [number(value) for _, value in values], "py": [None] * len(values)}],
    }
    return _svg(parts, told, f"{unit} by {label}")


def legend(names: Sequence[str]) -> str:
    """Return what the colours mean; nothing for a single one."""
    if len(names) < 2:
        return ""
    items = "".join(
        f'<span class="key"><i class="k{place}"></i>{html.escape(name)}</span>'
        for place, name in enumerate(names, start=1)
    )
    return f'<p class="legend">{items}</p>'


def coloured_names(names: Sequence[str], line_height: int) -> str:
    """Return the same for a picture: SVG text, a line for each name, in its colour."""
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
    size = math.ceil(count / most)
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def _nearest(named: dict[int, float], wanted: Sequence[int]) -> list[tuple[int, float]]:
    """Return for each wanted step the bar that it is in."""
    found = []
    for step in wanted:
        first = max((start for start in named if start <= step), default=None)
        if first is not None:
            found.append((step, named[first]))
    return found


def _axes(marks: Sequence[float], y: Any, names: Sequence[tuple[float, str]], *, label: str = "step") -> list[str]:
    parts = []
    for mark in marks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(mark):.1f}" y2="{y(mark):.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{y(mark) + 3.5:.1f}">{number(mark)}</text>')
    base = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    parts += [f'<text class="tick" x="{px:.1f}" y="{base + 13}">{html.escape(name)}</text>' for px, name in names]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 3}">{html.escape(label)}</text>')
    return parts


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


def _svg(parts: Sequence[str], told: dict[str, Any], label: str) -> str:
    data = html.escape(json.dumps(told, separators=(",", ":")), quote=True)
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" '
        f'aria-label="{html.escape(label, quote=True)}" data-chart="{data}">{"".join(parts)}'
        f'<line class="cross" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
    )


def _empty() -> str:
    return '<p class="none">no values yet</p>'
