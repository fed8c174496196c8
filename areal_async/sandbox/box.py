"""A box: a sandbox that lasts, with a shell in it, and files that can be put back as they were.

    async with sandbox() as box:
        await box.write("sum.py", "print(6 * 7)")
        await box.run("export WHO=me")
        await box.snapshot()
        done = await box.run("python3 sum.py; echo $WHO; rm sum.py")
        await box.reset()  # sum.py is back; the shell is a new one

The shell is one bash for as long as it lasts: its folder, variables, functions and background processes stay from one
command to the next.

Invariant: when ``sandbox()`` is left, by return, error or cancellation, nothing of the box runs or is stored any more;
and so when its process is killed.
"""

import asyncio
import errno
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import Any, Final

import anyio
import structlog

from areal_async.errors import RolloutError, UserError
from areal_async.sandbox.box_escapes import ATTEMPTS, BOX_ESCAPES, RUNNER, attempts
from areal_async.sandbox.keeper import KEEPERS, BoxKeeper, BoxKeepers
from areal_async.sandbox.limits import MIB, BoxLimits, BoxResult, End
from areal_async.sandbox.shell import WORKSPACE, Shell
from areal_async.sandbox.worker import LOOK_S, NUM_BESIDES, SandboxGone, memory_file

MOST_READ_BYTES: Final = 16 * MIB
MAX_COMMAND_BYTES: Final = MIB
MAX_PATH_BYTES: Final = 4096
INTERRUPT_GRACE_S: Final = 5.0
"""Time in which a command that is interrupted may end, before the shell ends with it."""
INTERRUPT_AGAIN_S: Final = 0.5
"""Before the second interrupt, and twice as long before each one more."""
ANSWER_DEADLINE_S: Final = 60.0
LOOK_BETWEEN_S: Final = 0.5
"""Time from one look at a box's memory to the next between commands, and at its processor time always."""
TRIAL_S: Final = 60.0
"""For an attempt at the walls, on a busy machine."""
_MESSAGE_BYTES = 1 << 16

log = structlog.get_logger()


@asynccontextmanager
async def sandbox(limits: BoxLimits | None = None, *, keepers: BoxKeepers = KEEPERS) -> AsyncIterator["Box"]:
    """Open a box, and end it with all that runs in it.

    Where as many are open as may be (``set_max_boxes``), it waits; the log tells of that.

    Args:
        limits: of this box; ``BoxLimits()`` where none are given.
        keepers: whose box it is; this process's where none are given.

    Raises:
        UserError: this machine cannot isolate programs, or one came through the walls; says which.
    """
    async with keepers.keeper() as keeper:
        box = Box(keeper, limits or BoxLimits())
        try:
            await _try_walls(keeper, keepers)
            await box._start(is_new=True)
            watching = asyncio.get_running_loop().create_task(box._watch())
            try:
                yield box
            finally:
                watching.cancel()
                await asyncio.wait([watching])
        finally:
            box._end("it was closed")


