"""The rows of the fault matrix: how one is declared, carried out with a seed, and judged."""

import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from areal_async.errors import ArealError
from tools.faults_counts import SlotCounts, count_slots
from tools.faults_run import FaultFailed, FaultRun

PASS, FAIL, NOT_RUN = "pass", "FAIL", "not run"
NAMED_DEADLINE_S = 40.0


class NotRun(Exception):
    """The row cannot be carried out on this machine, for the reason in the sentence."""


@dataclass(slots=True)
class Case:
    """A row under one seed."""

    seed: int
    directory: Path
    rng: random.Random = field(init=False)
    run: FaultRun | None = None
    counts: SlotCounts | None = None
    """Counts taken while the row's own broker was there; ``None`` until the run is examined at its end."""
    destroyed: frozenset[str] = frozenset()
    """Ids of trajectories that the fault itself destroys: no others may be lost."""
    recoveries_s: list[float] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    """Processes that the watchdog has named, rightly."""
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def new_run(self, *, parent: Path | None = None, **settings: Any) -> FaultRun:
        """Return the run that this row injects its fault into, under the row's seed."""
        settings = {"run__seed": self.seed, "run__steps": 12, **settings}
        self.run = FaultRun(parent or self.directory, output=self.directory / "run.out", **settings)
        return self.run

    def count_slots(self) -> None:
        """Count the run's trajectories now, while its external broker is still there."""
        assert self.run is not None
        self.counts = count_slots(self.run.run_directory)

    def recovered(self, seconds: float) -> None:
        """Note the time until something was acknowledged or trained again."""
        self.recoveries_s.append(seconds)

    def check(self, is_so: bool, sentence: str) -> None:
        """Fail the row with ``sentence`` unless ``is_so``."""
        if not is_so:
            raise FaultFailed(sentence)

    def check_steps(self) -> None:
        """Fail the row unless the run trained every step, and each once."""
        assert self.run is not None
        steps = [line["step"] for line in self.run.steps]
        wanted = list(range(1, self.run.settings().run.steps + 1))
        self.check(steps == wanted, f"metrics.jsonl: got steps {steps}, need each of 1 to {wanted[-1]} once")

    def wait_named(self, culprit: str, *, since: datetime) -> None:
        """Wait until the watchdog names what holds up the run; fail the row unless that is ``culprit`` alone.

        Args:
            culprit: its name from ``areal_async.telemetry.wait_graph``.
            since: time of the fault.
        """
        run = self.run
        assert run is not None
        run.wait_until(
            lambda: bool(run.culprits(since=since)), f"the watchdog to name {culprit}", deadline_s=NAMED_DEADLINE_S
        )
        found = run.culprits(since=since)
        self.check(set(found) == {culprit}, f"the watchdog named {found}, need {culprit}")
        self.named.append(culprit)

    def check_nobody_named(self, *, since: datetime) -> None:
        """Fail the row if the watchdog has named any process."""
        assert self.run is not None
        found = self.run.culprits(since=since)
        self.check(not found, f"the watchdog named {found}, and nobody was stopped longer than the others")
        self.named.append("nobody")

    def note(self, sentence: str) -> None:
        """Add a sentence to the row's line."""
        self.notes.append(sentence)


