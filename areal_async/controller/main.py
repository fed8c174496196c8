"""The controller's process."""

import functools
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import msgspec
import structlog

from areal_async.bus import Bus, Role, open_run_bus
from areal_async.config.settings import Settings
from areal_async.controller.accounts import Accounts
from areal_async.controller.controller import Controller
from areal_async.controller.evaluation import Evaluator
from areal_async.controller.row_images import RowImages
from areal_async.controller.tasks import Tasks
from areal_async.data.images import row_at, take_row
from areal_async.data.recorded_rows import Used, digest_of, refuse_other_rows
from areal_async.data.rows import load_rows
from areal_async.errors import BusError, ConflictError, DeniedError, FencedError, PipelineError, UserError, leaves_of
from areal_async.process import stacks
from areal_async.process.hub import fetch
from areal_async.process.signals import run_until_told
from areal_async.protocol.run_state import RunState, ServerState
from areal_async.protocol.subjects import RUN_STATE
from areal_async.telemetry import log as logging
from areal_async.telemetry import wait_graph
from areal_async.telemetry.exporters.prometheus import exporting
from areal_async.telemetry.exporters.traces import recording
from areal_async.versions.evaluations import asked_of
from areal_async.versions.registry import read_code
from areal_async.vision.spec import VisionSpec

NOBODY, NO_REVISION = "nobody", 1 << 62
"""A server and a revision of its key that there will never be."""

log = structlog.get_logger()


def run(settings: Settings, *, run_directory: Path, bus_url: str) -> None:
    """Control the run until its last version is evaluated, or an error."""
    logging.configure("controller", run_directory / "logs")
    stacks.install(stacks.path_for(run_directory, "controller"))
    if not settings.tasks:
        raise UserError("tasks: got none, need at least one workflow with its data set; name a workflow file")
    trained, held_out = _rows_of(settings)
    tasks = Tasks([(task.name, one.rows) for task, one in zip(settings.tasks, trained, strict=True)])
    _check_sendable(settings, trained)
    refuse_other_rows(run_directory / "rows.json", [*trained, *held_out], run=settings.run.name)
    code = read_code(run_directory)
    asked = {
        task.name: asked_of(settings, task.name, rows=digest_of(one.rows), code=code)
        for (task, *_), one in zip(settings.held_out, held_out, strict=True)
    }
    evaluated = [(task.name, one.rows) for (task, *_), one in zip(settings.held_out, held_out, strict=True)]
    seen = Tasks(evaluated)
    vision = vision_of(settings.model.path) if tasks.names_with_images or seen.names_with_images else None
    main = functools.partial(_run, settings, run_directory, bus_url, tasks, seen, asked, vision)
    with recording(settings, run_directory, role="controller"):
        is_told_to_end = anyio.run(run_until_told, main, signal.SIGTERM, backend_options={"use_uvloop": True})
    if is_told_to_end:  # by the signal itself: status 0 would say that the run has finished
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)


def vision_of(model: str) -> VisionSpec | None:
    """Return how a model sees, ``None`` where it does not, by its small files: the weights need not be on this host.

    Raises:
        UserError: these are not to be had, or contradict each other.
    """
    folder = Path(model)
    return VisionSpec.read(folder if folder.is_dir() else fetch("model", model, files=("*.json",)))


def _rows_of(settings: Settings) -> tuple[list[Used], list[Used]]:
    """Return each task's rows, and those that are held out."""
    trained = [
        Used(f"tasks.{number}.dataset", dataset, load_rows(dataset))
        for number, dataset in enumerate(map(settings.dataset_of, settings.tasks))
    ]
    held_out = []
    for task, dataset, limit in settings.held_out:
        setting = f"tasks.{settings.tasks.index(task)}.eval.dataset" if task.eval.dataset else "eval.dataset"
        rows = load_rows(dataset)
        held_out.append(Used(setting, dataset, rows.select(range(min(limit, len(rows)))), limit))
    return trained, held_out


def _check_sendable(settings: Settings, trained: Sequence[Used]) -> None:
    """Refuse rows that cannot travel as JSON, before the first ticket; there must be one of each task."""
    for task, one in zip(settings.tasks, trained, strict=True):
        try:
            msgspec.json.encode(take_row(row_at(one.rows, 0), None, model="", index=0)[0])
        except TypeError as exc:
            raise UserError(
                f"dataset of {task.name}: got a row that is no JSON ({exc}), need text, numbers, lists and mappings; "
                "leave the other columns out"
            ) from exc


async def _run(
    settings: Settings,
    run_directory: Path,
    bus_url: str,
    tasks: Tasks,
    held_out: Tasks,
    asked: Mapping[str, str],
    vision: VisionSpec | None,
) -> None:
    async with open_run_bus(settings, run_directory, bus_url, Role.CONTROLLER) as bus:
        await check_permissions(bus)
        evaluator = (
            Evaluator(
                bus,
                held_out,
                file=run_directory / "eval.jsonl",
                num_samples=settings.eval.samples,
                rows=RowImages(bus, held_out, settings, vision, waiter=wait_graph.CONTROLLER),
                asked=asked,
            )
            if len(held_out)
            else None
        )
        accounts = Accounts(max_groups_in_flight=settings.rollout.max_groups_in_flight)
        controller = Controller(bus, settings, tasks, evaluator, accounts=accounts, vision=vision)
        try:
            async with exporting(settings, run_directory, role="controller", report=controller.report):
                await controller.run()
        except* PipelineError as group:
            await _record_failure(bus, group)
            raise


async def check_permissions(bus: Bus) -> None:
    """Refuse a broker at which the servers of a lost node could not be disowned: all would wait for them without end.

    The write that tries it is one that cannot succeed where it is allowed.

    Raises:
        UserError: it is such a broker.
    """
    nobody = ServerState(server_id=NOBODY, node_id=NOBODY, url="", version="", fenced=True)
    try:
        await bus.compare_and_set(bus.names.server_key(NOBODY), nobody, NO_REVISION)
    except ConflictError:
        return
    except DeniedError as exc:
        raise UserError(
            f"bus: {exc}, need it to take back the servers of a node that is lost; give the broker's users the "
            "permissions of this version"
        ) from exc


async def _record_failure(bus: Bus, group: ExceptionGroup[PipelineError]) -> None:
    cause = leaves_of(group)[0]
    if isinstance(cause, (FencedError, BusError)):
        return  # another process goes on with the run, or this one when it is started again
    await bus.put(RUN_STATE, RunState(state="failed", reason=str(cause)))
