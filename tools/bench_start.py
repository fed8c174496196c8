"""How long the first training step and the first answer take from a command: the default job, beside bare imports.

    python -m tools.bench_start                # five starts, about two minutes on two cores
    python -m tools.bench_start --starts 3 --repository ../other

Each round starts, one after the other and in an order that changes, ``python -c "import torch, transformers"`` as a
reference, ``try`` up to its first answer and ``run`` up to its first step; with ``--repository``, those of another
version of this repository too. Prints the medians, their ratios to the reference, when each stage of ``run`` was
reached, and what each of its processes had taken of a processor by the end. The command is ended once it was measured.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path

from areal_async.process.json_lines import read_json_lines

REPOSITORY = Path(__file__).parents[1]
REFERENCE = "import torch, transformers"
POLL_S = 0.02
DEADLINE_S = 120.0
STAGES = {
    "broker": "broker.started",
    "node, with its tokenizer": "node.started",
    "server": "server.started",
    "trainer, with its model": "trainer.restored",
    "weights": "server.swapped",
    "first batch": "journal.written",
}
"""What is logged when each is there."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def start(words: list[str], repository: Path) -> subprocess.Popen[str]:
    """Start a command in a session of its own, its output to be read."""
    return subprocess.Popen(
        words, cwd=repository, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )


def time_reference(python: str, repository: Path) -> float:
    """Return the seconds that the bare imports take."""
    began = time.monotonic()
    subprocess.run([python, "-c", REFERENCE], cwd=repository, check=True)
    return time.monotonic() - began


def time_try(python: str, repository: Path) -> float:
    """Return the seconds from the command to its first answer."""
    began = time.monotonic()
    words = [python, "-m", "areal_async", "try", "workflows/gsm8k.py", "--config", "configs/gsm8k_cpu.yaml", "--json"]
    with start(words, repository) as process:
        assert process.stdout is not None
        answer = process.stdout.readline()
        took_s = time.monotonic() - began
        process.stdout.read()
    assert "turns" in json.loads(answer), answer
    return took_s


def time_run(python: str, repository: Path, directory: Path) -> tuple[float, dict[str, float], dict[str, float]]:
    """Return the seconds from the command to its first step, to each stage, and of processor by process."""
    began, began_at = time.monotonic(), time.time()
    words = [
        python, "-m", "areal_async", "run", "workflows/gsm8k.py", "--config", "configs/gsm8k_cpu.yaml", "--no-display",
        "--run.name", "start", "--run.directory", str(directory),
    ]  # fmt: skip
    metrics = directory / "start" / "metrics.jsonl"
    with start(words, repository) as process:
        while not (metrics.is_file() and metrics.stat().st_size):
            if process.poll() is not None or time.monotonic() - began > DEADLINE_S:
                raise SystemExit(f"run: got no step within {DEADLINE_S:.0f} s, need one; see {directory}")
            time.sleep(POLL_S)
        took_s = time.monotonic() - began
        processors = processor_s(process.pid)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        process.communicate()
    first: dict[str, float] = {}
    for log in (directory / "start" / "logs").glob("*.jsonl"):
        for line in read_json_lines(log):
            at_s = datetime.fromisoformat(line["timestamp"]).timestamp() - began_at
            first[line["event"]] = min(at_s, first.get(line["event"], at_s))
    return took_s, {stage: first[event] for stage, event in STAGES.items()}, processors


def processor_s(root: int) -> dict[str, float]:
    """Return the seconds of processor that a process and its descendants have taken, by what they are."""
    taken: dict[int, tuple[int, str, float]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        taken[int(folder.name)] = int(fields[1]), what_is(words), sum(map(int, fields[11:15])) / TICKS_PER_S
    spent: dict[str, float] = defaultdict(float)
    for pid, (_, what, cpu_s) in taken.items():
        one = pid
        while one in taken and one != root:
            one = taken[one][0]
        if one == root:
            spent[what] += cpu_s
    return dict(spent)


def what_is(words: list[str]) -> str:
    """Return what a process of a run is, by its command line."""
    if "areal_async.inference.embedded" in words:
        return "server"
    return next((word for word in ("controller", "node", "trainer", "run") if word in words), Path(words[0]).name)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--repository", type=Path, help="another version, measured in turns with this one")
    arguments = parser.parse_args()
    versions = {"this": REPOSITORY} | ({"other": arguments.repository.resolve()} if arguments.repository else {})
    times: dict[str, list[float]] = defaultdict(list)
    stages: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    processors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def measure_reference() -> None:
        times[REFERENCE].append(time_reference(sys.executable, REPOSITORY))

    def measure(version: str, repository: Path) -> None:
        own = repository / ".venv" / "bin" / "python"
        python = str(own) if own.is_file() else sys.executable
        times[f"{version}: try"].append(time_try(python, repository))
        with tempfile.TemporaryDirectory() as folder:
            took_s, reached, taken = time_run(python, repository, Path(folder))
        times[f"{version}: run"].append(took_s)
        for found, kept in ((reached, stages), (taken, processors)):
            for name, number_s in found.items():
                kept[version][name].append(number_s)

    measures: list[Callable[[], None]] = [measure_reference]
    measures += [partial(measure, version, at) for version, at in versions.items()]
    for number in range(arguments.starts):
        for one in measures if number % 2 == 0 else reversed(measures):
            one()
        print(f"round {number + 1}: load {os.getloadavg()[0]:.2f}", {k: round(v[-1], 2) for k, v in times.items()})
    reference_s = statistics.median(times[REFERENCE])
    for name, found in times.items():
        print(
            f"{name:<28} {statistics.median(found):6.2f} s  {statistics.median(found) / reference_s:5.2f} x reference"
        )
    for title, kept in (("reached at", stages), ("processor", processors)):
        for version, by_name in kept.items():
            for name, found in by_name.items():
                print(f"{version}: {title} {name:<26} {statistics.median(found):6.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
