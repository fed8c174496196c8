"""``eval``: how right a model's answers to held-out rows are: one greedy one each, or several that are sampled.

Of a model folder, or of a run that is over: here, by the code of a node, as ``try`` does it. Of a run that lives: by
its own nodes, under the weights that its servers hold now; the controller is asked.
"""

import argparse
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec

from areal_async.bus import Bus, Report, ask_service
from areal_async.cli.export import write
from areal_async.cli.orders import ANSWER_DEADLINE_S, who
from areal_async.cli.run import load_run_settings
from areal_async.cli.starting.checks import check_dataset
from areal_async.cli.starting.trials import TemporaryFolder, opened_trial
from areal_async.cli.try_ import MAX_ATTEMPTS, SPARE_STREAMS, check, choose_trial_config, task_of
from areal_async.config.metrics import TO_FILES
from areal_async.config.settings import HeldOut, Settings, TaskSettings
from areal_async.config.sources import load_settings
from areal_async.data.rows import RowPrompts, load_rows
from areal_async.errors import BusError, UnansweredError, UserError
from areal_async.launch.run import visit_live
from areal_async.launch.run_directory import RunDirectory, find_run
from areal_async.monitor.text import json_text
from areal_async.monitor.trial_output import figure
from areal_async.process.host import visible_gpus
from areal_async.process.stdio import say
from areal_async.protocol.evaluations import EvalRecord
from areal_async.protocol.types import Slot, SlotStatus, Version
from areal_async.protocol.wire import decode_json
from areal_async.rollout.policy.text import TextCodec
from areal_async.rollout.trial import Attempt
from areal_async.telemetry import log
from areal_async.telemetry.exporters.traces import recording
from areal_async.versions import evaluated
from areal_async.versions.accuracy import sum_up
from areal_async.versions.resolve import kept
from areal_async.versions.tags import BEST, LAST

POLL_S = 1.0
MAX_REASONS = 3
FOLDERS = {"": "model", BEST: "model_best"}
"""What a finished run has exported already, by what ``--version`` asks for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What a model came to on one task's held-out rows."""

    workflow: str
    model: str
    """A folder, or a live run's weights version."""
    accuracy: float | None
    """Mean reward over the rows that were scored, avg@k of several answers; None where none was scored."""
    low: float | None
    high: float | None
    """Ends of its 95 % interval, where it has one."""
    num_scored: int
    num_failed: int
    """Answers without a reward, rejected ones too."""
    reasons: dict[str, int]
    """Why, and how often."""
    num_samples: int = 1
    """Answers to each row."""
    pass_at: dict[str, float] = field(default_factory=dict)
    """pass@k by k, of several answers."""
    is_graded: bool = False
    """Whether a reward is neither 0 nor 1: ``accuracy`` is a mean reward then, and is called so."""

    @property
    def sentence(self) -> str:
        """The line for people."""
        name, counted = evaluated.kind(asdict(self)), evaluated.answers(asdict(self))
        count = f"{self.num_scored} {counted} scored, {self.num_failed} failed"
        if self.accuracy is None:
            return f"{self.workflow}: no {name}: {count}"
        ends = ""
        if self.low is not None and self.high is not None:
            ends = f" (95 % interval {figure(self.low)} to {figure(self.high)})"
        chances = "".join(f", pass@{size} {figure(chance)}" for size, chance in self.pass_at.items())
        return f"{self.workflow}: {name} {figure(self.accuracy)}{ends}{chances}, {count}"


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Evaluate, and say what it came to; the status is 1 when no row of a task could be scored."""
    check_arguments(arguments)
    if arguments.samples is not None:
        overrides = ["--eval.samples", arguments.samples, *overrides]
    if arguments.run is None:
        results = _of_model(arguments, overrides)
    else:
        directory = find_run(arguments.run)
        if arguments.version is None and directory.is_live:
            results = _of_live_run(directory, arguments, overrides)
        else:
            results = _of_run(directory, arguments, overrides)
    for result in results:
        tell(result, as_json=arguments.json)
    return 0 if all(result.num_scored for result in results) else 1


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse what means nothing.

    Raises:
        UserError: one of them.
    """
    if (arguments.file is None) == (arguments.run is None):
        got = "neither" if arguments.file is None else "both"
        raise UserError(f"eval: got {got} of FILE.py and --run, need one: a workflow for a model, or a run")
    if arguments.run is None and arguments.version is not None:
        raise UserError("--version: got it without --run, need a run that has versions; --model names a folder")
    for name in ("config", "model", "server") if arguments.run is not None else ():
        if getattr(arguments, name):
            raise UserError(f"--{name}: got it with --run, which has its own; leave one of them out")
    if arguments.limit is not None and arguments.limit < 1:
        raise UserError(f"--limit: got {arguments.limit}, need at least 1")
    if arguments.model and arguments.server:
        raise UserError("--model: got --server as well, whose model is its own; set --model.path to its tokenizer's")


