"""``run``: choose the settings, check what is cheap to check, then launch and show the run until it ends.

Nothing is started, and nothing of an earlier run is removed, before all checks have passed.
"""

import argparse
import functools
import re
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import anyio

from areal_async.algorithms.graphs import step_graph
from areal_async.bus import Bus
from areal_async.bus.server import ROOM_BYTES
from areal_async.cli.export import write_best
from areal_async.cli.orders import who
from areal_async.cli.starting.checks import (
    check_dataset,
    check_file,
    check_groups,
    check_model,
    check_node,
    check_template,
)
from areal_async.cli.starting.resuming import Chosen, Request, resume
from areal_async.config.paths import is_same_function
from areal_async.config.settings import RunSettings, Settings
from areal_async.config.sources import Sources, load_settings, read_sources, resolve
from areal_async.config.tasks import workflow_name
from areal_async.environments.names import environment_name
from areal_async.errors import PipelineError, UserError, leaves_of
from areal_async.inference.card_share import CardShare
from areal_async.launch.backend import Backend
from areal_async.launch.backends import make_backend
from areal_async.launch.interpreters import check_interpreters
from areal_async.launch.plan import plan_groups
from areal_async.launch.reach import place_of, refuse_loopback
from areal_async.launch.run import EMBEDDED, hold, launch
from areal_async.launch.run_directory import FirstStart, RunDirectory
from areal_async.launch.starts import Start
from areal_async.launch.supervisor import RunEnd
from areal_async.monitor.boards import BoardWriter
from areal_async.monitor.display import choose_display
from areal_async.monitor.report.summary import summarise
from areal_async.monitor.view import RunView
from areal_async.process.host import check_address, visible_gpus
from areal_async.process.interpreter import SHIPPED
from areal_async.process.stdio import say
from areal_async.protocol.subjects import RUN_NAME
from areal_async.telemetry import log
from areal_async.telemetry.exporters.traces import with_key
from areal_async.user_files import parts_of

CONFIGS = Path("configs")
KILLED_STATUS = 130
MAX_NAME = 48
"""Characters of a run's name."""
NOTHING = (
    "run: got neither a workflow nor settings; name FILE.py or an environment, --config FILE.yaml, or both, or the run "
    "that is to go on"
)


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run one experiment to its end, to the user's interruption, or to its failure."""
    gpus = visible_gpus()
    chosen = choose(arguments, overrides, has_gpu=bool(gpus))
    settings, directory = chosen.settings, chosen.directory
    say(f"settings: {chosen.origin}, {len(gpus)} GPUs found; run {settings.run.name} in {directory.path}")
    for notice in chosen.notices:
        say(notice)
    check(settings)
    backend = make_backend(settings.launch)
    # Refuses what this host cannot hold, before anything is removed.
    plan_groups(settings, directory, gpus=backend.gpus, hosts=backend.workers)
    if backend.workers == backend.hosts:
        check_interpreters(settings, gpus, num_hosts=len(backend.hosts))
    check_hosts(settings, backend)
    share = share_of_run(settings)
    with ExitStack() as stack:
        anyio.run(functools.partial(hold, stack, directory, settings.run.name, is_visit=False))
        if chosen.start.is_fresh:
            directory.clear()
        is_first = not directory.exists
        first = stack.enter_context(directory.first_start()) if is_first else None
        settings = with_key(settings, None if is_first else directory.read_settings)
        if is_first:
            directory.write_settings(settings)  # of an earlier start: when its record has allowed for the new ones
        log.configure("launcher", directory.logs)
        chosen = replace(chosen, settings=settings)
        return _run_locked(chosen, backend, first, share, is_plain=arguments.no_display)


def choose(arguments: argparse.Namespace, overrides: Sequence[str], *, has_gpu: bool) -> Chosen:
    """Return what the command asks for: a run that was started before goes on with what it recorded.

    In the place of a workflow its name will do.

    Raises:
        UserError: the settings are wrong, or are none that the run can go on with.
    """
    request, run = requested(arguments.file, arguments.config, overrides, has_gpu=has_gpu)
    directory = RunDirectory(run.directory / run.name)
    if directory.exists and not arguments.fresh:
        return resume(directory, run, request, by=who())
    if arguments.file is not None and request.workflow is None and not arguments.fresh:
        raise UserError(
            f"run: got {arguments.file}, need the name of a run that was started in {run.directory}, "
            "or a workflow FILE.py"
        )
    config = choose_config(arguments.file, arguments.config, has_gpu=has_gpu)
    return Chosen(
        settings=load_run_settings(config, arguments.file, overrides),
        directory=directory,
        start=Start(by=who(), is_fresh=arguments.fresh, said=request.said),
        origin=str(config),
    )


