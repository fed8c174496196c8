"""A real Slurm of one's own on this machine, for as long as a command or a test runs.

    python -m tools.one_slurm -- sbatch --wait --nodes=2 --wrap hostname
    python -m tools.one_slurm -- bash                       # look around

A head with `slurmctld` and `munged`, and hosts with a `slurmd` each, are namespaces of this machine: network,
processes, mounts and name are their own; the file system is shared, as clusters have it. The only network is a bridge
between them: nothing is heard outside, and nothing outside is reached. All files are in one folder, none of them in
/etc. Every process is below the head's first, which the kernel ends with the process that made it: nothing is left,
however that ends. There is no accounting, and no limit on what a step takes. Needs root, and the programs
(`tools/setup_slurm.py`).
"""

import argparse
import os
import secrets
import shlex
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from areal_async.process.parent_death import guarded
from tools.setup_slurm import SBIN, missing_programs

START_DEADLINE_S = 30.0
LOOK_S = 0.05
NETWORK = "10.87.0"
HEAD_ADDRESS = f"{NETWORK}.1"
NAMESPACES = ("--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
KEY_BYTES = 128

CONFIGURATION = """\
ClusterName=one
SlurmctldHost=head({head})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
SlurmdParameters=config_overrides
TaskPlugin=task/affinity
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
KillWait={kill_wait_s}
JobRequeue=1
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
NUM_GPUS = 4
NODE = f"NodeName={{name}} NodeAddr={{address}} CPUs=2 RealMemory=16000 Gres=gpu:{NUM_GPUS}"
"""What a host says it has, whatever there is."""

HEAD = """\
set -eu
cd "$ONE"
await() { i=0; until eval "$1"; do i=$((i + 1)); [ $i -lt 200 ] || { echo "no $1" >&2; exit 1; }; sleep 0.05; done; }
hostname head
mount --bind hosts /etc/hosts
ip link set lo up
ip link add br0 type bridge
ip addr add $HEAD_ADDRESS/24 dev br0
ip link set br0 up
munged --force --foreground --socket="$ONE/munge.sock" --key-file=munge.key --seed-file=munged.seed \\
  --log-file=munged.log --pid-file=munged.pid >munged.out 2>&1 &  # by force: others may not look into the folder
await '[ -S munge.sock ]'
slurmctld -D >/dev/null 2>&1 &
grep host- hosts | while read -r address name; do
  unshare $NAMESPACES sh -eu -c "$HOST" host "$name" "$address" >"$name.out" 2>&1 &
  await "[ -e $name.apart ]"
  ip link add "v$name" type veth peer name eth0 netns $!
  ip link set "v$name" master br0 up
done
wait
"""
HOST = """\
hostname "$1"
: >"$1.apart"
i=0
until ip link show eth0 >/dev/null 2>&1; do i=$((i + 1)); [ $i -lt 200 ]; sleep 0.05; done
ip link set lo up
ip addr add "$2/24" dev eth0
ip link set eth0 up
slurmd -D >/dev/null 2>&1 &
wait  # a shell: the first process of a host is to reap what others leave
"""


class SlurmError(Exception):
    """This machine cannot have one; the sentence says why."""


@dataclass(frozen=True, slots=True)
class Slurm:
    """A cluster that runs."""

    folder: Path
    hosts: tuple[str, ...]
    pid: int
    """Process id, outside, of the process whose namespaces are the head's."""

    def command(self, *words: object) -> list[str]:
        """Return the command that runs another one on the head, in the folder that this process is in."""
        processes = f"--pid=/proc/{self.pid}/ns/pid_for_children"
        inside = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", processes]
        return [*inside, "env", f"--chdir={Path.cwd()}", f"SLURM_CONF={self.folder}/slurm.conf", *map(str, words)]

    def ask(self, *words: object, environment: Mapping[str, str] = os.environ) -> str:
        """Return what a command prints on the head.

        Raises:
            SlurmError: it fails.
        """
        ended = subprocess.run(
            self.command(*words), env={**environment}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=START_DEADLINE_S, check=False,
        )  # fmt: skip
        if ended.returncode:
            raise SlurmError(f"{shlex.join(map(str, words))}: status {ended.returncode}, {ended.stderr.strip()}")
        return ended.stdout.strip()

    def log(self) -> str:
        """Return what its daemons have said last."""
        parts = [f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.[lo][ou][gt]"))]
        return "\n".join(parts)


@contextmanager
def one_slurm(folder: Path, *, num_hosts: int = 2, kill_wait_s: int = 30) -> Iterator[Slurm]:
    """Have one with its files in ``folder``, whose name must be short: there is a socket in it.

    Args:
        kill_wait_s: between the first signal of ``scancel`` and the last one.

    Raises:
        SlurmError: programs or rights are missing, or it does not come up.
    """
    if missing := missing_programs():
        raise SlurmError(f"slurm: got no {', '.join(missing)}, need them; run python tools/setup_slurm.py")
    if os.geteuid() != 0:
        raise SlurmError("slurm: needs root, for namespaces of its own")
    hosts = tuple(f"host-{index}" for index in range(num_hosts))
    _write_files(folder, hosts, kill_wait_s=kill_wait_s)
    environment = {
        **os.environ, "PATH": SBIN, "ONE": str(folder), "SLURM_CONF": f"{folder}/slurm.conf", "HOST": HOST,
        "HEAD_ADDRESS": HEAD_ADDRESS, "NAMESPACES": " ".join(NAMESPACES),
    }  # fmt: skip
    with open(folder / "head.out", "ab") as output:
        head = subprocess.Popen(
            guarded(["unshare", *NAMESPACES, "sh", "-c", HEAD]), env=environment, stdin=subprocess.DEVNULL,
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        slurm = Slurm(folder, hosts, head.pid)
        _await_idle(slurm, head)
        yield slurm
    finally:
        head.kill()
        head.wait()


def _write_files(folder: Path, hosts: tuple[str, ...], *, kill_wait_s: int) -> None:
    (folder / "state").mkdir(parents=True)
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(KEY_BYTES))
    addresses = {name: f"{NETWORK}.{index}" for index, name in enumerate(hosts, 2)}
    lines = ["127.0.0.1 localhost", f"{HEAD_ADDRESS} head", *(f"{at} {name}" for name, at in addresses.items())]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    nodes = "\n".join(NODE.format(name=name, address=at) for name, at in addresses.items())
    text = CONFIGURATION.format(folder=folder, head=HEAD_ADDRESS, nodes=nodes, kill_wait_s=kill_wait_s)
    (folder / "slurm.conf").write_text(text)
    for index in range(NUM_GPUS):
        os.mknod(folder / f"gpu{index}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{NUM_GPUS - 1}]\n")


def _await_idle(slurm: Slurm, head: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    reason = ""
    while time.monotonic() < deadline and head.poll() is None:
        try:
            states = slurm.ask("sinfo", "--noheader", "--Node", "--format=%T").split()
        except SlurmError as exc:
            reason = str(exc)
        else:
            if states == ["idle"] * len(slurm.hosts):
                return
            reason = f"hosts are {', '.join(states)}"
        time.sleep(LOOK_S)
    raise SlurmError(f"slurm: not up within {START_DEADLINE_S:g} s: {reason}; its daemons say\n{slurm.log()}")


def _run(words: list[str], *, num_hosts: int) -> int:
    def leave(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="slurm-") as folder,
            one_slurm(Path(folder), num_hosts=num_hosts) as slurm,
        ):
            return subprocess.run(slurm.command(*words), check=False).returncode
    except SlurmError as exc:
        sys.exit(str(exc))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    sys.exit(_run(arguments.command, num_hosts=arguments.hosts))


if __name__ == "__main__":
    main()
