"""A run over two hosts, the link between which is cut: two network namespaces, one broker, one node in each.

    sudo python -m tools.two_hosts             # about two minutes
    sudo python -m tools.two_hosts --transfer distributed --steps 20

Namespace A has a `nats-server` of its own, as an operator would run it, with TLS and a key for each who connects, and
the launcher with trainer and first node. The second node joins from namespace B, by the address of A, with a key that
may do what a node's work needs and nothing else. The only way between the two is a pair of virtual network cards. It
is cut for `--cut-s` and put back. Meanwhile the first node has to go on and nothing of the second's to arrive; then the
second node has to work again, the run to train `--steps` more, the second node to end when the run is stopped, and the
doctor to prove every promise. Where there can be no such namespaces it says ``not run``, which is not a pass, and why.

The two share a file system, over which the weights reach B (`inference.weight_transfer: disk`), as on most clusters.
With `distributed` they go over the link as well; then the embedded engine generates, for else servers only sleep
(`tools/sleeping_server.py`). Needs root, `ip` and `openssl`.
"""

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_async.bus.accounts import accounts
from areal_async.bus.server import find_binary
from areal_async.protocol.subjects import Names
from tools.bench_nodes import BOUND_BY_GENERATION, NODE_ID, SECONDS_PER_TOKEN, num_rollouts
from tools.faults_run import REPOSITORY, FaultRun
from tools.sleeping_server import TOKEN_S, interpreter

ADDRESS_A, ADDRESS_B = "10.77.31.1", "10.77.31.2"
PORT = 4222
NAME = "two"
ON_ITS_WAY_S = 5.0
"""Within which B, on a busy machine too, notes what was acknowledged just before the cut."""
WORKED_AFTER = 16
"""Rollouts of the second node that show that it works."""


@dataclass(frozen=True, slots=True)
class Link:
    """Two namespaces and the cards between them."""

    a: str
    b: str
    card_b: str

    def command(self, namespace: str, *words: object) -> list[str]:
        """Return the command that runs another one there."""
        return ["ip", "netns", "exec", namespace, *map(str, words)]

    def set(self, state: str) -> None:
        """Cut the link (``down``) or put it back (``up``). On B's side: A's own address stays in use."""
        _call(*self.command(self.b, "ip", "link", "set", self.card_b, state))