class Box:
    """A sandbox that lasts. Its commands run one after the other; files may be read and written meanwhile."""

    def __init__(self, keeper: BoxKeeper, limits: BoxLimits) -> None:
        self.limits: Final = limits
        self._keeper: Final = keeper
        self._ends_at_s = time.monotonic() + limits.box_wall_s
        self._turn = anyio.Lock()
        self._control: socket.socket | None = None
        self._shell: Shell | None = None
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._num_asked = self._num_snapshots = 0
        self._snapshot = ""
        self._is_new_shell = False
        self._why_gone = ""

    @property
    def can_overlay(self) -> bool:
        """Whether the kernel lets a reset lay an empty file system over the snapshot; else the snapshot is copied."""
        return self._keeper.can_overlay

    async def run(self, command: str, *, timeout_s: float | None = None) -> BoxResult:
        """Run a command line, or several, in the box's shell.

        A command for which ``timeout_s`` (else ``limits.wall_s``) does not suffice, or whose caller is cancelled, is
        interrupted as by Ctrl-C. Where that does not end it, all that runs is ended, and a new shell starts in the same
        folder: ``is_new_shell`` of this result, else of the next one.

        Raises:
            RolloutError: the box has ended, and its files are gone.
            ValueError: no shell can be given this command.
        """
        line = _line_of(command)
        async with self._turn:
            shell = await self._living_shell()
            started = time.monotonic()
            end, status = End.OUT_OF_TIME, None
            try:
                with anyio.move_on_after(self.limits.wall_s if timeout_s is None else timeout_s):
                    end, status = await shell.run(line)
                duration_s = time.monotonic() - started
            except asyncio.CancelledError:
                shell.is_unheard = True
                raise
            finally:
                if not shell.is_idle:
                    with anyio.CancelScope(shield=True):
                        await self._settle(shell)
            self._check_alive()
            output, num_left_out = shell.take_output()
        return BoxResult(
            end=end,
            status=status,
            output=output,
            num_left_out=num_left_out,
            is_new_shell=self._told_of_new_shell(),
            duration_s=duration_s,
        )

    async def read(self, path: str, *, most_bytes: int = MOST_READ_BYTES) -> bytes:
        """Return a file's content; a path that is not absolute is below ``/workspace``.

        Raises:
            OSError: it cannot be read, is no regular file, or is larger than ``most_bytes``.
            RolloutError: the box has ended.
        """
        file = memory_file()
        try:
            await self._ask("read", [file], path=_path_of(path), most=most_bytes)
            return os.pread(file, most_bytes, 0)
        finally:
            os.close(file)

    async def write(self, path: str, content: bytes | str, *, mode: int = 0o644) -> None:
        """Make a file, and the folders above it that are missing; a path that is not absolute is below ``/workspace``.

        Raises:
            OSError: it cannot be written, or there is something that is no regular file.
            RolloutError: the box has ended.
        """
        file = memory_file(content.encode() if isinstance(content, str) else content)
        try:
            await self._ask("write", [file], path=_path_of(path), mode=mode & 0o777)
        finally:
            os.close(file)

    async def snapshot(self) -> None:
        """Keep the box's files as they are now: ``reset`` puts them back. The shell and what runs beside it go on.

        Raises:
            OSError: there is no room for it beside the last one (``2 * disk_bytes`` for both).
            RolloutError: the box has ended.
        """
        async with self._turn:
            self._num_snapshots += 1
            name = str(self._num_snapshots)
            await self._ask("snapshot", [], path="/", name=name)
            self._snapshot = name

    async def reset(self) -> None:
        """Put the files back as they were at the last snapshot, or at the beginning, and end all that runs.

        The shell is a new one, in ``/workspace``. Who no longer waits for it does so to its end: half of it would leave
        no box.

        Raises:
            RolloutError: the box has ended.
        """
        async with self._turn:
            self._check_alive()
            with anyio.CancelScope(shield=True):
                self._close()
                await self._start(is_new=False)
            self._is_new_shell = False

    async def restart(self, *, has_more_room: bool = False) -> None:
        """End all that runs and start a new shell in ``/workspace``; the files stay.

        For what is not to be run by a shell that somebody else has had, as a verifier.

        Args:
            has_more_room: ``2 * disk_bytes`` and ``2 * num_files`` are its bounds from then on until a ``reset``: who
                had it before may have filled it.

        Raises:
            RolloutError: the box has ended.
        """
        async with self._turn:
            self._check_alive()
            await self._restart_shell(WORKSPACE, has_more_room=has_more_room)
            self._is_new_shell = False

    async def _start(self, *, is_new: bool) -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        shell, self._control = Shell(self.limits.output_bytes), ours
        self._shell = shell
        loop.add_reader(ours, self._hear)
        started = self._answers[0] = loop.create_future()
        request = {
            "start": {**asdict(self.limits), "num_besides": NUM_BESIDES},
            "is_new": is_new,
            "snapshot": self._snapshot,
            "uses_overlay": self._keeper.can_overlay,
        }
        try:
            with theirs:
                await self._keeper.ask(request, [theirs.fileno(), *shell.their_files])
            shell.close_theirs()
            with anyio.fail_after(ANSWER_DEADLINE_S):
                await started
        except (SandboxGone, TimeoutError) as exc:
            self._end(str(exc) or "it does not answer")
        self._check_alive()

    async def _living_shell(self) -> Shell:
        """Return the shell, a new one where the last has ended since.

        Raises:
            RolloutError: the box has ended.
        """
        self._check_alive()
        assert self._shell is not None
        if self._shell.is_dead:
            await self._restart_shell(self._shell.folder)
        elif self._shell.is_unheard:
            self._shell.take_output()
            self._shell.is_unheard = False
        return self._shell

    async def _settle(self, shell: Shell) -> None:
        """Have a command that is not waited for end, by an interrupt, else with the shell and all that runs."""
        with suppress(RolloutError):
            if not shell.is_dead:
                with anyio.move_on_after(INTERRUPT_GRACE_S):
                    await self._interrupt(shell)
            if shell.is_idle:
                shell.forget()
            else:
                await self._restart_shell(shell.folder)

    async def _interrupt(self, shell: Shell) -> None:
        """Interrupt a command until it has ended: a shell that has just read it may not have begun it, and goes on."""
        pause_s = INTERRUPT_AGAIN_S
        while not (shell.is_idle or shell.is_dead):
            await self._tell({"do": "interrupt"})
            with anyio.move_on_after(pause_s):
                await shell.ended()
            pause_s *= 2

    async def _restart_shell(self, folder: str, *, has_more_room: bool = False) -> None:
        """End all that runs, and start a new shell.

        Raises:
            RolloutError: the box has ended.
        """
        shell = Shell(self.limits.output_bytes, folder)
        try:
            await self._ask("restart", shell.their_files, folder=folder, has_more_room=has_more_room)
        except BaseException:
            shell.close()
            raise
        shell.close_theirs()
        if self._shell is not None:
            self._shell.close()
        self._shell, self._is_new_shell = shell, True

    def _told_of_new_shell(self) -> bool:
        is_new_shell, self._is_new_shell = self._is_new_shell, False
        return is_new_shell

    async def _ask(self, what: str, files: list[int], **more: Any) -> None:
        """Ask the box's first process for something, and wait for its answer.

        Raises:
            OSError: what the kernel says of it.
            RolloutError: the box has ended.
        """
        self._check_alive()
        self._num_asked += 1
        number = self._num_asked
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            await self._tell({"do": what, "number": number, **more}, files)
            with anyio.fail_after(ANSWER_DEADLINE_S):
                said: dict[str, Any] = await answer
        except TimeoutError:
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), more.get("path")) from None
        finally:
            self._answers.pop(number, None)
        self._check_alive()
        if "error" in said:
            raise OSError(*said["error"], more.get("path"))

    async def _tell(self, request: dict[str, Any], files: list[int] | None = None) -> None:
        message = json.dumps(request).encode()
        while self._control is not None:
            try:
                socket.send_fds(self._control, [message], files or [])
            except BlockingIOError:
                await anyio.wait_writable(self._control)
            except OSError as exc:
                self._end(str(exc))
            else:
                return
        self._check_alive()

    def _hear(self) -> None:
        """Take what the box's first process says."""
        assert self._control is not None
        try:
            message = self._control.recv(_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._end("its first process has ended")
            return
        said = json.loads(message)
        match said.get("event"):
            case "shell_ended":
                if self._shell is not None:
                    self._shell.finish(End.ENDED, said["status"])
                return
            case "failed":
                self._end(said["why"])
                return
        answer = self._answers.get(said.get("number", 0))
        if answer is not None and not answer.done():
            answer.set_result(said)

    async def _watch(self) -> None:
        """Look at what the box holds and has used, again and again, and end what is too much."""
        looked_s = 0.0
        while not self._why_gone:
            shell = self._shell
            is_running = shell is not None and not shell.is_idle
            await anyio.sleep(LOOK_S if is_running else LOOK_BETWEEN_S)
            with suppress(OSError, RolloutError):
                if await self._keeper.held_bytes() > self.limits.memory_bytes and shell is self._shell:
                    await self._end_all_for(End.OUT_OF_MEMORY)
                if time.monotonic() - looked_s > LOOK_BETWEEN_S:
                    looked_s = time.monotonic()
                    if await self._keeper.used_cpu_s() - self._keeper.began_cpu_s > self.limits.box_cpu_s:
                        self._end(f"it has used more than {self.limits.box_cpu_s:g} s of processor time")
            if time.monotonic() > self._ends_at_s:
                self._end(f"it is older than {self.limits.box_wall_s:g} s")

    async def _end_all_for(self, end: End) -> None:
        if self._shell is not None and not self._shell.is_idle:
            self._shell.finish(end, None)  # who waits for it goes on
        else:
            async with self._turn:
                await self._restart_shell(self._shell.folder if self._shell else WORKSPACE)

    def _end(self, why: str) -> None:
        self._why_gone = self._why_gone or why
        self._close()

    def _check_alive(self) -> None:
        if self._why_gone:
            raise RolloutError(f"sandbox: the box has ended, and its files are gone: {self._why_gone}")

    def _close(self) -> None:
        """Hear no more of what runs."""
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        if self._shell is not None:
            self._shell.close()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result({"error": [errno.EINTR, "the box was reset"]})


async def _try_walls(keeper: BoxKeeper, keepers: BoxKeepers) -> None:
    """Try to break out of a first box of this process.

    Raises:
        UserError: something did.
    """
    async with keepers.trying:
        if keepers.is_tried:
            return
        box = Box(keeper, BoxLimits())
        try:
            await box._start(is_new=True)
            await box.write(ATTEMPTS, attempts())
            tries = {"those of programs": f"python3 -I -S - <<'END_OF_IT'{RUNNER}\nEND_OF_IT", **BOX_ESCAPES}
            for name, command in tries.items():
                done = await box.run(command, timeout_s=TRIAL_S)
                if done.is_new_shell or not done.text.endswith("held\n"):
                    raise UserError(
                        f"sandbox: the wall against {name!r} does not hold on this machine "
                        f"({done.end}, {done.text[-200:]!r}); no box is opened here"
                    )
        finally:
            box._close()
        keepers.is_tried = True


def _line_of(command: str) -> bytes:
    line = command.encode(errors="surrogatepass") + b"\n"
    if b"\0" in line or len(line) > MAX_COMMAND_BYTES:
        got = "a zero byte" if b"\0" in line else f"{len(line)} bytes"
        raise ValueError(f"command: got {got}, need at most {MAX_COMMAND_BYTES} bytes, none of them zero")
    return line


def _path_of(path: str) -> str:
    try:
        num_bytes = len(os.fsencode(path))
    except UnicodeEncodeError:  # half a character
        num_bytes = 0
    if not 0 < num_bytes <= MAX_PATH_BYTES or "\0" in path:
        raise ValueError(f"path: got {path[:100]!r}, need 1 to {MAX_PATH_BYTES} bytes of UTF-8, none of them zero")
    return os.path.join(WORKSPACE, path)
