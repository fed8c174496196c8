"""``doctor`` before a run: what the run will meet here, each with its cure.

Every check reads or asks what the run itself will read or ask; none writes, and none loads a weight.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial

import anyio.to_thread

from areal_async.config.settings import Settings
from areal_async.doctor.preflight.broker import check_broker
from areal_async.doctor.preflight.exports import check_traces, check_trackers
from areal_async.doctor.preflight.findings import Level, PreflightFinding, here, in_thread, of_mistake
from areal_async.doctor.preflight.harbor import check_harbor
from areal_async.doctor.preflight.host import check_clock, check_disk, check_limits, check_ports, check_processes
from areal_async.doctor.preflight.inputs import check_data, check_models, check_template, check_workflows
from areal_async.doctor.preflight.lengths import check_lengths
from areal_async.doctor.preflight.machine import Machine, look_at_machine
from areal_async.doctor.preflight.memory import check_memory
from areal_async.doctor.preflight.reach import check_alike, check_hosts
from areal_async.doctor.preflight.sharing import CHECK, check_sharing
from areal_async.doctor.preflight.software import check_compiler, check_server_program, check_versions
from areal_async.doctor.preflight.walls import check_walls
from areal_async.errors import UserError
from areal_async.launch.backends import make_backend

__all__ = ["PreflightFinding", "Level", "look_ahead"]


async def look_ahead(settings: Settings) -> AsyncIterator[PreflightFinding]:
    """Yield what is found, in the order in which a run would meet it."""
    machine = look_at_machine()
    looks: list[Callable[[], Awaitable[Iterable[PreflightFinding]]]] = [
        partial(here, "versions", check_versions, settings),
        partial(in_thread, "compiler", check_compiler, settings),
        partial(in_thread, "inference", check_server_program, settings),
        partial(check_broker, settings),
        partial(here, "tracker", check_trackers, settings),
        partial(in_thread, "traces", check_traces, settings),
        partial(here, "ports", check_ports, settings),
        partial(_check_places, settings, machine),
        partial(here, "workflow", check_workflows, settings),
        partial(check_walls, settings),
        partial(check_harbor, settings),
        partial(in_thread, "data", check_data, settings),
    ]
    for look in looks:
        for finding in await look():
            yield finding
    models, sizes = await anyio.to_thread.run_sync(check_models, settings)
    for finding in models:
        yield finding
    looks = [
        partial(here, "disk", check_disk, settings, sizes),
        partial(here, "limits", check_limits, settings, machine),
        partial(here, "clock", check_clock, machine),
    ]
    if "actor" in sizes:
        looks = [
            partial(here, "chat template", check_template, settings),
            partial(check_lengths, settings, model_context=sizes["actor"].context),
            partial(here, "memory", check_memory, settings, machine, sizes),
            partial(here, CHECK, check_sharing, settings, machine.gpus, sizes),
            *looks,
        ]
    for look in looks:
        for finding in await look():
            yield finding


async def _check_places(settings: Settings, machine: Machine) -> list[PreflightFinding]:
    """Look at the hosts that processes would have, and at their share of the GPUs."""
    try:
        backend = await anyio.to_thread.run_sync(make_backend, settings.launch)
    except UserError as mistake:
        return [of_mistake("hosts", mistake)]
    shares = await in_thread("GPUs", check_processes, settings, machine, backend)
    async with backend.running():
        return [await check_hosts(settings, backend), *await check_alike(settings, backend), *shares]
