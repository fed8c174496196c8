"""The matrix goes two rows at a time, those with deadlines one by one at the end, and an error fails its row alone."""

import threading
import time
from pathlib import Path

import pytest

from tools.faults import Job, carry_out_all, in_order, plan
from tools.faults_cases import FAIL, PASS, ROWS, Case, Injection, Row


def a_row(number: str, inject: Injection, *, is_random: bool = False, is_alone: bool = False) -> Row:
    return Row(number=number, title="t", inject=inject, is_random=is_random, is_quick=False, is_alone=is_alone)


def nothing(case: Case) -> None:
    """Injection nothing: what is tested is who does so when."""


def test_every_row_has_its_first_seed_before_any_has_its_second() -> None:
    once, often = a_row("1", nothing), a_row("2", nothing, is_random=True)

    jobs = plan([once, often], num_seeds=3)

    assert [(job.row.number, job.seed) for job in jobs] == [("1", 1), ("2", 1), ("2", 2), ("2", 3)]


def test_rows_run_side_by_side_and_those_that_are_to_be_alone_after_them_one_by_one(tmp_path: Path) -> None:
    together, running, most = threading.Barrier(2), [0], {"": 0, "alone ": 0}

    def inject(kind: str) -> Injection:
        def inject_fault(case: Case) -> None:
            running[0] += 1
            most[kind] = max(most[kind], running[0])
            if not kind:
                together.wait(timeout=60)
                most[kind] = max(most[kind], running[0])
            else:
                time.sleep(0.05)
            running[0] -= 1

        return inject_fault

    rows = [a_row("1", inject("alone "), is_alone=True), a_row("2", inject("")), a_row("3", inject(""))]
    jobs = plan([*rows, a_row("4", inject("alone "), is_alone=True)], num_seeds=1)

    results = list(carry_out_all(jobs, tmp_path, num_lanes=2, keeps=False))

    assert {result.row for result in results[:2]} == {"2", "3"}
    assert [result.verdict for result in results] == [PASS] * 4
    assert most == {"": 2, "alone ": 1}


def test_an_error_that_nobody_thought_of_fails_its_row_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def break_off(case: Case) -> None:
        raise KeyError("unexpected")

    jobs = [Job(a_row("1", break_off), 3), Job(a_row("2", nothing), 1)]

    results = {one.row: one for one in carry_out_all(jobs, tmp_path, num_lanes=1, keeps=False)}

    assert (results["1"].verdict, results["1"].seed, results["2"].verdict) == (FAIL, 3, PASS)
    assert "unexpected" in results["1"].notes[0]
    assert "break_off" in capsys.readouterr().err, "with its traceback"


def test_the_table_has_every_number_of_the_matrix_in_order_and_the_controls_last() -> None:
    numbers = sorted(ROWS, key=in_order)

    assert [one for one in numbers if one.isdigit()] == [str(number) for number in range(1, 37)]
    assert numbers[-3:] == ["N1", "N2", "N3"]


def test_the_short_selection_has_a_control() -> None:
    assert any(row.must_show for row in ROWS.values() if row.is_quick)