def requested(
    file: str | None, config: str | None, overrides: Sequence[str], *, has_gpu: bool
) -> tuple[Request, RunSettings]:
    """Return what a command asks for, and the name and directory of the run that is meant.

    Args:
        file: the workflow, or the name of a run.
        config: the settings file, where one is named.

    Raises:
        UserError: the settings are wrong, or name no run.
    """
    words = list(overrides)
    if file is not None and RUN_NAME.fullmatch(file) and not Path(file).is_file():
        words = ["--run.name", file, *overrides]
        file = None
    found = find_config(file, config, has_gpu=has_gpu)
    sources = read_sources(found, words)
    request = Request(sources=sources, config=found, is_config_named=config is not None, workflow=file)
    return request, find_place(sources, file)


def _run_locked(
    chosen: Chosen, backend: Backend, first: FirstStart | None, share: CardShare | None, *, is_plain: bool
) -> int:
    settings, directory = chosen.settings, chosen.directory
    display, boards = choose_display(RunView(settings), is_plain=is_plain), BoardWriter(settings)

    async def watch(bus: Bus) -> None:
        async with anyio.create_task_group() as watching:
            watching.start_soon(boards.run)
            await display.watch(bus)

    name = settings.run.name
    start, notify = chosen.start, display.notify
    run_to_end = functools.partial(
        launch, settings, directory, backend=backend, start=start, notify=notify, watch=watch, first=first, share=share
    )
    try:
        end = anyio.run(run_to_end, backend_options={"use_uvloop": True})
    except (PipelineError, OSError, ExceptionGroup) as exc:
        want = want_of_room(exc, name, directory.path)
        if want is None:
            raise
        raise want from exc
    finally:
        boards.close()
    if first is not None and not first.has_begun:
        say(f"run {name} {end.value} before it admitted a prompt: nothing of it is kept")
        return KILLED_STATUS if end is RunEnd.KILLED else 0
    match end:
        case RunEnd.ALREADY_FINISHED:
            if not (settings.run_directory / "model_best").exists():
                write_best(settings)  # killed before it came to that
            say(
                f"run {name} is finished already, after step {directory.checkpointed_step}; more --run.steps go on "
                "from there, --fresh starts it anew, another --run.name starts another"
            )
        case RunEnd.STOPPED | RunEnd.KILLED:
            say(f"run {name} {end.value}; the same command resumes it, or --run.name {name} alone")
        case RunEnd.FINISHED:
            say(f"run {name} finished")
            write_best(settings)
    for line in summarise(settings):
        say(line)
    return KILLED_STATUS if end is RunEnd.KILLED else 0


def want_of_room(raised: Exception, name: str, path: Path) -> PipelineError | None:
    """Return what to say of a run that failed on a full disk, whatever failed first; None where there is room."""
    free_bytes = shutil.disk_usage(path).free
    leaves = leaves_of(raised)
    is_known = any(isinstance(leaf, UserError) or not isinstance(leaf, PipelineError | OSError) for leaf in leaves)
    if free_bytes >= ROOM_BYTES or is_known:
        return None
    return PipelineError(
        f"run {name}: no space left on the disk of {path}: got {free_bytes / 1e6:.0f} MB free, need "
        f"{ROOM_BYTES / 1e6:.0f}; make room, then the same command resumes it (what failed first: {leaves[0]})"
    )


def find_config(file: str | None, config: str | None, *, has_gpu: bool) -> Path | None:
    """Return the settings file that is named, else the workflow's for this kind of machine where there is one."""
    if config is not None:
        return Path(config)
    default = default_config(file, has_gpu=has_gpu) if file is not None else None
    return default if default is not None and default.is_file() else None


def default_config(file: str, *, has_gpu: bool) -> Path:
    """Return where the settings of a workflow would be for this kind of machine; of an environment those that ship
    where there are none for it or for any.
    """
    ending = ".yaml" if has_gpu else "_cpu.yaml"
    if environment_name(file) is None:
        return CONFIGS / f"{parts_of(file)[0].stem}{ending}"
    own, any_own = CONFIGS / f"{workflow_name(file).lower()}{ending}", CONFIGS / f"environment{ending}"
    return next((one for one in (own, any_own) if one.is_file()), SHIPPED / any_own)


def find_place(sources: Sources, file: str | None) -> RunSettings:
    """Return ``run`` of what is asked for: by its name and directory an earlier start of it is found.

    Raises:
        UserError: it has no name, and no workflow that it could be called by; or a wrong one.
    """
    named = resolve({}, [one for one in sources.all if one.parts[0] == "run"], Settings)
    if "name" in named.run.model_fields_set:
        return named.run
    if file is None and not any(one.parts[0] == "tasks" for one in sources.all):
        raise UserError(NOTHING)
    settings = resolve({}, [one for one in sources.all if one.parts[0] in ("run", "tasks")], Settings)
    return named_after_workflow(settings, file).run


