"""The entry of a node process."""

from pathlib import Path

import anyio

from areal_async.bus import Role, open_run_bus
from areal_async.config.settings import Settings
from areal_async.process import stacks
from areal_async.rollout.node import run_node, run_signals
from areal_async.telemetry.exporters.traces import recording
from areal_async.telemetry.log import configure


def run(settings: Settings, *, run_directory: Path, bus_url: str, node_id: str) -> None:
    """Run one node until SIGTERM or SIGINT has drained it.

    Raises:
        PipelineError: what ended it otherwise; possibly inside an ExceptionGroup.
    """
    configure(f"node-{node_id}", run_directory / "logs")
    stacks.install(stacks.path_for(run_directory, f"node-{node_id}"))
    with recording(settings, run_directory, role="node", instance=node_id):
        anyio.run(_run, settings, run_directory, bus_url, node_id, backend_options={"use_uvloop": True})


async def _run(settings: Settings, run_directory: Path, bus_url: str, node_id: str) -> None:
    draining = anyio.Event()
    async with (
        open_run_bus(settings, run_directory, bus_url, Role.NODE, instance=node_id) as bus,
        anyio.create_task_group() as tasks,
    ):

        async def end_at_second_signal() -> None:
            await run_signals(draining)
            tasks.cancel_scope.cancel()

        tasks.start_soon(end_at_second_signal)
        await run_node(settings, bus, node_id=node_id, run_directory=run_directory, draining=draining)
        tasks.cancel_scope.cancel()
