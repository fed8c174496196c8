"""What it costs a run to be watched, and how late a watcher is.

    python -m tools.bench_watch                  # about twelve minutes
    python -m tools.bench_watch --window-s 20    # steadier, on a machine that does other things as well

The run is the real program on the CPU (`python -m areal_async run workflows/gsm8k.py`), watched as users watch it:
`top` in a terminal emulator, three of them, `status --html FILE --watch`, `status` every second. Each is measured over
windows that lie between windows in which nobody watches; its cost to a process is the processor time of its window
less the mean of its two neighbours'. That is done while the run trains and while it is paused. Where the processors
are full, a watcher takes from the roles more than it gives them to do, and what it costs hides in the noise: so a run
is also asked far more often than any watcher asks, and that cost is divided by the number of its questions. The bound
is one watcher's; three at once show how it grows.

The lag is measured from an event's own time, told to the bus by this program, and from a step's line in
`metrics.jsonl`, to when it stands on the screen or in the file. Exits with 1 unless every role's cost is under
1 % of a core, in the median over the rounds, and everything is seen within 1 s.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import anyio

from areal_async.bus import gather_reports
from areal_async.launch.run import visit_live
from areal_async.monitor.liveness import locked
from areal_async.monitor.snapshot import read_snapshot
from areal_async.monitor.top.feed import REFRESH_S
from areal_async.process.json_lines import JsonLines
from tests.e2e.terminal import Terminal
from tools.faults_run import ENDLESS, REPOSITORY, FaultRun

MAX_COST_PERCENT, MAX_LAG_S = 1.0, 1.0
ROLES = {"broker": ("nats-server",), "controller": (), "node": (), "trainer": ()}
"""What a process is found by, where it is not by its verb."""
LOOKS_PER_S = 20
SCREEN = (200, 50)
LOOK_S = 0.005
SHOWN_WITHIN_S = 30.0
ANSWER_S = 0.03
QUIET_S = 4.0


class Screen:
    """``top`` in a terminal, read all the time."""

    def __init__(self, run: FaultRun) -> None:
        self._terminal = Terminal(SCREEN, "--run", str(run.directory))
        self._closing = threading.Event()
        self._sought, self._seen_s = "", 0.0
        self._terminal.wait(lambda text: "tokens/s" in text and "last events" in text, "the run")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while not self._closing.is_set():
            self._terminal.read(LOOK_S)
            if self._sought and self._sought in self._terminal.text:
                self._seen_s, self._sought = time.time(), ""

    def seek(self, text: str) -> None:
        """Look for a text from now on."""
        self._seen_s, self._sought = 0.0, text

    def seen_s(self) -> float:
        """Return when it stood there (Unix time); wait for it."""
        ends_at = time.time() + SHOWN_WITHIN_S
        while not self._seen_s and time.time() < ends_at:
            time.sleep(LOOK_S)
        return self._seen_s or float("inf")

    def close(self) -> None:
        """Leave it as a user does."""
        self._closing.set()
        self._reader.join()
        self._terminal.press("q")
        self._terminal.process.wait(timeout=10)


@contextmanager
def tops(count: int, run: FaultRun) -> Iterator[None]:
    """Have so many of them watch."""
    with ExitStack() as stack:
        for _ in range(count):
            stack.callback(Screen(run).close)
        yield


@contextmanager
def html(run: FaultRun) -> Iterator[Path]:
    """Have a report written again and again."""
    path = run.directory.parent / "report.html"
    path.unlink(missing_ok=True)
    process = _command("status", "--run", str(run.directory), "--html", str(path), "--watch")
    try:
        run.wait_until(path.exists, "the report")
        yield path
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


@contextmanager
def statuses(run: FaultRun) -> Iterator[None]:
    """Have `status` typed every second, or as often as it ends."""
    closing = threading.Event()

    def ask() -> None:
        while not closing.is_set():
            process = _command("status", "--run", str(run.directory))
            closing.wait(1.0)
            process.wait()

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        closing.set()
        asking.join()


@contextmanager
def looks(run: FaultRun) -> Iterator[None]:
    """Ask everything that ``top`` asks, far more often."""
    closing = threading.Event()

    async def ask() -> None:
        async with visit_live(run.run_directory) as (settings, bus):
            while not closing.is_set():
                ends_at = time.monotonic() + 1 / LOOKS_PER_S
                gather = partial(gather_reports, bus, within_s=ANSWER_S)
                await read_snapshot(settings, bus, gather=gather, ask_live=locked(run.run_directory), num_events=0)
                await anyio.sleep(max(0.0, ends_at - time.monotonic()))

    asking = threading.Thread(target=anyio.run, args=(ask,))
    asking.start()
    try:
        yield
    finally:
        closing.set()
        asking.join()


FLOOD, SEVERAL = f"{LOOKS_PER_S} looks a second", "three tops"
WATCHERS: Mapping[str, Callable[[FaultRun], AbstractContextManager[object]]] = {
    "top": partial(tops, 1),
    SEVERAL: partial(tops, 3),
    "status --html --watch": html,
    "status every second": statuses,
    FLOOD: looks,
}


def role_pids(run: FaultRun) -> dict[str, int]:
    """Return the process of each role."""
    return {role: run.pids(*words)[0] if words else run.role_pid(role) for role, words in ROLES.items()}


def cpu_s(pid: int) -> float:
    """Return the processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(pids: Mapping[str, int], window_s: float) -> dict[str, float]:
    """Return what each role takes in a window, in percent of a core."""
    started, before = time.monotonic(), {role: cpu_s(pid) for role, pid in pids.items()}
    time.sleep(window_s)
    after, took_s = {role: cpu_s(pid) for role, pid in pids.items()}, time.monotonic() - started
    return {role: 100 * (after[role] - before[role]) / took_s for role in pids}


