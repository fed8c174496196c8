"""The two sides of a comparison: what each answers with, and what its answers depend on."""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_async.cli.evaluate import ChosenModel, check_held_out, chosen_model, held_out_of, settings_of_file
from areal_async.cli.try_ import task_of
from areal_async.config.settings import HeldOut, Settings
from areal_async.config.sources import load_settings
from areal_async.errors import UserError
from areal_async.launch.run_directory import find_run
from areal_async.protocol.types import Version
from areal_async.rollout.user_code.source_hashes import code_of_tasks, source_hashes
from areal_async.versions import evaluations
from areal_async.versions.comparison import Side

OF_B = ("rollout.", "model.", "inference.", "policies.", "tasks.")
"""Beginnings of the settings that the second side may have otherwise: what decides how it answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """One side, and what it answers with."""

    side: Side
    settings: Settings
    tasks: Sequence[HeldOut]
    model: ChosenModel | None = None
    """Of a run; None for that of ``settings``."""

    @property
    def urls(self) -> list[str]:
        """The server that runs already; none for one that is started here."""
        return [self.side.server] if self.side.server else []

    def written(self, folder: Path) -> Settings:
        """Return the settings with the model, written into the folder where it is a checkpoint."""
        return self.settings if self.model is None else self.model.written(self.settings, folder)

    def check(self) -> None:
        """Refuse what can be seen to be wrong before the other side answers; a run's checkpoint is there.

        Raises:
            UserError: as for ``check_held_out``.
        """
        if self.model is None:
            check_held_out(self.settings, self.tasks, urls=self.urls)

    def evaluated(self, rows: Mapping[str, str]) -> list[evaluations.Answer]:
        """Return the answers that its run's evaluation has got to the very same questions.

        Args:
            rows: hash of each task's held-out rows.

        Raises:
            UserError: they are kept, and were damaged.
        """
        if self.model is None or not self.model.version:
            return []
        directory, version = self.model.directory, Version.parse(self.model.version)
        code = source_hashes(code_of_tasks(self.settings))
        return [
            answer
            for name, digest in rows.items()
            for answer in evaluations.read_asked(
                directory, version, name, evaluations.asked_of(self.settings, name, rows=digest, code=code)
            )
        ]

    @property
    def question(self) -> dict[str, Any]:
        """What its answers depend on, beside the rows; of two sides this differs."""
        settings, side = self.settings, self.side
        folder = self.model.exported if self.model is not None else Path(side.model)
        tasks = [task for task, _, _ in self.tasks]
        return {
            "from": [side.run, side.version, side.model, side.server, _files_in(folder)],
            "sampling": {task.name: settings.eval_sampling_of(task.name).model_dump() for task, _, _ in self.tasks},
            **evaluations.question_of(settings),
            "workflows": [[task.workflow for task in tasks], source_hashes(code_of_tasks(settings, tasks))],
        }


def contenders(
    arguments: argparse.Namespace, overrides: Sequence[str], stack: ExitStack
) -> tuple[Contender, Contender]:
    """Return both sides, whose checkpoints are kept while the stack lasts.

    Raises:
        UserError: one is not there, they are one and the same, or would answer other rows.
    """
    if arguments.samples is not None:
        overrides = ["--eval.samples", arguments.samples, *overrides]
    words = list(overrides), [*overrides, *(f"--{word}" for word in arguments.b)]
    a, b = (
        _of_file(arguments, own, place) if arguments.file else _of_run(arguments, own, place, stack)
        for place, own in enumerate(words)
    )
    if _rows_of(a) != _rows_of(b):
        raise UserError("--b: got other tasks or rows for the second side, need the same for both; leave them out")
    if a.question == b.question:
        remedy = "name two, or give --b SETTING=VALUE, which the second has otherwise"
        if a.settings.eval.samples == 1:
            remedy += "; a temperature counts from --samples 2 on"
        raise UserError(f"compare: got {b.side.name} and the same again, need two that answer otherwise; {remedy}")
    return a, b


def _of_file(arguments: argparse.Namespace, words: Sequence[str], place: int) -> Contender:
    model, server = (pair(f"--{name}", getattr(arguments, name))[place] for name in ("models", "servers"))
    settings = settings_of_file(arguments.file, arguments.config, words, model=model)
    tasks = held_out_of(settings, task=task_of(settings, arguments.file), limit=arguments.limit)
    given = given_to(place, arguments)
    name = named(server or model or settings.model.path, given)
    side = Side(name=name, model=settings.model.path, server=server, settings=given)
    return Contender(side=side, settings=settings, tasks=tasks)


def _of_run(arguments: argparse.Namespace, words: Sequence[str], place: int, stack: ExitStack) -> Contender:
    directories = [find_run(name) for name in pair("--runs", arguments.runs or arguments.run)]
    first = load_settings(directories[0].config, words, use_environment=False)
    own = load_settings(directories[place].config, words, use_environment=False)
    # Everything but the model is the first run's: the rows, and how they are answered and scored.
    rollout = first.rollout.model_copy(update={"template": own.rollout.template})
    settings = first.model_copy(update={"model": own.model, "trainer": own.trainer, "rollout": rollout})
    wanted = pair("--versions", arguments.versions)[place]
    model = stack.enter_context(chosen_model(directories[place], settings, wanted, option="--versions"))
    given = given_to(place, arguments)
    name = named(model.name if arguments.runs else model.label, given)
    side = Side(name=name, run=model.directory.name, version=model.version, settings=given)
    tasks = held_out_of(settings, limit=arguments.limit)
    return Contender(side=side, settings=settings, tasks=tasks, model=model)


def pair(option: str, text: str | None) -> tuple[str, str]:
    """Return what is given for both sides: ``A,B``, or one for both; nothing for each where nothing is.

    Raises:
        UserError: more than two.
    """
    first, comma, second = (text or "").partition(",")
    if "," in second or (comma and not (first and second)):
        raise UserError(f"{option}: got {text}, need two with a comma between, or one that both sides have")
    return first, second if comma else first


def given_to(place: int, arguments: argparse.Namespace) -> dict[str, str]:
    """Return what a side has otherwise than the other: the first has nothing."""
    return {name: value for name, _, value in (word.partition("=") for word in arguments.b * place)}


def named(name: str, given: Mapping[str, str]) -> str:
    """Return what a side is called."""
    return " ".join([name, *(f"{setting}={value}" for setting, value in given.items())])


def _rows_of(one: Contender) -> Any:
    return one.settings.eval.samples, [(task.name, dataset, limit) for task, dataset, limit in one.tasks]


def _files_in(folder: Path | None) -> Any:
    """Return what tells a model's folder from what is put there later."""
    if folder is None or not folder.is_dir():
        return None
    states = {file.name: file.stat() for file in folder.iterdir() if file.is_file()}
    return {name: [state.st_size, state.st_mtime_ns] for name, state in states.items()}
