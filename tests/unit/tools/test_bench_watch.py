"""The benchmark of watching says when a bound is broken."""

import os

import pytest

from tools.bench_watch import FLOOD, SEVERAL, WATCHERS, cpu_s, print_costs, print_lags


@pytest.mark.parametrize(
    ("cost", "of_flood", "is_precise", "is_held"),
    [(0.9, 1.0, True, True), (1.1, 1.0, True, False), (1.1, 1.0, False, True), (0.1, 40.0, False, False)],
)
def test_a_cost_over_its_bound_breaks_it_where_it_can_be_told_from_noise(
    cost: float, of_flood: float, is_precise: bool, is_held: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = {name: {"node": [0.1, cost, 5.0]} for name in WATCHERS}
    costs |= {FLOOD: {"node": [of_flood]}, SEVERAL: {"node": [3.0]}}

    assert print_costs("title", costs, {"node": [50.0]}, is_precise=is_precise) is is_held

    assert ("holds" if is_held else "BROKEN") in capsys.readouterr().out


def test_one_thing_that_is_seen_too_late_breaks_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_lags("screen", [0.1, 0.9])
    assert not print_lags("screen", [0.1, 0.2, float("inf")])
    assert "greatest inf s of 3: BROKEN" in capsys.readouterr().out


def test_processor_time_of_a_process_grows() -> None:
    before = cpu_s(os.getpid())
    sum(number * number for number in range(3_000_000))

    assert cpu_s(os.getpid()) > before