def why_not() -> str:
    """Return why there can be no two hosts here; empty when there can."""
    missing = [name for name in ("ip", "openssl") if shutil.which(name) is None]
    if missing:
        return f"got no {' and no '.join(missing)} on PATH, need both; install iproute2 and openssl"
    if os.geteuid() != 0:
        return "got no root, need it for network namespaces; use sudo"
    tried = f"areal-try-{secrets.token_hex(2)}"
    made = subprocess.run(["ip", "netns", "add", tried], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"got {made.stderr.strip()!r} for a network namespace, need the right to make one"
    _call("ip", "netns", "del", tried)
    return ""


@contextmanager
def linked() -> Iterator[Link]:
    """Have the namespaces for a while."""
    mark = secrets.token_hex(2)
    a, b, card_a, card_b = f"areal-a-{mark}", f"areal-b-{mark}", f"va{mark}", f"vb{mark}"
    try:
        for namespace in (a, b):
            _call("ip", "netns", "add", namespace)
        _call("ip", "link", "add", card_a, "netns", a, "type", "veth", "peer", "name", card_b, "netns", b)
        for namespace, card, address in ((a, card_a, ADDRESS_A), (b, card_b, ADDRESS_B)):
            _call("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", card)
            _call("ip", "-n", namespace, "link", "set", card, "up")
            _call("ip", "-n", namespace, "link", "set", "lo", "up")
        yield Link(a, b, card_b)
    finally:
        for namespace in (a, b):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


@contextmanager
def broker(link: Link, folder: Path) -> Iterator[str]:
    """Have a broker in A that shows a certificate and knows each role's key; yield its URL."""
    certify(folder)
    config = {
        "listen": f"{ADDRESS_A}:{PORT}",
        "max_payload": 9 << 20,
        "tls": {"cert_file": str(folder / "broker.pem"), "key_file": str(folder / "broker.key")},
        "jetstream": {"store_dir": str(folder / "store"), "sync_interval": "always"},
        "accounts": accounts(Names(NAME), folder / "keys"),
    }
    (folder / "nats.conf").write_text(json.dumps(config))
    with open(folder / "nats.log", "wb") as log:
        process = subprocess.Popen(
            link.command(link.a, find_binary(), "-c", folder / "nats.conf"), stdout=log, stderr=log
        )
    try:
        yield f"tls://{ADDRESS_A}:{PORT}"
    finally:
        process.terminate()
        process.wait()


def certify(folder: Path) -> None:
    """Make an authority and a certificate of the broker's address."""
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    (folder / "names").write_text(f"subjectAltName=IP:{ADDRESS_A}\nextendedKeyUsage=serverAuth\n")
    openssl = ["openssl"]
    _call(*openssl, "req", "-x509", *curve, "-days", "2", "-subj", "/CN=authority", "-keyout", folder / "ca.key",
          "-out", folder / "ca.pem")  # fmt: skip
    _call(*openssl, "req", *curve, "-subj", f"/CN={ADDRESS_A}", "-keyout", folder / "broker.key",
          "-out", folder / "broker.csr")  # fmt: skip
    _call(*openssl, "x509", "-req", "-in", folder / "broker.csr", "-CA", folder / "ca.pem", "-CAkey",
          folder / "ca.key", "-CAcreateserial", "-days", "2", "-extfile", folder / "names", "-out",
          folder / "broker.pem")  # fmt: skip


class RunInA(FaultRun):
    """A run whose launcher, and so everything that it starts, is in namespace A."""

    def __init__(self, link: Link, parent: Path, **keywords: Any) -> None:
        self.link = link
        super().__init__(parent, **keywords)

    @property
    def command(self) -> list[str]:
        return self.link.command(self.link.a, *super().command)

    def join_from_b(self, url: str) -> "subprocess.Popen[bytes]":
        """Have the second node join, with its own key."""
        folder = self.directory.parent
        words = ["node", "--join", url, "--run", NAME, "--node-id", NODE_ID, "--directory", folder]
        words += ["--credentials", folder / "keys" / "node.nk", "--ca", folder / "ca.pem"]
        with open(folder / "node.out", "ab") as output:
            return subprocess.Popen(
                self.link.command(self.link.b, sys.executable, "-m", "areal_async", *words),
                cwd=REPOSITORY, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip

    def doctor(self) -> subprocess.CompletedProcess[str]:
        """Have it examined, where its broker can be reached."""
        words = [sys.executable, "-m", "areal_async", "doctor", "--run", self.directory]
        return subprocess.run(
            self.link.command(self.link.a, *words), cwd=REPOSITORY, env=self.environment, capture_output=True,
            text=True, check=False,
        )  # fmt: skip


def cut_link(link: Link, folder: Path, *, steps: int, cut_s: float, transfer: str) -> bool:
    """Carry it out; say whether all held."""
    settings: dict[str, Any] = {**BOUND_BY_GENERATION, "inference__weight_transfer": transfer}
    settings |= {"bus__credentials": folder / "keys", "bus__ca": folder / "ca.pem"}
    environment, workflow = {TOKEN_S: str(SECONDS_PER_TOKEN)}, "tools/heavy_tail.py:same_length"
    if transfer == "distributed":
        settings["inference__backend"] = "embedded"
    else:
        settings["inference__python"] = interpreter(folder)
    with broker(link, folder) as url:
        run = RunInA(link, folder, name=NAME, workflow=workflow, environment=environment, bus__url=url, **settings)
        node = None
        try:
            run.start()
            run.wait_for_step(1)
            node = run.join_from_b(url)
            joined_s = run.wait_until(lambda: num_rollouts(run, NODE_ID) > WORKED_AFTER, "rollouts from B")
            _say(f"the second node has joined from B and worked after {joined_s:.0f} s; step {len(run.steps)}")
            link.set("down")
            started = time.monotonic()
            time.sleep(ON_ITS_WAY_S)
            before, in_b = num_rollouts(run), num_rollouts(run, NODE_ID)
            time.sleep(cut_s - ON_ITS_WAY_S)
            of_b = num_rollouts(run, NODE_ID) - in_b
            of_a = num_rollouts(run) - before - of_b
            link.set("up")
            _say(
                f"the link was cut for {time.monotonic() - started:.0f} s: A stored {of_a} rollouts meanwhile, B {of_b}"
            )
            back_s = run.wait_until(lambda: num_rollouts(run, NODE_ID) > in_b, "the second node's return")
            _say(f"B stored its next rollout {back_s:.1f} s after the link was back; step {len(run.steps)}")
            for name in ("server.disowned", "process.died"):
                _say(f"{name}: {len(run.events('controller', name) + run.events('launcher', name))}")
            run.wait_for_step(len(run.steps) + steps)
            run.stop()
            status = node.wait(timeout=60)
            _say(f"the run was stopped after step {len(run.steps)}; the second node ended with status {status}")
            for line in (folder / "node.out").read_text().splitlines():
                _say(f"B: {line}")
            examined = run.doctor()
            print(examined.stdout + examined.stderr)
            _say(f"{num_rollouts(run)} rollouts acknowledged, {num_rollouts(run, NODE_ID)} of them of B's")
            is_cut = of_b == 0 and of_a > 0
            return is_cut and examined.returncode == 0 and status == 0
        finally:
            run.kill_everything()
            run.close()
            if node is not None:
                node.wait()


def _call(*words: object) -> None:
    ended = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"two_hosts: {' '.join(map(str, words))}: {ended.stderr.strip()}")


def _say(sentence: str) -> None:
    print(sentence, flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cut-s", type=float, default=30.0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--transfer", choices=["disk", "distributed"], default="disk")
    arguments = parser.parse_args()
    if reason := why_not():
        _say(f"not run: {reason}")
        sys.exit(1)
    with tempfile.TemporaryDirectory() as folder, linked() as link:
        is_whole = cut_link(
            link, Path(folder), steps=arguments.steps, cut_s=arguments.cut_s, transfer=arguments.transfer
        )
    _say("all held" if is_whole else "something did not hold")
    sys.exit(0 if is_whole else 1)


if __name__ == "__main__":
    main()