def held_out_of(settings: Settings, *, task: TaskSettings | None = None, limit: int | None = None) -> list[HeldOut]:
    """Return the tasks to evaluate, or that one alone, each with its held-out rows and how many of them are taken.

    Raises:
        UserError: there are none.
    """
    wanted = [one for one in settings.held_out if task is None or one[0].name == task.name]
    found = [(one, dataset, limit or rows) for one, dataset, rows in wanted]
    if not found:
        raise UserError(
            "eval.dataset: got none, need held-out rows; give --eval.dataset.path, or .seeds or .environment"
        )
    return found


def tell(result: Result, *, as_json: bool) -> None:
    """Say one result: a sentence and the most frequent reasons of failures, or one JSON object."""
    if as_json:
        say(json_text(asdict(result)))
        return
    say(result.sentence)
    for reason, count in Counter(result.reasons).most_common(MAX_REASONS):
        say(f"  {count} time{'s' if count != 1 else ''}: {reason}")


def result_of(answers: Sequence[tuple[int, Slot]], *, workflow: str, model: str, num_samples: int = 1) -> Result:
    """Return what answers came to, each given with its row's place."""
    told = [(row, slot.reward if slot.status is SlotStatus.SCORED else None, slot.reason) for row, slot in answers]
    return Result(workflow=workflow, model=model, **sum_up(told, num_samples=num_samples))


# here


def _of_model(arguments: argparse.Namespace, overrides: Sequence[str]) -> list[Result]:
    settings = settings_of_file(arguments.file, arguments.config, overrides, model=arguments.model)
    tasks = held_out_of(settings, task=task_of(settings, arguments.file), limit=arguments.limit)
    with TemporaryFolder("eval") as folder:
        return _evaluate(settings, tasks, urls=arguments.server, logs=folder, traced_in=folder)


def settings_of_file(file: str, config: str | None, overrides: Sequence[str], *, model: str | None) -> Settings:
    """Return the settings that a workflow is tried with, of this model where one is given, without a run."""
    if model:
        overrides = [*overrides, "--model.path", model]
    chosen = choose_trial_config(file, config, has_gpu=bool(visible_gpus()))
    return _without_files(load_run_settings(chosen, file, overrides))


