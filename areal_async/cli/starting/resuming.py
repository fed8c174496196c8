"""``run`` with the name of a run that was started before: the settings that it recorded, with what is said beside it.

The command line, and what the environment says otherwise than at the start before, are taken; so is a settings file
other than the one it was started with, where one is named. An edited one is not: what it says otherwise is told.
"""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areal_async.config.kept import why_kept
from areal_async.config.paths import is_same_function
from areal_async.config.resumed import differences, refuse_kept
from areal_async.config.settings import RunSettings, Settings
from areal_async.config.sources import Assignment, Sources, absolute, resolve
from areal_async.environments.names import is_moved
from areal_async.errors import UserError
from areal_async.launch.run_directory import RunDirectory, SettingsSources
from areal_async.launch.starts import Start

PLACE = ("run.name", "run.directory")
"""By these a run is found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a command asks for."""

    sources: Sources
    config: Path | None
    """The settings file, in ``sources``."""
    is_config_named: bool
    """Whether the command names the file; else it is the one that goes with the workflow."""
    workflow: str | None
    """``FILE.py``, with a name perhaps."""

    @property
    def said(self) -> SettingsSources:
        """What its sources say, to be told from what they will say next time."""
        return SettingsSources(
            config=str(self.config.absolute()) if self.config is not None else "",
            file={one.name: absolute(one, Settings).value for one in self.sources.file},
            environment={one.name: one.value for one in self.sources.environment},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """A run that is to be started, or to go on."""

    settings: Settings
    directory: RunDirectory
    start: Start
    origin: str
    """Source of the settings, for people."""
    notices: tuple[str, ...] = ()
    """What the settings file says now that the run keeps as it was."""


def resume(directory: RunDirectory, run: RunSettings, request: Request, *, by: str) -> Chosen:
    """Return a recorded run with what is said otherwise.

    Args:
        run: by which it was found.
        by: name of who starts it.

    Raises:
        UserError: what is said cannot be read, or is something that the run keeps.
    """
    recorded, before, said = directory.read_settings(), directory.read_said(), request.said
    is_same_file = before is None or before.config == said.config or before.file == said.file
    is_other_file = request.is_config_named and not is_same_file
    chosen = [
        *(request.sources.file if is_other_file else ()),
        *_news(request.sources.environment, before.environment if before is not None else {}),
        *_other_workflow(recorded, request.workflow),
        *request.sources.command_line,
    ]
    data = recorded.model_dump(mode="json")
    settings = _at(run, resolve(data, chosen, Settings))
    refuse_kept(recorded, settings)
    named = frozenset(leaf.name for one in chosen for leaf in one.split())
    notices: tuple[str, ...] = ()
    if is_same_file and request.config is not None:
        known = {leaf.name: leaf.value for leaf in _leaves(before)} if before is not None else {}
        edited = [leaf for leaf in _news(_leaves(said), known) if leaf.name not in {*named, *PLACE}]
        notices = tuple(_notices(settings, edited, request.config))
    kept = before if before is not None and not is_other_file else said
    return Chosen(
        settings=settings,
        directory=directory,
        start=Start(by=by, named=named, said=replace(kept, environment=said.environment)),
        origin=f"those that the run recorded, {directory.config}",
        notices=notices,
    )


def _at(run: RunSettings, settings: Settings) -> Settings:
    """Return the settings with the run's directory as it was found."""
    return settings.model_copy(update={"run": settings.run.model_copy(update={"directory": run.directory})})


def _news(assignments: Sequence[Assignment], before: dict[str, Any]) -> list[Assignment]:
    """Return what a source says now and did not say before."""
    return [one for one in assignments if one.name not in before or before[one.name] != one.value]


def _leaves(said: SettingsSources) -> list[Assignment]:
    """Return what the settings file gives to each single setting."""
    sections = [
        Assignment(parts=(name,), value=value, rank=1, origin=f"in {said.config}") for name, value in said.file.items()
    ]
    return [leaf for section in sections for leaf in section.split()]


def _other_workflow(recorded: Settings, workflow: str | None) -> Iterator[Assignment]:
    """Yield the workflow that a command names, where the run has it not; an environment's folder may have moved."""
    if workflow is None or any(is_same_function(task.workflow, workflow) for task in recorded.tasks):
        return
    index = next((place for place, task in enumerate(recorded.tasks) if is_moved(task.workflow, workflow)), 0)
    task, names = recorded.tasks[index], ["workflow"]
    if task.dataset.environment == task.workflow and is_moved(task.workflow, workflow):
        names.append("dataset.environment")
    for name in names:
        parts = ("tasks", str(index), *name.split("."))
        yield Assignment(parts=parts, value=workflow, rank=3, origin="on the command line")


def _notices(settings: Settings, edited: Sequence[Assignment], config: Path) -> Iterator[str]:
    """Say what a file would make otherwise of a run that goes on with these settings."""
    if not edited:
        return
    name = settings.run.name
    try:
        wanted = resolve(settings.model_dump(mode="json"), edited, Settings)
    except UserError as exc:
        yield f"run {name} goes on with what it recorded; {config} has been changed, and does not go with that: {exc}"
        return
    for one in differences(settings, wanted):
        remedy = why_kept(one.name) or f"--{one.name} {_as_word(one.after)} applies it"
        yield f"run {name} keeps {one.name} {one.before!r}, though {config} says {one.after!r} now: {remedy}"


def _as_word(value: Any) -> str:
    """Return a value as the shell is given it."""
    return shlex.quote(value if isinstance(value, str) else json.dumps(value))
