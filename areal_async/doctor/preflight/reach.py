"""Whether the hosts that a run would have find its broker."""

import functools
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import anyio.to_thread

from areal_async.config.settings import Settings
from areal_async.doctor.preflight.findings import PreflightFinding, error, good, of_mistake
from areal_async.errors import UserError
from areal_async.launch.backend import Backend
from areal_async.launch.reach import cure_for, is_loopback, place_of, refuse_loopback
from areal_async.launch.run import EMBEDDED
from areal_async.process.host import check_address

CHECK = "hosts"


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
        lost = await backend.cannot_reach(address, port)
    if lost:
        told = "; ".join(f"{host}: {why}" for host, why in lost.items())
        saw = f"the broker's address {address}:{port} cannot be reached from {told}"
        return error(CHECK, saw, cure_for(is_ours=is_ours))
    saw = f"{len(others)} beside this one ({', '.join(others)}), which reach the broker's address {address}"
    return good(CHECK, saw)


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
