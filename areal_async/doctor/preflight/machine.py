"""What this host has: cores, memory, GPUs, open files, disk, a clock. Linux tells; others may not."""

import ctypes
import os
import re
import resource
import shutil
import sys
from pathlib import Path

import msgspec

from areal_async.process.host import ask_driver, visible_gpus

CLOCK_UNSYNCHRONISED = 5
"""``adjtimex``'s TIME_ERROR."""
MEBIBYTE = 1 << 20


class Gpu(msgspec.Struct, frozen=True):
    """One GPU that a run may use."""

    name: str
    memory_bytes: int
    free_bytes: int
    number: str = ""
    """As ``CUDA_VISIBLE_DEVICES`` takes it."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of the host."""

    num_cores: int
    memory_bytes: int | None
    """Memory that this process and its children may still take; None where the host does not tell."""
    gpus: tuple[Gpu, ...]
    open_files: int
    """Most that a process may have."""
    shared_memory_bytes: int | None
    """Free in ``/dev/shm``, through which GPUs of one host talk."""
    is_clock_kept: bool | None
    """Whether something keeps it right; None where the host does not tell."""


def look_at_machine() -> Machine:
    """Ask the host."""
    shared = Path("/dev/shm")
    return Machine(
        num_cores=_num_cores(),
        memory_bytes=_memory_bytes(),
        gpus=_gpus(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        shared_memory_bytes=shutil.disk_usage(shared).free if shared.is_dir() else None,
        is_clock_kept=_is_clock_kept(),
    )


def free_disk_bytes(path: Path) -> int:
    """Return the free space where ``path`` is or will be."""
    there = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(there).free


def _num_cores() -> int:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        count = min(count, max(1, int(quota[0]) // int(quota[1])))
    return count


def _memory_bytes() -> int | None:
    lines = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    if "MemAvailable" not in lines:
        return None
    available = int(lines["MemAvailable"].split()[0]) << 10
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    return min(available, int(limit) - int(used)) if limit.isdecimal() and used.isdecimal() else available


def _gpus() -> tuple[Gpu, ...]:
    """Ask the driver for those that are visible."""
    visible = visible_gpus()
    if not visible:
        return ()
    query = "--query-gpu=index,uuid,name,memory.total,memory.free"
    whole = parse_gpus(ask_driver(query, "--format=csv,noheader,nounits"), visible)
    return (*whole, *parse_mig_devices(ask_driver("-L"), visible))


def parse_gpus(answer: str, visible: tuple[str, ...]) -> list[Gpu]:
    """Read the driver's table: index, uuid, name, MiB in all, MiB free; leave out what is not visible.

    And what has no memory of its own, as in a machine whose processor shares it: there the driver gives no number.
    """
    gpus = []
    for line in answer.splitlines():
        index, uuid, name, total, free = (part.strip() for part in line.split(","))
        if (index in visible or uuid in visible) and total.isdecimal() and free.isdecimal():
            number = index if index in visible else uuid
            gpus.append(Gpu(name, int(total) * MEBIBYTE, int(free) * MEBIBYTE, number))
    return gpus


def parse_mig_devices(answer: str, visible: tuple[str, ...]) -> list[Gpu]:
    """Read the driver's list, which tells of the memory of a MIG device by its profile alone, and not what is free."""
    found = re.findall(r"(MIG \S*?(\d+)gb\S*) .*UUID: (MIG-[^)]+)\)", answer)
    return [Gpu(name, int(size) * 10**9, int(size) * 10**9, uuid) for name, size, uuid in found if uuid in visible]


def _is_clock_kept() -> bool | None:
    if sys.platform != "linux":
        return None
    buffer = ctypes.create_string_buffer(512)  # a struct timex, zero: nothing is changed, only read
    state: int = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    return None if state < 0 else state != CLOCK_UNSYNCHRONISED


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