Costs = dict[str, dict[str, list[float]]]
"""Watcher -> role -> percent of a core, by rounds."""


def measure_costs(run: FaultRun, *, rounds: int, window_s: float) -> tuple[Costs, dict[str, list[float]]]:
    """Return what each watcher costs each role, and what the roles take unwatched."""
    pids = role_pids(run)
    costs: Costs = {watcher: {role: [] for role in pids} for watcher in WATCHERS}
    unwatched: dict[str, list[float]] = {role: [] for role in pids}
    before = measure(pids, window_s)
    for _ in range(rounds):
        for watcher in random.sample(list(WATCHERS), len(WATCHERS)):
            with WATCHERS[watcher](run):
                watched = measure(pids, window_s)
            after = measure(pids, window_s)
            for role in pids:
                costs[watcher][role].append(watched[role] - (before[role] + after[role]) / 2)
                unwatched[role].append(before[role])
            before = after
    return costs, unwatched


def print_costs(title: str, costs: Costs, unwatched: Mapping[str, Sequence[float]], *, is_precise: bool) -> bool:
    """Print them; say whether every bound holds."""
    print(f"\n{title}: percent of a core, median over rounds (least to greatest)")
    print(f"{'':<26}" + "".join(f"{role:>24}" for role in unwatched))
    print(f"{'nobody watches':<26}" + "".join(f"{_spread(values):>24}" for values in unwatched.values()))
    is_held = True
    for watcher, by_role in costs.items():
        print(f"{'+ ' + watcher:<26}" + "".join(f"{_spread(values, '+'):>24}" for values in by_role.values()))
        over = [role for role, values in by_role.items() if statistics.median(values) >= MAX_COST_PERCENT]
        if watcher != FLOOD and is_precise and over:
            print(f"{'':<26}{MAX_COST_PERCENT:g} % or more: {', '.join(over)}")
            is_held &= watcher == SEVERAL
    per_look = {role: statistics.median(values) / LOOKS_PER_S for role, values in costs[FLOOD].items()}
    of_top = {role: percent / REFRESH_S for role, percent in per_look.items()}
    print(f"{'one look, ms of processor':<26}" + "".join(f"{10 * percent:>24.2f}" for percent in per_look.values()))
    print(f"{'top by that, %':<26}" + "".join(f"{percent:>24.2f}" for percent in of_top.values()))
    is_held &= all(percent < MAX_COST_PERCENT for percent in of_top.values())
    verdict = "holds" if is_held else "BROKEN"
    print(f"verdict: {verdict}: one watcher costs every role under {MAX_COST_PERCENT:g} % of a core", flush=True)
    return is_held


def _spread(values: Sequence[float], sign: str = "") -> str:
    return f"{statistics.median(values):{sign}.2f} ({min(values):{sign}.1f} to {max(values):{sign}.1f})"


