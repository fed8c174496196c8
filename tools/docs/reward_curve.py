"""Draw the reward and the held-out accuracy of a run as a small SVG: the curve that README.md shows.

python tools/docs/reward_curve.py runs/gsm8k_cpu > tools/docs/reward.svg
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 280, 44, 14, 12, 38
"""Size of the picture and of its margins, in pixels."""
REWARD, ACCURACY, INK = "#3b76b5", "#d2691e", "#777"
Point = tuple[float, float]
"""A training step and a number between 0 and 1."""


def curve(rewards: list[Point], accuracies: list[Point]) -> str:
    """Return the picture of points that lie between 0 and 1."""
    last = max(step for step, _ in [*rewards, *accuracies])

    def place(point: Point) -> Point:
        x = LEFT + point[0] / last * (WIDTH - LEFT - RIGHT)
        return round(x, 1), round(TOP + (1 - point[1]) * (HEIGHT - TOP - BOTTOM), 1)

    def line(points: Iterable[Point], colour: str) -> str:
        placed = " ".join("{},{}".format(*place(point)) for point in points)
        return f'<polyline points="{placed}" fill="none" stroke="{colour}" stroke-width="2"/>'

    def text(x: float, y: float, words: str, *, anchor: str = "middle", colour: str = INK) -> str:
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{words}</text>'

    shown = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"']
    shown[0] += ' font-size="12">'
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        _, y = place((0, share))
        shown.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="{INK}" stroke-opacity="0.3"/>')
        shown.append(text(LEFT - 6, y + 4, f"{share:g}", anchor="end"))
    for quarter in range(5):
        step = round(last * quarter / 4)
        shown.append(text(place((step, 0))[0], HEIGHT - BOTTOM + 16, str(step)))
    shown.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "training step"))
    shown += [line(rewards, REWARD), line(accuracies, ACCURACY)]
    shown += ['<circle cx="{}" cy="{}" r="4" fill="{}"/>'.format(*place(one), ACCURACY) for one in accuracies]
    x, y = place((last, 0.0))
    shown.append(text(x - 8, y - 26, "reward of the step's answers", anchor="end", colour=REWARD))
    shown.append(text(x - 8, y - 10, "greedy accuracy on held-out rows", anchor="end", colour=ACCURACY))
    return "\n".join([*shown, "</svg>"])


def read(file: Path, value: str) -> list[Point]:
    """Return the step and one value of each line of a run's record."""
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [(row["step"], row[value]) for row in rows]


if __name__ == "__main__":
    run = Path(sys.argv[1])
    print(curve(read(run / "metrics.jsonl", "reward_mean"), read(run / "eval.jsonl", "accuracy")))
