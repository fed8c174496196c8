"""Whether the hosts that a run would have find its broker."""

import functools
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

import anyio.to_thread

from areal_async.config.settings import Settings
from areal_async.doctor.preflight.findings import PreflightFinding, error, good, good_if, of_mistake
from areal_async.errors import UserError
from areal_async.launch.agent import code_digest
from areal_async.launch.backend import Backend
from areal_async.launch.reach import cure_for, is_loopback, place_of, refuse_loopback
from areal_async.launch.run import EMBEDDED
from areal_async.process.host import check_address

CHECK = "hosts"
INSTALL = "have one installation, on a file system that they share"
SHARE = "set run.directory to a file system that they share"
CONNECT_DEADLINE_S = 5
_CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3])).close()
except OSError as exc:
    sys.exit(str(exc))
"""
_SAME = """
import sys
from areal_async.launch.agent import code_digest
sys.exit(0 if code_digest() == sys.argv[1] else "another version of areal_async is there; install this one")
"""
_SEE = """
import pathlib, sys
try:
    is_same = pathlib.Path(sys.argv[1]).read_text() == sys.argv[2]
except OSError as exc:
    sys.exit(str(exc))
sys.exit(0 if is_same else "another file of this name is there")
"""


async def check_hosts(settings: Settings, backend: Backend) -> PreflightFinding:
    """Connect from each other host to where the broker is, or will be: there the embedded one is stood in for."""
    try:
        return await _look(settings, backend)
    except UserError as mistake:
        return of_mistake(CHECK, mistake)


async def _look(settings: Settings, backend: Backend) -> PreflightFinding:
    bus, others = settings.bus, backend.hosts[1:]
    is_ours = bus.url == EMBEDDED
    if is_ours:
        if bus.host is not None:
            check_address(bus.host, setting="bus.host")
        address, wanted_port = bus.host or await backend.address(), bus.port
    else:
        address, wanted_port = place_of(bus.url)
    if not others:
        is_own = await anyio.to_thread.run_sync(is_loopback, address)
        guests = f"nodes of others join at the broker's address {address}"
        if is_own:
            guests = (
                f"nodes of others cannot join, as the broker's address is {address}: set bus.host where some are to"
            )
        return good(CHECK, f"this one alone; {guests}")
    await anyio.to_thread.run_sync(functools.partial(refuse_loopback, address, others, is_ours=is_ours))
    with _listening(address, wanted_port, is_ours=is_ours) as port:
        lost = await backend.cannot_run(_CONNECT, address, str(port), str(CONNECT_DEADLINE_S))
    if lost:
        saw = f"the broker's address {address}:{port} cannot be reached from {_told(lost)}"
        return error(CHECK, saw, cure_for(is_ours=is_ours))
    saw = f"{len(others)} beside this one ({', '.join(others)}), which reach the broker's address {address}"
    return good(CHECK, saw)


async def check_alike(settings: Settings, backend: Backend) -> list[PreflightFinding]:
    """Ask the other hosts for the run directory and for this version of the code, where there are others."""
    if not backend.hosts[1:]:
        return []
    here, words = settings.run.directory, secrets.token_hex(8)
    lost = await backend.cannot_run(_SAME, code_digest())
    alike = good_if(not lost, "code of other hosts", _told(lost) or "this one's", INSTALL, otherwise=error)
    with _seen_in(here, words) as path:
        lost = await backend.cannot_run(_SEE, str(path), words)
    saw = _told(lost) or f"{here} is the same on all"
    return [alike, good_if(not lost, "run directory of other hosts", saw, SHARE, otherwise=error)]


def _told(lost: Mapping[str, str]) -> str:
    return "; ".join(f"{host}: {why}" for host, why in lost.items())


@contextmanager
def _seen_in(directory: Path, words: str) -> Iterator[Path]:
    """Have a file with these words there for a while."""
    directory.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=directory.resolve(), prefix=".seen-") as file:
        file.write(words)
        file.flush()
        yield Path(file.name)


@contextmanager
def _listening(address: str, port: int, *, is_ours: bool) -> Iterator[int]:
    """Have somebody listen where the embedded broker will; another one does so itself."""
    if not is_ours:
        yield port
        return
    try:
        with socket.create_server((address, port)) as listener:
            yield listener.getsockname()[1]
    except OSError as exc:
        raise UserError(f"bus.port: got {port} of {address}: {exc}; choose another, or 0 for a free one") from exc
