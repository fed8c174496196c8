"""What more nodes cost is told by medians, and held against the first number of nodes."""

import sys

import pytest

from tools import bench_scale
from tools.bench_scale import MOST, ROLES, Row, median, print_table


def _row(num_nodes: int, *, broker_s: float, tick_s: float = 0.03) -> Row:
    ticks = dict.fromkeys(ROLES[1:], tick_s)
    return Row(num_nodes=num_nodes, rate=300.0, cost_s={**dict.fromkeys(ROLES, 0.1), "broker": broker_s}, tick_s=ticks)


def test_of_several_rounds_the_medians_count() -> None:
    row = median([_row(256, broker_s=cost_s, tick_s=cost_s / 10) for cost_s in (0.9, 0.3, 0.4)])

    assert (row.num_nodes, row.cost_s["broker"], row.tick_s["rank 0"]) == (256, 0.4, pytest.approx(0.04))


@pytest.mark.parametrize(
    ("second", "is_within"),
    [
        (_row(256, broker_s=0.3 * MOST), True),
        (_row(256, broker_s=0.3 * MOST + 0.01), False),
        (_row(256, broker_s=0.3, tick_s=0.03 * MOST + 0.001), False),
    ],
)
def test_one_cost_or_tick_beyond_the_bound_is_told(
    capsys: pytest.CaptureFixture[str], second: Row, is_within: bool
) -> None:
    assert print_table([_row(1, broker_s=0.3), second]) is is_within

    assert capsys.readouterr().out.splitlines()[2].split()[:2] == ["256", "300"]


@pytest.mark.parametrize("words", [["--nodes", "1", "1"], ["--rounds", "0"]])
def test_what_would_measure_nothing_or_less_than_it_says_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_scale", *words])

    with pytest.raises(SystemExit, match="2"):
        bench_scale.main()

    assert "need --rounds of 1 or more" in capsys.readouterr().err
