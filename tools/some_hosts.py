"""Hosts made of network namespaces, on one bridge, which share the file system as the hosts of a cluster do.

    with some_hosts(3) as hosts:
        hosts.command(0, "python", ...)   # run there
        hosts.cut(1); hosts.mend(1)       # its link
        hosts.kill(1); hosts.revive(1)    # with all that runs there

On each but the first a shell listens (`tools/far_shell.py`), through which a launcher on the first starts its agents;
so what it says to them goes over the link too. Needs root and `ip`.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
NETWORK = "10.93.0"
REMOTE_COMMAND = f"{sys.executable} {REPOSITORY / 'tools' / 'far_shell.py'} {{host}}"
DEADLINE_S = 20.0


class SomeHosts:
    """They, for as long as the block of ``some_hosts`` lasts."""

    def __init__(self, count: int) -> None:
        self._mark = secrets.token_hex(2)
        self.addresses = [f"{NETWORK}.{number + 1}" for number in range(count)]
        self._shells: list[subprocess.Popen[bytes]] = []

    @property
    def bridge(self) -> str:
        return f"br{self._mark}"

    def name(self, number: int) -> str:
        """Return the namespace of a host."""
        return f"areal-{self._mark}-{number}"

    def command(self, number: int, *words: object) -> list[str]:
        """Return the command that runs another one on a host."""
        return ["ip", "netns", "exec", self.name(number), *map(str, words)]

    def make(self) -> None:
        """Make them; ``remove`` must follow."""
        _call("ip", "netns", "add", self._switch)
        _call("ip", "-n", self._switch, "link", "add", self.bridge, "type", "bridge")
        _call("ip", "-n", self._switch, "link", "set", self.bridge, "up")
        for number, address in enumerate(self.addresses):
            name, card = self.name(number), f"v{self._mark}{number}"
            _call("ip", "netns", "add", name)
            _call(
                "ip", "link", "add", card, "netns", self._switch, "type", "veth", "peer", "name", "eth0", "netns", name
            )
            _call("ip", "-n", self._switch, "link", "set", card, "master", self.bridge, "up")
            _call("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _call("ip", "-n", name, "link", "set", device, "up")
            if number:
                self.revive(number)

    def remove(self) -> None:
        """Leave nothing of them."""
        for number in range(len(self.addresses)):
            self.kill(number)
            subprocess.run(["ip", "netns", "del", self.name(number)], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", self._switch], capture_output=True, check=False)
        for shell in self._shells:
            shell.wait()

    def cut(self, number: int) -> None:
        """Cut the link of a host, at the far end of its card."""
        _call("ip", "-n", self._switch, "link", "set", f"v{self._mark}{number}", "down")

    def mend(self, number: int) -> None:
        """Put it back."""
        _call("ip", "-n", self._switch, "link", "set", f"v{self._mark}{number}", "up")

    def kill(self, number: int) -> None:
        """End all that runs on a host, at once, so that nothing of it can react."""
        deadline = time.monotonic() + DEADLINE_S
        while pids := self.pids(number):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name(number)}: {pids} do not end")
            time.sleep(0.05)

    def revive(self, number: int) -> None:
        """Have a shell listen on a host, as one that has booted."""
        command = self.command(number, sys.executable, REPOSITORY / "tools" / "far_shell.py", "--serve")
        self._shells.append(subprocess.Popen([*command, self.addresses[number]], stdin=subprocess.DEVNULL))

    def pids(self, number: int) -> list[int]:
        """Return what runs on a host."""
        said = subprocess.run(["ip", "netns", "pids", self.name(number)], capture_output=True, text=True, check=False)
        return [pid for pid in map(int, said.stdout.split()) if not _is_over(pid)]

    @property
    def _switch(self) -> str:
        return f"areal-{self._mark}-switch"


def why_not() -> str:
    """Return why there can be no such hosts here; empty when there can."""
    if shutil.which("ip") is None:
        return "got no ip on PATH, need it for network namespaces; install iproute2"
    if os.geteuid() != 0:
        return "got no root, need it for network namespaces; use sudo"
    name = f"areal-try-{secrets.token_hex(2)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"got {made.stderr.strip()!r} for a network namespace, need the right to make one"
    _call("ip", "netns", "del", name)
    return ""


@contextmanager
def some_hosts(count: int) -> Iterator[SomeHosts]:
    """Have so many for a while.

    Raises:
        OSError: they cannot be made; ``why_not`` may say why.
    """
    hosts = SomeHosts(count)
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()


def _is_over(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True


def _call(*words: str) -> None:
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise OSError(f"{' '.join(words)}: {ended.stderr.strip()}")
