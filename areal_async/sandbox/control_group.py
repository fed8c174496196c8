"""What programs hold, the kernel's memory with it: a control group of a sandbox's own counts it, where one may be made.

A look at processes sees their pages, and not what the kernel keeps for them: what waits in sockets and pipes, maps of
memory, tables of pages. The group only counts; the one who looks ends a program. Where the control groups are closed to
us, as in most containers, there is none, and the filter of system calls alone bounds what the kernel keeps.

Sources: ``Documentation/admin-guide/cgroup-v1/memory.rst`` and ``cgroup-v2.rst``.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import anyio

PREFIX = "areal_async-sandbox-"
REMOVAL_TRIES, REMOVAL_WAIT_S = 100, 0.02
"""Processes in namespaces that end leave their group a moment later."""


class ControlGroup:
    """A group of the memory controller."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def door(self) -> str:
        """The file into which a process writes itself to join, with all that it starts from then on."""
        return str(self._folder / "cgroup.procs")

    @property
    def is_entered(self) -> bool:
        """Whether a process is in it."""
        return bool((self._folder / "cgroup.procs").read_text())

    def held_bytes(self) -> int:
        """Return what its processes hold and the kernel for them; without files, in memory or not, which others bound.

        Raises:
            OSError: it is gone.
        """
        try:
            total, name = self._number("memory.current"), "file"
        except FileNotFoundError:
            total, name = self._number("memory.usage_in_bytes"), "cache"
        counts = dict(line.split(" ", 1) for line in (self._folder / "memory.stat").read_text().splitlines())
        swapped = int(counts.get("swap", 0))
        with suppress(FileNotFoundError):  # not there without swap
            swapped = self._number("memory.swap.current")
        return total + swapped - int(counts[name])

    def _number(self, name: str) -> int:
        return int((self._folder / name).read_text())

    async def remove(self) -> None:
        """Remove it once its processes have gone; one that stays is removed by the next that is made."""
        for _ in range(REMOVAL_TRIES):
            with suppress(OSError):
                self._folder.rmdir()
            if not self._folder.exists():
                return
            await anyio.sleep(REMOVAL_WAIT_S)


def make_control_group() -> ControlGroup | None:
    """Return a new group beside or below this process's own; None where that may not be, or would count nothing."""
    for place in _places():
        folder = place / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        with suppress(OSError):
            _sweep(place)
            folder.mkdir()
            group = ControlGroup(folder)
            with suppress(OSError):
                group.held_bytes()
                return group
            folder.rmdir()
    return None


def _places() -> Iterator[Path]:
    """Yield the folders in which a group with the memory controller could be made."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                yield from (folder for folder in [_folder_of(path, "cgroup")] if folder)
            elif not controllers and (folder := _folder_of(path, "cgroup2")):
                # a group with processes has no controllers for groups below it: there, one beside it is made
                yield from (one for one in (folder, folder.parent) if _gives_memory(one))


def _folder_of(path: str, kind: str) -> Path | None:
    """Return where this process's group is mounted: of version 1 in the hierarchy of the memory controller."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        found, _, options = rest.split(" ", 2)
        root, mount_point = fields.split()[3:5]
        if found == kind and (kind == "cgroup2" or "memory" in options.split(",")) and Path(path).is_relative_to(root):
            return Path(mount_point) / Path(path).relative_to(root)
    return None


def _gives_memory(folder: Path) -> bool:
    try:
        return "memory" in (folder / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False


def _sweep(place: Path) -> None:
    """Remove groups whose makers have gone without doing so."""
    for folder in place.glob(f"{PREFIX}*"):
        if not Path("/proc", folder.name.removeprefix(PREFIX).partition("-")[0]).exists():
            with suppress(OSError):
                folder.rmdir()
