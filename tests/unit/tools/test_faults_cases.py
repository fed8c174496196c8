"""A row passes when nothing is lost, twice or over age; a negative control when it shows what it must."""

import json
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tools.faults_cases import FAIL, NOT_RUN, PASS, Case, NotRun, Row, carry_out, merge
from tools.faults_counts import SlotCounts
from tools.faults_run import FaultFailed


def a_row(counts: SlotCounts, *, must_show: str = "", error: Exception | None = None) -> Row:
    def inject(case: Case) -> None:
        if error is not None:
            raise error
        case.counts = counts

    return Row(number="0", title="t", inject=inject, is_random=False, is_quick=False, must_show=must_show)


@pytest.mark.parametrize(
    ("counts", "must_show", "verdict"),
    [
        (SlotCounts(acked=1, trained=1), "", PASS),
        (SlotCounts(lost=["a"]), "", FAIL),
        (SlotCounts(twice=["a"]), "", FAIL),
        (SlotCounts(over_age=["a"]), "", FAIL),
        (SlotCounts(broken=["hole a"]), "", FAIL),
        (SlotCounts(lost=["a"]), "lost", PASS),
        (SlotCounts(twice=["a"]), "lost", FAIL),
        (SlotCounts(), "lost", FAIL),
    ],
)
def test_a_row_is_judged_by_its_accounts(tmp_path: Path, counts: SlotCounts, must_show: str, verdict: str) -> None:
    assert carry_out(a_row(counts, must_show=must_show), 1, tmp_path / "row", keeps=False).verdict == verdict


@pytest.mark.parametrize(("error", "verdict"), [(NotRun("no root"), NOT_RUN), (FaultFailed("it hung"), FAIL)])
def test_what_could_not_run_is_no_pass_and_says_why(tmp_path: Path, error: Exception, verdict: str) -> None:
    result = carry_out(a_row(SlotCounts(), error=error), 1, tmp_path / "row", keeps=False)

    assert (result.verdict, result.notes) == (verdict, [str(error)])


def test_a_seed_that_could_not_run_keeps_the_row_from_passing(tmp_path: Path) -> None:
    rows = (a_row(SlotCounts()), a_row(SlotCounts(), error=NotRun("no root")))

    assert merge([carry_out(one, 1, tmp_path / "row", keeps=False) for one in rows]).verdict == NOT_RUN


@pytest.mark.parametrize(("lost", "verdict"), [(["a"], PASS), (["a", "b"], FAIL)])
def test_what_the_fault_itself_destroys_may_be_lost_and_no_more(tmp_path: Path, lost: list[str], verdict: str) -> None:
    def inject(case: Case) -> None:
        case.destroyed = frozenset({"a"})
        case.counts = SlotCounts(lost=lost)

    row = Row(number="0", title="t", inject=inject, is_random=False, is_quick=False)

    assert carry_out(row, 1, tmp_path / "row", keeps=False).verdict == verdict


def test_one_failed_seed_fails_the_row_and_the_counts_add_up(tmp_path: Path) -> None:
    good = a_row(SlotCounts(acked=2, trained=1, dropped=Counter(late=1)))
    bad = a_row(SlotCounts(acked=1, lost=["a"]))

    merged = merge([carry_out(one, 1, tmp_path / "row", keeps=False) for one in (good, good, bad)])

    assert merged.verdict == FAIL
    assert (merged.counts.acked, merged.counts.trained, merged.counts.dropped) == (5, 2, {"late": 2})
    assert merged.counts.lost == ["a"]


STRUCK_AT = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    """A row whose run was never started: its logs are the test's to write."""
    case = Case(1, tmp_path)
    run = case.new_run()
    (run.directory / "logs").mkdir(parents=True)
    yield case
    run.close()


def note_stall(case: Case, role: str, culprit: str, *, after_s: float) -> None:
    assert case.run is not None
    at = (STRUCK_AT + timedelta(seconds=after_s)).isoformat()
    with (case.run.directory / "logs" / f"{role}.jsonl").open("a") as log:
        log.write(json.dumps({"event": "run.stalled", "timestamp": at, "culprit": culprit}) + "\n")


@pytest.mark.parametrize("role", ["controller", "launcher"])
def test_who_was_struck_is_to_be_named_by_whoever_watches_and_what_was_said_before_does_not_count(
    case: Case, role: str
) -> None:
    note_stall(case, role, "trainer", after_s=-1)
    note_stall(case, role, "node 0", after_s=5)

    case.wait_named("node 0", since=STRUCK_AT)

    assert case.named == ["node 0"]


def test_a_watchdog_that_names_another_as_well_fails_the_row(case: Case) -> None:
    note_stall(case, "launcher", "node 0", after_s=5)
    note_stall(case, "controller", "trainer", after_s=6)

    with pytest.raises(FaultFailed, match="trainer"):
        case.wait_named("node 0", since=STRUCK_AT)

    assert case.named == []


def test_nobody_may_be_named_where_all_are_stopped_alike(case: Case) -> None:
    case.check_nobody_named(since=STRUCK_AT)
    note_stall(case, "controller", "trainer", after_s=5)

    with pytest.raises(FaultFailed, match="trainer"):
        case.check_nobody_named(since=STRUCK_AT)

    assert case.named == ["nobody"]
