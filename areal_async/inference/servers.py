"""One server process: started on a port we pick, watched until it is healthy, ended with all it started.

Invariant: it never outlives this process, a start that fails says why in the server's own words, and whoever else
listens at its port is not taken for it.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.abc
import structlog

from areal_async.errors import UserError
from areal_async.inference.commands import ServerCommand
from areal_async.inference.faults import RefusalFault, ServerFault
from areal_async.inference.http import ServerApi
from areal_async.process.children import end_session, open_child
from areal_async.process.host import free_port
from areal_async.process.parent_death import guarded
from areal_async.process.plain_text import escaped, read_tail

MAX_PORT_TRIES = 5
HEALTH_DEADLINE_S = 20.0
POLL_S = 0.1
STOP_DEADLINE_S = 5.0
MAX_TAIL_BYTES = 8192
MAX_TAIL_LINES = 5
MAX_NAME = 100
"""Characters of a stranger's name that are repeated."""

log = structlog.get_logger()


class _StrangerError(Exception):
    """Somebody else's server answers where ours was to."""


class ServerProcess:
    """A process that runs a ``ServerCommand``; may be started again once it was stopped."""

    def __init__(self, command: ServerCommand, *, log_path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the clock by which it is waited for, in seconds."""
        self._clock = clock
        self.command = command
        self.log_path = log_path
        self._log_start = 0
        self._process: anyio.abc.Process | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def last_words(self) -> str:
        """The last lines that it wrote: an error message of ours is one, SGLang ends with the noise of its children."""
        text = read_tail(self.log_path, start_bytes=self._log_start, max_bytes=MAX_TAIL_BYTES)
        lines = [escaped(stripped) for line in text.splitlines() if (stripped := line.strip())]
        if not lines:
            return "it wrote nothing"
        if lines[-1].startswith("error: "):
            return lines[-1].removeprefix("error: ")
        return " | ".join(lines[-MAX_TAIL_LINES:])

    async def start(self, api: ServerApi, *, silence_s: float, bound_s: float) -> None:
        """Start it and return when it is healthy; ``api`` is pointed at it.

        Args:
            silence_s: for how long its log may stay as it is. One that compiles or downloads takes long, and says so.
            bound_s: for how long it may take in all.

        Raises:
            ServerFault: it was killed by a signal: somebody else's doing.
            UserError: it ended by itself, or was not healthy in time; with its last words.
        """
        name, place, taken = f"inference server {self.command.id}", f"its log is {self.log_path}", ""
        for _ in range(MAX_PORT_TRIES):
            await self._spawn()
            api.url, api.admin_key = self.url, ""  # no secret for whoever may be there
            try:
                late = await self._becomes_healthy(api, silence_s=silence_s, bound_s=bound_s)
            except _StrangerError as exc:
                log.warning("server.not_ours", server_id=self.command.id, reason=str(exc))
                taken = str(exc)
                continue
            if late:
                cause = f"{late}, its last words: {self.last_words}"
                raise UserError(f"{name}: {cause}; {place}; raise inference.start_deadline_s if it is only slow")
            if self._returncode is None:
                api.admin_key = self.command.admin_key
                log.info("server.started", server_id=self.command.id, url=self.url, pid=self._pid)
                return
            if "address already in use" in self.last_words.lower():
                taken = self.last_words
                continue
            if self._returncode < 0:
                raise ServerFault(f"killed by signal {-self._returncode} while starting: {self.last_words}")
            cause = f"ended with status {self._returncode} while starting: {self.last_words}"
            raise UserError(f"{name}: {cause}; {place}")
        raise UserError(f"{name}: no free port in {MAX_PORT_TRIES} tries: {taken}")

    async def wait_ended(self) -> str:
        """Wait until it ends by itself, and return what to say about it."""
        assert self._process is not None
        status = await self._process.wait()
        if status == -signal.SIGKILL:  # from outside, or for want of memory: what it wrote last is no cause
            return "ended by SIGKILL"
        return f"ended with status {status}: {self.last_words}"

    async def stop(self) -> None:
        """End it, gently first, with everything it started."""
        if self._process is not None:
            await end_session(self._process, grace_s=STOP_DEADLINE_S)
            self._process = None

    @property
    def _pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def _returncode(self) -> int | None:
        return self._process.returncode if self._process else None

    async def _spawn(self) -> None:
        await self.stop()
        self.port = free_port(setting="inference server")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log_file:
            self._log_start = log_file.tell()
            self._process = await open_child(
                guarded(self.command.on_port(self.port)),
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **self.command.environment},
            )

    async def _becomes_healthy(self, api: ServerApi, *, silence_s: float, bound_s: float) -> str:
        """Wait until it is healthy or has ended; return why it is waited for no longer, where it is neither.

        Raises:
            _StrangerError: it is another server that is healthy there.
        """
        started = last_sign = self._clock()
        size_bytes = self._log_bytes
        while self._returncode is None and not await self._is_there(api, min(HEALTH_DEADLINE_S, silence_s)):
            now = self._clock()
            if self._log_bytes != size_bytes:
                size_bytes, last_sign = self._log_bytes, now
            if now - last_sign > silence_s:
                return f"not healthy, and without a sign of life in its log for {silence_s:g} s"
            if now - started > bound_s:
                return f"not healthy within {bound_s:g} s"
            await anyio.sleep(POLL_S)
        return ""

    async def _is_there(self, api: ServerApi, deadline_s: float) -> bool:
        """Say whether it is healthy. Who answers at its port before it does may be anybody."""
        if not await api.is_healthy(deadline_s=deadline_s):
            return False
        if not self.command.name:
            return True
        try:
            served = await api.served_name(deadline_s=deadline_s)
        except RefusalFault:
            served = ""
        except ServerFault:  # ask again
            return False
        if served != self.command.name:
            says = (
                f"it says that it serves {escaped(served)[:MAX_NAME]!r}" if served else "it does not say what it serves"
            )
            raise _StrangerError(f"a server that is not ours answers at port {self.port}: {says}")
        return True

    @property
    def _log_bytes(self) -> int:
        try:
            return self.log_path.stat().st_size
        except OSError:  # removed under it
            return 0
