"""A real Ray on hosts of one's own (`tools/some_hosts.py`), a raylet on each and the head on the first.

    with one_ray(3) as cluster:
        subprocess.run(cluster.command("python", "-m", "areal_async", "run", ...), env=cluster.environment)

Needs root, `ip`, and the package `ray` with its dashboard, which takes jobs (`make ray`). A host is given up after
seconds, as it is after half a minute where Ray has its defaults.
"""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tools import some_hosts
from tools.some_hosts import SomeHosts

PORT = 6379
JOBS_PORT = 8265
DEADLINE_S = 60.0
STORE_BYTES = 80 << 20
OPEN = {"RAY_AUTH_MODE": "disabled"}
"""Nobody else reaches these hosts; by default Ray may take, or leave, a token in the user's home."""
HASTY = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "4"}


class OneRay:
    """The cluster, for as long as the block of ``one_ray`` lasts."""

    def __init__(self, hosts: SomeHosts, folder: Path) -> None:
        self.hosts = hosts
        self.address = f"{hosts.addresses[0]}:{PORT}"
        self.environment = {"RAY_ADDRESS": self.address, **OPEN}
        """What a command needs beside its own, to find it."""
        self._folder = folder
        self._output = folder / "ray.out"
        self._started: list[subprocess.Popen[bytes]] = []

    def command(self, *words: object) -> list[str]:
        """Return the command that runs another one on the first host."""
        return self.hosts.command(0, *words)

    def job(self, *words: object, folder: Path) -> list[str]:
        """Return the command that submits another one as a job, to run in a folder, and says what that says."""
        ray = Path(sys.executable).with_name("ray")
        submit = [ray, "job", "submit", f"--address=http://127.0.0.1:{JOBS_PORT}", "--"]
        return self.command(*submit, "env", f"--chdir={folder}", *words)

    def join(self, number: int) -> None:
        """Have a host join, as one that has booted."""
        ray = Path(sys.executable).with_name("ray")
        words = [ray, "start", "--block", f"--node-ip-address={self.hosts.addresses[number]}", "--num-cpus=1"]
        words += ["--disable-usage-stats", f"--object-store-memory={STORE_BYTES}"]
        head = ["--head", f"--port={PORT}", f"--dashboard-port={JOBS_PORT}", f"--temp-dir={self._folder}/ray"]
        words += [f"--address={self.address}"] if number else head
        with open(self._output, "ab") as output:
            self._started.append(
                subprocess.Popen(
                    self.hosts.command(number, *words), env={**os.environ, **OPEN, **HASTY}, stdin=subprocess.DEVNULL,
                    stdout=output, stderr=output,
                )
            )  # fmt: skip

    def wait_until_up(self) -> None:
        """Return when all that were started have joined.

        Raises:
            TimeoutError: they do not; with what they said.
        """
        deadline = time.monotonic() + DEADLINE_S
        while self._output.read_text().count("Ray runtime started") < len(self._started):
            if time.monotonic() > deadline:
                raise TimeoutError(self._output.read_text())
            time.sleep(0.1)

    def wait(self) -> None:
        """Return when all is over that was started, as its hosts are."""
        for one in self._started:
            one.wait()

    def raylet(self, number: int) -> int:
        """Return the raylet of a host."""
        (pid,) = (pid for pid in self.hosts.pids(number) if _command(pid).split("\0")[0].endswith("/raylet"))
        return pid


def why_not() -> str:
    """Return why there can be none here; empty when there can."""
    is_there = all(map(importlib.util.find_spec, ("ray", "aiohttp_cors")))
    return some_hosts.why_not() or ("" if is_there else "got no package ray[default], need it; make ray")


@contextmanager
def one_ray(num_hosts: int) -> Iterator[OneRay]:
    """Have one for a while.

    Raises:
        OSError: its hosts cannot be made; ``why_not`` may say why.
        TimeoutError: it does not come up.
    """
    with some_hosts.some_hosts(num_hosts) as hosts, TemporaryDirectory(prefix="ray-") as folder:
        made = OneRay(hosts, Path(folder))
        for number in range(num_hosts):
            made.join(number)
            made.wait_until_up()
        yield made
    made.wait()


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
