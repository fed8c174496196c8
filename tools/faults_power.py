"""Power cuts: the run's whole directory lies on a loop image, of which only what was synced survives.

Everything is stopped, the image's backing file is copied, everything is killed, and the copy is mounted in its place:
it holds what the file system had written back, as a disk would after the cut.
"""

import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from areal_async.bus.server import find_binary
from tools.faults_cases import Case, NotRun, row
from tools.faults_run import SMALL_DISK, FaultFailed, FaultRun, send_signal

IMAGE_BYTES = 2 << 30
"""Sparse; the broker wants a margin."""
UNMOUNT_DEADLINE_S = 20.0
SERVER_WITH_LAZY_SYNC = """#!/bin/sh
# Starts the broker with the interval between syncs that it has by default.
for last; do :; done
if [ -f "$last" ]; then sed -i 's/"sync_interval": "always"/"sync_interval": "2m"/' "$last"; fi
exec {binary} "$@"
"""


class Disk:
    """An ext4 image on a loop device."""

    def __init__(self, directory: Path) -> None:
        self._image = directory / "disk.img"
        self.mount_point = directory / "disk"

    @contextmanager
    def mounted(self, case: Case) -> Iterator["Disk"]:
        """Have it at its mount point.

        Raises:
            NotRun: this process may not mount.
        """
        if os.geteuid() != 0:
            raise NotRun("needs root for a loop mount")
        self.mount_point.mkdir()
        with self._image.open("wb") as image:
            image.truncate(IMAGE_BYTES)
        _call("mkfs.ext4", "-q", str(self._image))
        self._mount()
        try:
            yield self
        finally:
            if case.run is not None:
                case.run.kill_everything()
            self._unmount()

    def cut_power(self, run: FaultRun) -> None:
        """Take from the run and the disk whatever was not synced; the run is dead afterwards."""
        pids = run.all_pids()
        for pid in pids:
            send_signal(pid, signal.SIGSTOP)
        survives = self._image.with_suffix(".after")
        _call("cp", "--sparse=always", str(self._image), str(survives))
        run.kill_everything()
        self._unmount()
        survives.replace(self._image)
        self._mount()

    def _mount(self) -> None:
        _call("mount", "-o", "loop,commit=300", str(self._image), str(self.mount_point))

    def _unmount(self) -> None:
        """Unmount as soon as the last process that was killed has let go."""
        ends_at = time.monotonic() + UNMOUNT_DEADLINE_S
        command = ["umount", str(self.mount_point)]
        while subprocess.run(command, capture_output=True, check=False).returncode:
            if time.monotonic() > ends_at:
                subprocess.run([*command, "--lazy"], check=True)
                raise FaultFailed(f"{self.mount_point} is still in use {UNMOUNT_DEADLINE_S:g} s after the last kill")
            time.sleep(0.1)


def _call(*command: str) -> None:
    if shutil.which(command[0]) is None:
        raise NotRun(f"{command[0]} is not installed")
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise NotRun(f"{' '.join(command[:2])}: {ended.stderr.strip()}")


@row("3", "power cut, everything on one disk", is_random=True, is_quick=True)
def power_cut(case: Case) -> None:
    with Disk(case.directory).mounted(case) as disk:
        run = case.new_run(parent=disk.mount_point, run__steps=14, **SMALL_DISK)
        run.start()
        run.wait_for_step(case.rng.randint(2, 6))
        acknowledged = _publish_logs(run)
        disk.cut_power(run)
        _put_back(run, acknowledged)
        run.start()
        case.recovered(run.wait_for_progress())
        run.finish()
        case.count_slots()


@row("4", "power cut in mid checkpoint", is_random=True)
def power_cut_in_checkpoint(case: Case) -> None:
    point = ("trainer.before_checkpoint", "trainer.during_checkpoint", "trainer.after_checkpoint")[case.seed % 3]
    with Disk(case.directory).mounted(case) as disk:
        run = case.new_run(parent=disk.mount_point, run__steps=12, **SMALL_DISK, faults=f"{point}:2:stop")
        case.note(f"cut at {point} no. 2")
        run.start()
        run.wait_until(lambda: run.has_fired(point) or not run.is_alive, f"{point} to strike")
        acknowledged = _publish_logs(run)
        disk.cut_power(run)
        _put_back(run, acknowledged)
        run.start()
        case.recovered(run.wait_for_progress())
        run.finish()
        case.count_slots()


@row("N1", "negative control: power cut with a sync every 2 minutes", must_show="lost")
def power_cut_with_lazy_sync(case: Case) -> None:
    server = case.directory / "nats-server"
    server.write_text(SERVER_WITH_LAZY_SYNC.format(binary=find_binary()))
    server.chmod(server.stat().st_mode | stat.S_IXUSR)
    with Disk(case.directory).mounted(case) as disk:
        run = case.new_run(
            parent=disk.mount_point, run__steps=14, **SMALL_DISK,
            environment={"NATS_SERVER": str(server)},
        )  # fmt: skip
        run.start()
        run.wait_for_step(5)
        acknowledged = _publish_logs(run)
        disk.cut_power(run)
        _put_back(run, acknowledged)
        case.count_slots()


def _publish_logs(run: FaultRun) -> dict[str, bytes]:
    """Return the producers' publish logs, as a client on a host that the cut does not reach would keep them."""
    return {path.name: path.read_bytes() for path in run.directory.glob("produced/*.jsonl")}


def _put_back(run: FaultRun, logs: dict[str, bytes]) -> None:
    folder = run.directory / "produced"
    folder.mkdir(exist_ok=True)
    for name, lines in logs.items():
        (folder / name).write_bytes(lines)
