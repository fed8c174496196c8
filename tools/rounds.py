"""Contenders of a benchmark take turns, each in a process of its own, so that memory is told apart and a busy machine
slows them alike.

The process prints one line when it is ready, and one per round; it plays a round for each line it is sent. It needs
nothing but the standard library for this, so contenders may live in another Python environment.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Stage:
    """The contender's end. What libraries print goes to stderr from here on."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._idle_bytes = 0

    def wait(self) -> bool:
        """Say that the process is ready, or that its round is over, and wait for the next; False at the end."""
        if not self._idle_bytes:
            self._idle_bytes = peak_bytes()
            self.report({})
        return bool(sys.stdin.readline())

    def report(self, result: Mapping[str, float]) -> None:
        """Report a round, with the process's memory: at its peak, and how much of it came after the loading."""
        memory = {"peak_bytes": peak_bytes(), "added_bytes": peak_bytes() - self._idle_bytes}
        self._out.write(json.dumps({**result, **memory}) + "\n")
        self._out.flush()


class Clock:
    """CPU and wall seconds of this process and its threads, since it was made."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def read(self) -> dict[str, float]:
        """Return both."""
        return {"cpu_s": time.process_time() - self._cpu, "wall_s": time.perf_counter() - self._wall}


class Contender:
    """The benchmark's end: a process that plays rounds.

    Args:
        niceness: scheduling priority of the process; below 0 needs root.
        deadline_s: for its start, and for each round.
    """

    def __init__(self, command: Sequence[str], *, niceness: int, threads: int, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        prefix = ["nice", "-n", str(niceness)] if niceness else []
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(sys.path)}
        self._said = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            [*prefix, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=environment,
        )
        self._read()

    def play(self) -> dict[str, Any]:
        """Return what one round reports."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write("go\n")
        stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def _read(self) -> dict[str, Any]:
        timer = threading.Timer(self._deadline_s, self._process.kill)
        timer.start()
        line = self._process.stdout.readline() if self._process.stdout else ""
        timer.cancel()
        if not line:
            self._process.wait()
            self._said.seek(0)
            said = self._said.read()[-2000:]
            self.close()
            sys.exit(f"a contender ended or took more than {self._deadline_s:g} s; it said last:\n{said}")
        result: dict[str, Any] = json.loads(line)
        return result


def peak_bytes() -> int:
    """Return the most memory this process has held (resident set)."""
    # Not getrusage: its number starts with what the parent held.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("memory: got no VmHWM in /proc/self/status, need Linux")