def _of_run(directory: RunDirectory, arguments: argparse.Namespace, overrides: Sequence[str]) -> list[Result]:
    settings = load_settings(directory.config, overrides, use_environment=False)
    tasks = held_out_of(settings, limit=arguments.limit)
    with TemporaryFolder("eval") as folder, chosen_model(directory, settings, arguments.version or "") as model:
        if not arguments.json:
            say(f"{model.name} is evaluated")
        named = model.written(settings, folder)
        results = _evaluate(named, tasks, urls=(), logs=folder, traced_in=directory.path)
    return [replace(result, model=model.name) for result in results]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenModel:
    """A model of a run."""

    directory: Path
    version: str
    """Empty where no checkpoint tells it."""
    exported: Path | None
    """Its folder, where the run has exported it; None for what a checkpoint has."""

    @property
    def label(self) -> str:
        """What it is called in its run: ``1-20``, or ``model`` where no checkpoint tells."""
        return self.version or (self.exported or self.directory).name

    @property
    def name(self) -> str:
        """What it is called: ``gsm8k/1-20``."""
        return f"{self.directory.name}/{self.label}"

    def written(self, settings: Settings, folder: Path) -> Settings:
        """Return settings with this model, which is written into the folder where the run has not exported it."""
        path = self.exported or folder / self.version
        if not path.exists():
            write(self.directory, settings, Version.parse(self.version), path)
        return settings.model_copy(update={"model": settings.model.model_copy(update={"path": str(path)})})


@contextmanager
def chosen_model(
    directory: RunDirectory, settings: Settings, wanted: str, *, option: str = "--version"
) -> Iterator[ChosenModel]:
    """Give the model of a run that is meant; a checkpoint that it is read from is kept while the block lasts.

    Args:
        option: what names it, for what is refused.

    Raises:
        UserError: it is not there, or nothing tells which is the best.
    """
    exported = directory.path / FOLDERS[wanted] if wanted in FOLDERS else None
    if exported is not None and exported.is_dir():
        version = directory.exported_version(exported.name)
        yield ChosenModel(directory=directory.path, version=version, exported=exported)
        return
    with kept(directory.path, settings, wanted or LAST, option=option) as found:
        yield ChosenModel(directory=directory.path, version=str(found), exported=None)


def _evaluate(
    settings: Settings, tasks: Sequence[HeldOut], *, urls: Sequence[str], logs: Path, traced_in: Path
) -> list[Result]:
    check_held_out(settings, tasks, urls=urls)
    prompts, num_samples = read_held_out(tasks), settings.eval.samples
    wanted = {
        name: [(place, sample) for place in range(len(own)) for sample in range(num_samples)]
        for name, own in prompts.items()
    }
    asked = [Asked(task, prompts[task.name], wanted[task.name]) for task, _, _ in tasks]
    answers: dict[str, list[tuple[int, Slot]]] = {task.name: [] for task, _, _ in tasks}

    def take(task: TaskSettings, attempt: Attempt, _: TextCodec) -> None:
        answers[task.name].append((attempt.prompt.index, attempt.trajectory.slot))

    answer_held_out(settings, asked, take, urls=urls, logs=logs, traced_in=traced_in)
    model = ", ".join(urls) or settings.model.path
    return [
        result_of(told, workflow=workflow, model=model, num_samples=num_samples) for workflow, told in answers.items()
    ]


class Asked(NamedTuple):
    """Answers to a task's held-out rows that are to be given."""

    task: TaskSettings
    prompts: RowPrompts
    wanted: Sequence[tuple[int, int]]
    """Place of the row, and which of the answers to it."""


def check_held_out(settings: Settings, tasks: Sequence[HeldOut], *, urls: Sequence[str]) -> None:
    """Refuse what can be seen to be wrong before rows are read.

    Raises:
        UserError: a workflow, its rows, the model or the server's interpreter is not there.
    """
    for task, dataset, _ in tasks:
        check(settings, task, has_row=True, has_server=bool(urls))
        check_dataset(dataset, "eval.dataset")


def read_held_out(tasks: Sequence[HeldOut]) -> dict[str, RowPrompts]:
    """Return the rows of each task, as far as they are taken.

    Raises:
        UserError: they cannot be read.
    """
    loaded = [(task.name, load_rows(dataset, shows_progress=False), limit) for task, dataset, limit in tasks]
    return {name: RowPrompts(rows, range(min(limit, len(rows)))) for name, rows, limit in loaded}


