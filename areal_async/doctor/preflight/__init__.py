"""``doctor`` before a run: what the run will meet here, each with its cure.

Every check reads or asks what the run itself will read or ask; none writes, and none loads a weight.
"""

from collections.abc import AsyncIterator

import anyio.to_thread

from areal_async.config.settings import Settings
from areal_async.doctor.preflight.broker import check_broker
from areal_async.doctor.preflight.exports import check_traces, check_trackers
from areal_async.doctor.preflight.findings import Level, PreflightFinding, guarded, of_mistake
from areal_async.doctor.preflight.host import check_clock, check_disk, check_limits, check_ports, check_processes
from areal_async.doctor.preflight.inputs import check_data, check_models, check_template, check_workflows
from areal_async.doctor.preflight.lengths import check_lengths
from areal_async.doctor.preflight.machine import look_at_machine
from areal_async.doctor.preflight.memory import check_memory
from areal_async.doctor.preflight.reach import check_hosts
from areal_async.doctor.preflight.software import check_server_program, check_versions
from areal_async.errors import UserError
from areal_async.launch.backends import BACKENDS

__all__ = ["PreflightFinding", "Level", "look_ahead"]


async def look_ahead(settings: Settings) -> AsyncIterator[PreflightFinding]:
    """Yield what is found, in the order in which a run would meet it."""
    machine = look_at_machine()
    for finding in guarded("versions", lambda: check_versions(settings)):
        yield finding
    for finding in await anyio.to_thread.run_sync(lambda: guarded("inference", lambda: check_server_program(settings))):
        yield finding
    for finding in await check_broker(settings):
        yield finding
    for finding in guarded("tracker", lambda: check_trackers(settings)):
        yield finding
    for finding in await anyio.to_thread.run_sync(lambda: guarded("traces", lambda: check_traces(settings))):
        yield finding
    for finding in guarded("ports", lambda: check_ports(settings)):
        yield finding
    try:
        backend = await anyio.to_thread.run_sync(BACKENDS[settings.launch.backend])
    except UserError as mistake:
        yield of_mistake("hosts", mistake)
    else:
        yield await check_hosts(settings, backend)
        for finding in guarded("GPUs", lambda: check_processes(settings, machine, backend.hosts)):
            yield finding
    for finding in guarded("workflow", lambda: check_workflows(settings)):
        yield finding
    for finding in await anyio.to_thread.run_sync(lambda: list(check_data(settings))):
        yield finding
    models, sizes = await anyio.to_thread.run_sync(lambda: check_models(settings))
    for finding in models:
        yield finding
    if "actor" in sizes:
        for finding in guarded("chat template", lambda: check_template(settings)):
            yield finding
        for finding in await check_lengths(settings, model_context=sizes["actor"].context):
            yield finding
        for finding in guarded("memory", lambda: check_memory(settings, machine, sizes)):
            yield finding
    for finding in guarded("disk", lambda: check_disk(settings, sizes)):
        yield finding
    for finding in guarded("limits", lambda: check_limits(settings, machine)):
        yield finding
    for finding in guarded("clock", lambda: check_clock(machine)):
        yield finding
