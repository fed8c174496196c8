"""Looking into the store of a run that nobody runs, without changing a byte of it.

A broker mends, compacts and rewrites what it opens. So it is given a copy, in a directory that goes away again;
while that is made the run is held, shared with other readers, against a launcher or a broker that would write.
A damaged store can keep a broker from ever coming up (2.15.1 counts through the gap to a garbled sequence number):
a stream on which it hangs is tried without its index, which has the broker verify every record, then left out. So is
one that it gives up: a power cut may leave its metadata empty. What is left out is absent, and what it held is lost.
"""

import functools
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import anyio.to_thread
import structlog

from areal_async.bus.server import EmbeddedBroker, stale_broker_pid
from areal_async.config.settings import Settings
from areal_async.errors import BusError, UserError
from areal_async.process.file_locks import try_lock

OTHERS_S = 10.0
"""Time for others to look into a run that is stopped; each starts its broker for a second or two."""
POLL_S = 0.1
MARGIN_BYTES = 512 << 20
"""Disk that is left beside the copy, for the broker's own needs."""


log = structlog.get_logger()


class HeldError(UserError):
    """Another process holds the run."""


class VisitedError(HeldError):
    """Another process looks into the run, and will soon have."""


class StoreCopy(NamedTuple):
    """A broker that serves a copy; its credentials are its own."""

    broker: EmbeddedBroker
    notes: list[str]
    """Repairs of the copy that the broker needed before it came up, a sentence each."""


@asynccontextmanager
async def copied_broker(settings: Settings, run_directory: Path) -> AsyncIterator[StoreCopy]:
    """Serve a copy of a dead run's store.

    Raises:
        HeldError: the run is not dead, or others look into it for longer than ``OTHERS_S``.
        UserError: there is no store, or no room for a copy.
        BusError: the broker does not come up even without the streams on which it hangs.
    """
    with TemporaryDirectory(prefix="areal-doctor-") as folder:
        copy = settings.model_copy(
            update={
                "run": settings.run.model_copy(update={"directory": Path(folder)}),
                "bus": settings.bus.model_copy(update={"url": "embedded", "port": 0, "http_port": 0}),
            }
        )
        places = run_directory / "bus", copy.run_directory / "bus"
        await after_others(functools.partial(anyio.to_thread.run_sync, _copy_store, *places))
        served = await _serve(copy)
        async with aclosing(served.broker):
            yield served


async def _serve(copy: Settings) -> StoreCopy:
    notes: list[str] = []
    without_index: set[Path] = set()
    while True:
        broker = EmbeddedBroker(copy)
        try:
            await broker.start()
        except BusError as exc:
            unrecoverable, hung = _damaged_streams(copy.run_directory)
            log.info("copy.not_served", unrecoverable=len(unrecoverable), hung=len(hung), error=str(exc))
            if not unrecoverable and not hung:
                raise
            for stream in unrecoverable:
                notes.append(f"stream {stream.name}: the broker cannot recover its files; left out")
                shutil.rmtree(stream)
            for stream in hung:
                remedy = "left out" if stream in without_index else "read without its index"
                notes.append(f"stream {stream.name}: the broker hangs on its files; {remedy}")
                if stream in without_index:
                    shutil.rmtree(stream)
                else:
                    (stream / "msgs" / "index.db").unlink(missing_ok=True)
                    without_index.add(stream)
        else:
            return StoreCopy(broker, notes)


def _damaged_streams(run_directory: Path) -> tuple[list[Path], list[Path]]:
    """Return the folders of the streams that the broker gave up, and of those it began to restore and did not end.

    By its last log, which is removed: the next start begins its own.
    """
    log_path = run_directory / "logs" / "nats.log"
    text = log_path.read_text(errors="replace")
    log_path.unlink()
    given_up = set(re.findall(r"stream '\S+ > (\S+)' could not be recovered", text))
    begun = set(re.findall(r"Starting restore for stream '\S+ > (\S+)'", text))
    restored = set(re.findall(r"Restored [\d,]+ messages for stream '\S+ > (\S+)'", text))
    folders = sorted((run_directory / "bus" / "jetstream").rglob("streams/*"))
    return (
        [folder for folder in folders if folder.name in given_up],
        [folder for folder in folders if folder.name in begun - restored - given_up],
    )


async def after_others(attempt: Callable[[], Awaitable[None]]) -> None:
    """Try until nobody else looks into a run.

    Raises:
        VisitedError: others do for longer than ``OTHERS_S``.
    """
    ends_at_s = anyio.current_time() + OTHERS_S
    while True:
        try:
            return await attempt()
        except VisitedError:
            if anyio.current_time() > ends_at_s:
                raise
        await anyio.sleep(POLL_S)


def _copy_store(bus: Path, to: Path) -> None:
    with ExitStack() as held:
        try:
            held.enter_context(shared_lock(bus.parent / "run.lock"))
        except HeldError as exc:
            raise exc if is_locked(bus.parent / "launcher.lock") else VisitedError(str(exc)) from exc
        held.enter_context(shared_lock(bus / "lock"))
        pid = stale_broker_pid(bus)
        if pid is not None:
            raise HeldError(f"store {bus}: broker {pid} has outlived its launcher; end it, or start the run again")
        store = bus / "jetstream"
        if not store.is_dir():
            raise UserError(f"store {store}: there is none; the run was never started, or its broker is elsewhere")
        to.mkdir(parents=True)
        num_bytes = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
        free = shutil.disk_usage(to).free - MARGIN_BYTES
        if num_bytes > free:
            raise UserError(
                f"copy of {store}: got {max(0, free) >> 20} MB at {to.anchor}, need {num_bytes >> 20} MB; "
                "set TMPDIR to a larger disk"
            )
        shutil.copytree(store, to / "jetstream")


def is_locked(path: Path) -> bool:
    """Say whether a process holds a lock file for itself."""
    try:
        with shared_lock(path):
            return False
    except HeldError:
        return True


@contextmanager
def shared_lock(path: Path) -> Iterator[None]:
    """Hold a lock file that writers lock for themselves; nothing to hold where there is none.

    Raises:
        HeldError: a writer has it.
    """
    if not path.exists():
        yield
        return
    with path.open() as lock:
        if not try_lock(lock, is_shared=True):
            raise HeldError(f"{path}: held by process {lock.read().strip() or 'unknown'}")
        yield