def event_lags(run: FaultRun, count: int) -> list[float]:
    """Publish events at any moment of a second; return the seconds that each takes to the screen."""
    lags: list[float] = []

    async def publish() -> None:
        screen = await anyio.to_thread.run_sync(Screen, run)
        try:
            async with visit_live(run.run_directory) as (_, bus):
                for number in range(count):
                    await anyio.sleep(random.uniform(0.5, 1.5))
                    mark, told_s = f"mark-{number:04}-", time.time()
                    screen.seek(mark)
                    event = {"event": "bench.mark", "at": datetime.now(UTC).isoformat(), "mark": mark}
                    await bus.emit(bus.names.event("bench.mark", "operator", "0"), json.dumps(event).encode())
                    lags.append(await anyio.to_thread.run_sync(screen.seen_s) - told_s)
        finally:
            await anyio.to_thread.run_sync(screen.close)

    anyio.run(publish)
    return lags


def step_lags(run: FaultRun, count: int) -> tuple[list[float], list[float]]:
    """Return how long the lines of new steps take to the screen and into the report."""
    lines = JsonLines(run.directory / "metrics.jsonl")
    on_screen: list[float] = []
    in_file: list[float] = []
    screen = Screen(run)
    with html(run) as report:
        try:
            lines.read_new()
            while len(on_screen) < count:
                step = _next_step(lines, run)
                written_s = (run.directory / "metrics.jsonl").stat().st_mtime
                screen.seek(f"step {step}/")
                in_file.append(_written_s(report, f"step {step} of ") - written_s)
                on_screen.append(screen.seen_s() - written_s)
        finally:
            screen.close()
    return on_screen, in_file


def _next_step(lines: JsonLines, run: FaultRun) -> int:
    while not (news := lines.read_new().lines):
        if not run.is_alive:
            raise RuntimeError(f"the run has ended: {run.last_words()}")
        time.sleep(LOOK_S)
    return int(news[-1]["step"])


def _written_s(path: Path, text: str) -> float:
    ends_at, before = time.time() + SHOWN_WITHIN_S, 0
    while time.time() < ends_at:
        with suppress(FileNotFoundError):
            now = path.stat().st_mtime_ns
            if now != before and text in path.read_text(encoding="utf-8"):
                return now / 1e9
            before = now
        time.sleep(LOOK_S)
    return float("inf")


def print_lags(what: str, lags: Sequence[float]) -> bool:
    """Print them; say whether the bound holds."""
    is_held = max(lags) < MAX_LAG_S
    print(
        f"{what:<44} median {statistics.median(lags):.2f} s, 95 % {sorted(lags)[int(0.95 * len(lags))]:.2f} s, "
        f"greatest {max(lags):.2f} s of {len(lags)}: {'holds' if is_held else 'BROKEN'}",
        flush=True,
    )
    return is_held


def _command(*words: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "areal_async", *words],
        cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _order(run: FaultRun, verb: str) -> None:
    if _command(verb, "--run", str(run.directory)).wait() != 0:
        raise RuntimeError(f"{verb}: refused: {run.last_words()}")


def _wait_at_rest(run: FaultRun) -> None:
    """Wait until a paused run has trained what it had."""
    done, since = len(run.steps), time.monotonic()
    while time.monotonic() - since < QUIET_S:
        if len(run.steps) != done:
            done, since = len(run.steps), time.monotonic()
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--window-s", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--marks", type=int, default=30, help="events and steps whose lag is measured")
    parser.add_argument("--only", choices=("lags", "training", "paused"))
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the run is ended then as well
    is_held = True
    with tempfile.TemporaryDirectory() as folder:
        run = FaultRun(Path(folder), run__steps=ENDLESS)
        run.start()
        try:
            run.wait_for_step(3)
            if arguments.only in (None, "lags"):
                print("\nlag, from its own time to when it is seen")
                on_screen, in_file = step_lags(run, arguments.marks)
                is_held &= print_lags("a step's line on the screen of top", on_screen)
                is_held &= print_lags("a step's line in status --html --watch", in_file)
                is_held &= print_lags("an event on the screen of top", event_lags(run, arguments.marks))
            measured = partial(measure_costs, run, rounds=arguments.rounds, window_s=arguments.window_s)
            if arguments.only in (None, "training"):
                is_held &= print_costs("while it trains", *measured(), is_precise=False)
            if arguments.only in (None, "paused"):
                _order(run, "pause")
                _wait_at_rest(run)
                is_held &= print_costs("while it is paused", *measured(), is_precise=True)
                _order(run, "resume")
            run.stop()
        finally:
            run.kill_everything()
            run.close()
    return 0 if is_held else 1


if __name__ == "__main__":
    raise SystemExit(main())