Injection = Callable[[Case], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A fault of the matrix."""

    number: str
    """Number in the matrix; ``N1`` and so on for negative controls."""
    title: str
    inject: Injection
    is_random: bool
    """Whether the timing is random, so that the row takes several seeds."""
    is_quick: bool
    """Whether the row belongs to the short selection."""
    is_alone: bool = False
    """Whether the row's deadlines need the machine to itself."""
    must_show: str = ""
    """Finding that a negative control needs: ``lost`` or ``twice``."""


@dataclass(kw_only=True, slots=True)
class Result:
    """A line of the table."""

    row: str
    title: str
    seed: int
    verdict: str
    counts: SlotCounts
    duration_s: float
    cpu_s: float
    """Processor time of the run's processes, without the harness."""
    recovery_s: float | None
    peak_rss_bytes: int
    named: list[str]
    """Processes that the watchdog has named, rightly."""
    notes: list[str]


ROWS: dict[str, Row] = {}


def row(
    number: str,
    title: str,
    *,
    is_random: bool = False,
    is_quick: bool = False,
    is_alone: bool = False,
    must_show: str = "",
) -> Callable[[Injection], Injection]:
    """Declare a function as a row of the matrix."""

    def declare(inject: Injection) -> Injection:
        ROWS[number] = Row(
            number=number,
            title=title,
            inject=inject,
            is_random=is_random,
            is_quick=is_quick,
            is_alone=is_alone,
            must_show=must_show,
        )
        return inject

    return declare


def carry_out(row: Row, seed: int, directory: Path, *, keeps: bool) -> Result:
    """Run a row once; the directory stays when it fails, or when it ``keeps``."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    case, started = Case(seed, directory), time.monotonic()
    verdict, counts = PASS, SlotCounts()
    try:
        row.inject(case)
        if case.counts is None and case.run is not None:
            case.count_slots()
        counts = case.counts or counts
        verdict = _judge(row, counts, case)
    except NotRun as exc:
        verdict = NOT_RUN
        case.note(str(exc))
    except (FaultFailed, ArealError) as exc:
        verdict = FAIL
        case.note(str(exc))
    finally:
        if case.run is not None:
            case.run.kill_everything()
            case.run.close()
    if verdict != FAIL and not keeps:
        shutil.rmtree(directory, ignore_errors=True)
    return Result(
        row=row.number,
        title=row.title,
        seed=seed,
        verdict=verdict,
        counts=counts,
        duration_s=time.monotonic() - started,
        cpu_s=case.run.cpu_s if case.run is not None else 0.0,
        recovery_s=max(case.recoveries_s, default=None),
        peak_rss_bytes=case.run.peak_rss_bytes if case.run is not None else 0,
        named=case.named,
        notes=case.notes,
    )


def failed(row: Row, seed: int, error: BaseException) -> Result:
    """Return the line of a row that ended with an unexpected error."""
    return Result(
        row=row.number,
        title=row.title,
        seed=seed,
        verdict=FAIL,
        counts=SlotCounts(),
        duration_s=0.0,
        cpu_s=0.0,
        recovery_s=None,
        peak_rss_bytes=0,
        named=[],
        notes=[f"{type(error).__name__}: {error}"],
    )


def _judge(row: Row, counts: SlotCounts, case: Case) -> str:
    lost = [name for name in counts.lost if name not in case.destroyed]
    found = {"lost": lost, "twice": counts.twice, "over age": counts.over_age}
    if row.must_show:
        return PASS if found[row.must_show] else FAIL
    for what, names in {**found, "refuted": counts.broken}.items():
        if names:
            case.note(f"{what}: {', '.join(names[:3])}")
    return FAIL if any(found.values()) or counts.broken else PASS


def merge(results: list[Result]) -> Result:
    """Return the line of a row over all its seeds."""
    verdicts = [result.verdict for result in results]
    total = SlotCounts()
    for result in results:
        total.add(result.counts)
    recoveries = [result.recovery_s for result in results if result.recovery_s is not None]
    return Result(
        row=results[0].row,
        title=results[0].title,
        seed=len(results),
        verdict=next((bad for bad in (FAIL, NOT_RUN) if bad in verdicts), PASS),
        counts=total,
        duration_s=sum(result.duration_s for result in results),
        cpu_s=sum(result.cpu_s for result in results),
        recovery_s=max(recoveries, default=None),
        peak_rss_bytes=max(result.peak_rss_bytes for result in results),
        named=list(dict.fromkeys(name for result in results for name in result.named)),
        notes=list(dict.fromkeys(note for result in results for note in result.notes)),
    )
