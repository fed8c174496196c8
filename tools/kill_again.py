"""Run a job, kill all of its processes again and again, start it by the same command, and see what is lost.

    python -m tools.kill_again --every-s 90 workflows/gsm8k.py --config configs/gsm8k_cpu.yaml --run.name killed

Launcher, roles, servers and broker get SIGKILL at once. What follows the options is what ``run`` takes. Then the doctor
examines the run, and every recorded outcome is counted: no step twice, no finished trajectory thrown away.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import anyio

from areal_async.cli.run import choose_config, load_run_settings
from areal_async.config.settings import Settings
from areal_async.launch.run import visit
from areal_async.launch.run_directory import RunDirectory
from areal_async.protocol.types import Outcome, OutcomeKind
from areal_async.protocol.wire import decode

POLL_S = 0.1
ENDED_FIRST = "the run ended first"
THROWN_AWAY = (OutcomeKind.STALE, OutcomeKind.LATE, OutcomeKind.ABANDONED)


def main() -> int:
    """Kill until it ends by itself; 0 when nothing was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every-s", type=float, default=90.0, help="seconds from a start to its end")
    parser.add_argument("--after-steps", type=int, help="instead: kill once so many steps are new")
    parser.add_argument("--max-kills", type=int, default=1000, help="then let it end")
    parser.add_argument("--seed", type=int, default=1, help="of the moment, up to a second after the steps")
    parser.add_argument("file")
    parser.add_argument("--config")
    arguments, overrides = parser.parse_known_args()
    config = choose_config(arguments.file, arguments.config, has_gpu=False)
    settings = load_run_settings(config, arguments.file, overrides)
    command = [
        sys.executable, "-m", "areal_async", "run", arguments.file, "--config", str(config), "--no-display", *overrides,
    ]  # fmt: skip
    chance = random.Random(arguments.seed)
    every_s: float = arguments.every_s
    after_steps: int | None = arguments.after_steps
    for life in range(arguments.max_kills + 1):
        started, first = time.monotonic(), num_steps(settings)

        def is_due(started: float = started, first: int = first) -> bool:
            if after_steps is None:
                return time.monotonic() - started >= every_s
            return num_steps(settings) >= first + after_steps

        status = live(command, is_due if life < arguments.max_kills else lambda: False, settings, chance)
        now = num_steps(settings)
        print(f"start {life + 1}: {time.monotonic() - started:.0f} s, from step {first} to {now}, status {status}")
        if status is not None:
            break
    return status or judge(settings)


def live(command: list[str], is_due: Callable[[], bool], settings: Settings, chance: random.Random) -> int | None:
    """Start the run; return its status, or None when it was killed."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            if is_due():
                time.sleep(chance.uniform(0, 1))
                for pid in [process.pid, *descendants(process.pid)]:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
                process.wait()
                return None
            time.sleep(POLL_S)
    return process.returncode


def descendants(pid: int) -> list[int]:
    """Return every process under another, the nearest first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, rest = [], [pid]
    while rest:
        children = parents.get(rest.pop(0), [])
        found += children
        rest += children
    return found


def num_steps(settings: Settings) -> int:
    """Return the number of steps in the run's metrics."""
    path = settings.run_directory / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def judge(settings: Settings) -> int:
    """Say what became of everything; 0 when no step is missing or doubled and nothing finished was thrown away."""
    lines = (settings.run_directory / "metrics.jsonl").read_text().splitlines()
    are_whole = [json.loads(line)["step"] for line in lines] == list(range(1, settings.run.steps + 1))
    outcomes = anyio.run(read_outcomes, settings)
    for (kind, reason), count in sorted(outcomes.items()):
        print(f"{count:6d} {kind} {reason}")
    lost = sum(count for (kind, reason), count in outcomes.items() if kind in THROWN_AWAY and reason != ENDED_FIRST)
    doctor = [sys.executable, "-m", "areal_async", "doctor", "--run", str(settings.run_directory)]
    is_clean = subprocess.run(doctor, check=False).returncode == 0
    print(f"steps {'whole' if are_whole else 'NOT WHOLE'}, {lost} groups or slots thrown away")
    return 0 if are_whole and is_clean and not lost else 1


async def read_outcomes(settings: Settings) -> Counter[tuple[OutcomeKind, str]]:
    """Count what the run has recorded, by kind and reason."""
    async with visit(RunDirectory(settings.run_directory)) as (_, bus):
        messages = await bus.read_log(bus.names.outcomes_stream, bus.names.outcomes)
    outcomes = [decode(message.data, Outcome) for message in messages]
    return Counter((one.kind, one.reason) for one in outcomes)


if __name__ == "__main__":
    sys.exit(main())
