"""``reward.png``: two of the report's own charts, made into a picture by resvg.

There is one way to draw: the report's charts answer to the pointer, the keyboard and the dark, which pictures of a
plotting library do not; and of one of 90 MB, with what it needs, a run used one figure. The font lies beside this
file, as hosts without a screen have none.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import resvg_py

from areal_async.monitor.report.charts import COLOURS, HEIGHT, WIDTH, Series, coloured_names, line_chart, over_steps
from areal_async.monitor.view import number
from areal_async.process.json_lines import Line

FONT = Path(__file__).with_name("DejaVuSans.ttf")
GAP, LINE_HEIGHT = 16, 14
ZOOM = 2.0
"""Pixels to a unit of the charts."""
NUM_COLOURS = 5
STYLE = (
    """
text {{ font-family: DejaVu Sans; font-size: 10px; }}
.grid {{ stroke: {line}; }} .axis {{ stroke: {faint}; }} .cross {{ display: none; }}
.tick {{ fill: {soft}; font-size: 9px; text-anchor: middle; }} .end {{ text-anchor: end; }}
path {{ fill: none; stroke-width: 2; stroke-linejoin: round; }}
""".format(**COLOURS)
    + "".join(
        f".l{place} {{ stroke: {colour}; }} .c{place}, .f{place} {{ fill: {colour}; }}\n"
        for place in range(1, 4 * NUM_COLOURS)
        for colour in [COLOURS[f"c{(place - 1) % NUM_COLOURS + 1}"]]
    )
)


def write_picture(steps: Sequence[Line], evaluations: Mapping[str, Sequence[Line]], path: Path) -> None:
    """Draw reward and evaluations beside staleness, over training steps, into a PNG file.

    Args:
        steps: lines of ``metrics.jsonl``, oldest first, at least one.
        evaluations: lines of ``eval.jsonl`` by what their curve is to be called.
    """
    at = [int(number(line, "step")) for line in steps]
    curves: dict[str, dict[int, float | None]] = {
        "mean reward of the batch": dict(zip(at, _column(steps, "reward_mean"), strict=True))
    }
    for name, lines in evaluations.items():
        known = [line for line in lines if line.get("accuracy") is not None]
        if known:
            curves[name] = {int(number(line, "step")): number(line, "accuracy") for line in known}
    every, reward = over_steps(curves, marked=evaluations)
    staleness = [
        Series("staleness, mean", _column(steps, "staleness_mean")),
        Series("staleness, max", _column(steps, "staleness_max"), is_greatest=True),
    ]
    charts = (line_chart(every, reward, unit="reward"), reward), (line_chart(at, staleness, unit="versions"), staleness)
    top = LINE_HEIGHT * max(len(reward), len(staleness)) + GAP / 2
    parts = [
        f'<g transform="translate({GAP / 2 + place * (WIDTH + GAP)} {GAP / 2})">'
        f"{coloured_names([one.name for one in series], LINE_HEIGHT)}"
        f'<svg y="{top:g}" width="{WIDTH}" height="{HEIGHT}" {chart.removeprefix("<svg")}</g>'
        for place, (chart, series) in enumerate(charts)
    ]
    size = f'width="{2 * (WIDTH + GAP)}" height="{HEIGHT + top + GAP:g}"'
    picture = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>'
    path.write_bytes(
        resvg_py.svg_to_bytes(
            picture, background=COLOURS["card"], zoom=ZOOM, style_sheet=STYLE, skip_system_fonts=True,
            font_files=[str(FONT)],
        )
    )  # fmt: skip


def _column(steps: Sequence[Line], key: str) -> list[float | None]:
    return [number(line, key) for line in steps]