def answer_held_out(
    settings: Settings,
    asked: Sequence[Asked],
    on_attempt: Callable[[TaskSettings, Attempt, TextCodec], None],
    *,
    urls: Sequence[str],
    logs: Path,
    traced_in: Path,
    seed: int | None = None,
) -> None:
    """Have rows answered, one task after the other; ``on_attempt`` takes each answer as it ends.

    Args:
        urls: servers that run already, none for one that is started here; ``logs`` and ``seed`` as for
            ``opened_trial``.
        traced_in: where traces are written that go to files.
    """

    async def answer(one: Asked) -> None:
        eval_id = f"{Path(settings.model.path).name}.{secrets.token_hex(4)}"  # another one in every one's traces
        async with opened_trial(
            settings,
            one.task,
            urls=urls,
            logs=logs,
            max_streams=min(len(one.wanted), MAX_ATTEMPTS) + SPARE_STREAMS,
            tell=_warn,
            eval_id=eval_id,
            seed=seed,
        ) as (trial, codec):
            await trial.answer(one.prompts, one.wanted, lambda attempt: on_attempt(one.task, attempt, codec))

    async def run() -> None:
        for one in asked:
            await answer(one)

    with recording(settings, traced_in, role="eval"):
        anyio.run(run, backend_options={"use_uvloop": True})


def _without_files(settings: Settings) -> Settings:
    """Leave out traces in files, which lie in a run's directory: there is no run."""
    if settings.metrics.traces != TO_FILES:
        return settings
    _warn("metrics.traces: got file without a run, which has the directory for them; nothing is traced")
    return settings.model_copy(update={"metrics": settings.metrics.model_copy(update={"traces": None})})


def _warn(text: str) -> None:
    sys.stderr.write(f"{text}\n")


# there


def _of_live_run(directory: RunDirectory, arguments: argparse.Namespace, overrides: Sequence[str]) -> list[Result]:
    """Have the run's own nodes evaluate what its servers hold.

    Raises:
        UserError: rows or settings of one's own, the run has no held-out rows, or its controller is away.
    """
    if overrides or arguments.limit is not None:
        given = "--limit" if arguments.limit is not None else "--samples" if arguments.samples else overrides[0]
        raise UserError(
            f"{given}: got it for a live run, which evaluates by its own settings; name a --version as well"
        )
    log.quieten()
    return anyio.run(ask_live, directory, backend_options={"use_uvloop": True})


async def ask_live(directory: RunDirectory) -> list[Result]:
    """Return what a live run's evaluation came to; ask on while its controller is started again.

    Raises:
        UserError: the run does not live, or ends meanwhile; its controller refuses, or stays away for
            ``bus.operation_deadline_s``.
    """
    async with visit_live(directory) as (settings, bus):
        subject, body = bus.names.control("eval"), {"by": who()}
        while True:
            answer = await _answer(directory, bus, subject, body, patience_s=settings.bus.operation_deadline_s)
            told = msgspec.json.encode(answer.get("records", []))
            if records := decode_json(told, list[EvalRecord], what=f"answer of {subject}"):
                shared = [one.name for one in fields(Result) if one.name != "model"]
                return [Result(model=one.eval_id, **{name: getattr(one, name) for name in shared}) for one in records]
            body["version"] = str(answer.get("version", ""))
            await anyio.sleep(POLL_S)


async def _answer(directory: RunDirectory, bus: Bus, subject: str, body: Report, *, patience_s: float) -> Report:
    ends_at = anyio.current_time() + patience_s
    while True:
        try:
            return await ask_service(bus, subject, body, deadline_s=ANSWER_DEADLINE_S)
        except (UnansweredError, BusError) as exc:
            if not directory.is_live:
                run = bus.names.run
                raise UserError(
                    f"run {run}: has ended before it was evaluated; the same command tries its model"
                ) from exc
            if anyio.current_time() > ends_at:
                raise
        await anyio.sleep(POLL_S)