def named_after_workflow(settings: Settings, file: str | None) -> Settings:
    """Return the settings of a run that is called by its workflow, where nothing else names it."""
    if "name" in settings.run.model_fields_set or not (file or settings.tasks):
        return settings
    workflow = file or settings.tasks[0].workflow
    name = re.sub(r"[^a-z0-9_-]", "_", workflow_name(workflow).lower())[:MAX_NAME]
    return settings.model_copy(update={"run": settings.run.model_copy(update={"name": name})})


def choose_config(file: str | None, config: str | None, *, has_gpu: bool) -> Path:
    """Return the settings file: the one named, else the workflow's for this kind of machine.

    Raises:
        UserError: there is no telling which, or it or the workflow is not there.
    """
    if config is not None:
        return Path(config)
    if file is None:
        raise UserError(NOTHING)
    check_file(file)
    wanted = default_config(file, has_gpu=has_gpu)
    if not wanted.is_file():
        name, kind = workflow_name(file.partition(":")[0]), "a GPU" if has_gpu else "no GPU"
        # Its imports are looked for in the working directory too: settings alone would not be enough.
        project = next((one for one in parts_of(file)[0].resolve().parents[:2] if (one / wanted).is_file()), None)
        remedy = f"it is in {project}: give the command there" if project else "name --config FILE.yaml"
        raise UserError(f"--config: no file {wanted}, the settings of {name} where {kind} is found; {remedy}")
    return wanted


def load_run_settings(config: Path, file: str | None, overrides: Sequence[str]) -> Settings:
    """Read the settings, with the workflow that the command line names, after which the run is called by default.

    Raises:
        UserError: the settings are wrong, have no task, or have several of which none is this workflow.
    """
    is_environment = file is not None and environment_name(file) is not None
    if is_environment and not any(one.parts[0] == "tasks" for one in read_sources(config, ()).all):
        overrides = ["--tasks.0.workflow", str(file), *overrides]  # what these say of the task is said of this one
    settings = load_settings(config, overrides)
    if file is not None and not any(is_same_function(task.workflow, file) for task in settings.tasks):
        # The rows of another workflow's task, and those held out, are not an environment's.
        if len(settings.tasks) > 1 or (settings.tasks and is_environment):
            names = ", ".join(task.workflow for task in settings.tasks)
            raise UserError(
                f"workflow: got {file}, but {config} has the tasks {names}; leave the workflow out, or take one"
            )
        settings = load_settings(config, ["--tasks.0.workflow", file, *overrides])
    if not settings.tasks:
        raise UserError(f"tasks: got none, need at least one; set tasks in {config}")
    return named_after_workflow(settings, file)


def check(settings: Settings) -> None:
    """Refuse what can be seen to be wrong before much is fetched; much is imported only where a template is given.

    Raises:
        UserError: a workflow, a data set, a policy, a model, its tokenizer or template, the servers' interpreter or
            parser is not there, or the calls of a step do not fit together, an extra that is asked for is not
            installed, or the broker's address or that of its metrics is not this host's.
    """
    loads_here = settings.launch.backend == "local"
    check_node(settings, asks_hub=loads_here)
    for index, task in enumerate(settings.tasks):
        check_dataset(settings.dataset_of(task), f"tasks.{index}.dataset", asks_hub=loads_here)
    for task, dataset, _ in settings.held_out:
        own = f"tasks.{settings.tasks.index(task)}." if task.eval.dataset is not None else ""
        check_dataset(dataset, f"{own}eval.dataset", asks_hub=loads_here)
    for role, path in (("critic", settings.model.critic.path), ("reference", settings.model.reference.path)):
        if path is not None:
            check_model(path, f"model.{role}.path", asks_hub=loads_here)
    step_graph(settings)
    try:
        settings.check_trained_sampling()
    except ValueError as exc:
        raise UserError(str(exc)) from exc
    check_groups(settings)
    check_template(settings)
    if settings.bus.url == EMBEDDED and settings.bus.host:
        check_address(settings.bus.host, setting="bus.host")
    if settings.endpoint.host and settings.launch.backend == "local":  # else the hosts with nodes look for themselves
        check_address(settings.endpoint.host, setting="endpoint.host")


def share_of_run(settings: Settings) -> CardShare | None:
    """Return what a server may take of a GPU that the trainer has too; None where each side has its own.

    Raises:
        UserError: both do not fit.
    """
    if settings.inference.colocate is None:
        return None
    # Imported here: it takes seconds.
    from areal_async.doctor.preflight import sharing

    return sharing.share_of_run(settings)


def check_hosts(settings: Settings, backend: Backend) -> None:
    """Refuse a broker's address, where the settings say one, that the backend's other hosts would look for at home.

    Raises:
        UserError: it is the loopback, and there are others.
    """
    bus, others = settings.bus, backend.hosts[1:]
    if bus.url != EMBEDDED:
        refuse_loopback(place_of(bus.url)[0], others, is_ours=False)
    elif bus.host:
        refuse_loopback(bus.host, others, is_ours=True)
