"""``compare``: two versions, models, servers or settings answer the same held-out rows, and how much better one is.

By the code of ``eval``, here, one side after the other: each row as often, drawn by the same seeds. What has been
answered is kept as it comes, so the same command goes on after whatever has ended it. Of a live run the versions are
read from its checkpoints, which it keeps meanwhile.
"""

import argparse
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from areal_async.cli.evaluate import (
    Asked,
    ChosenModel,
    answer_held_out,
    check_held_out,
    chosen_model,
    held_out_of,
    read_held_out,
    settings_of_file,
)
from areal_async.cli.orders import who
from areal_async.cli.starting.trials import TemporaryFolder
from areal_async.cli.try_ import task_of
from areal_async.config.settings import HeldOut, Settings, TaskSettings
from areal_async.config.sources import load_settings
from areal_async.data.rows import RowPrompts
from areal_async.errors import UserError
from areal_async.launch.run_directory import find_run
from areal_async.monitor.output import check_place
from areal_async.monitor.report import comparison as page
from areal_async.monitor.text import json_text
from areal_async.process.atomic_folders import write_whole
from areal_async.process.plain_text import escaped
from areal_async.process.stdio import say
from areal_async.protocol.types import SlotStatus
from areal_async.rollout.policy.text import TextCodec
from areal_async.rollout.trial import Attempt
from areal_async.rollout.user_code.source_hashes import source_hashes
from areal_async.versions.comparison import (
    FOLDER,
    PAGE,
    TEXT,
    Answer,
    Comparison,
    ComparisonFolder,
    Side,
    Which,
    changed_rows,
    opened,
)
from areal_async.versions.comparison_text import markdown, sentences

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

    @property
    def question(self) -> dict[str, Any]:
        """What its answers depend on, beside the rows; of two sides this differs."""
        settings, side = self.settings, self.side
        folder = self.model.exported if self.model is not None else Path(side.model)
        specs = [task.workflow for task, _, _ in self.tasks]
        return {
            "from": [side.run, side.version, side.model, side.server, _files_in(folder)],
            "model": settings.model.model_dump(mode="json", exclude={"path"}),
            "sampling": {task.name: settings.eval_sampling_of(task.name).model_dump() for task, _, _ in self.tasks},
            "template": settings.rollout.template.model_dump(mode="json"),
            "policies": {name: policy.model_dump(mode="json") for name, policy in settings.policies.items()},
            "flags": settings.inference.flags,
            "workflows": [specs, source_hashes(specs)],
        }


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Compare, and say what it came to.

    The status is 1 where the interval's low end is below ``--at-least``; without that, where both have answered no row.
    """
    check_arguments(arguments)
    with ExitStack() as stack:
        a, b = contenders(arguments, overrides, stack)
        logs = stack.enter_context(TemporaryFolder("compare"))
        b.check()
        prompts = read_held_out(a.tasks)
        comparison = comparison_of(a, b, prompts)
        path = place_of(arguments.output, b, comparison.comparison_id)
        folder = stack.enter_context(opened(path, comparison))
        if not arguments.json:
            say(f"{path}: {len(folder.answers)} answers are there, {len(folder.left)} are asked for")
        ask(folder, "a", a, prompts, logs=logs)
        ask(folder, "b", b, prompts, logs=logs)
        folder.finish()
        write_pages(folder, prompts)
    return tell(folder, at_least=arguments.at_least, as_json=arguments.json)


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse what means nothing.

    Raises:
        UserError: one of them.
    """
    forms = {"FILE.py": arguments.file, "--run": arguments.run, "--runs": arguments.runs}
    given = [name for name, value in forms.items() if value is not None]
    if len(given) != 1:
        raise UserError(
            f"compare: got {' and '.join(given) or 'none'} of {', '.join(forms)}, need one: a workflow for models or "
            "servers, a run for its versions, or two runs"
        )
    for name in ("config", "models", "servers") if arguments.file is None else ("versions",):
        if getattr(arguments, name) is not None:
            raise UserError(f"--{name}: got it with {given[0]}, which has its own; leave one of them out")
    if arguments.models is not None and arguments.servers is not None:
        raise UserError("--models: got --servers as well, whose models are their own; leave one of them out")
    if arguments.limit is not None and arguments.limit < 1:
        raise UserError(f"--limit: got {arguments.limit}, need at least 1")
    if arguments.at_least is not None and not math.isfinite(arguments.at_least):
        raise UserError(f"--at-least: got {arguments.at_least}, need a number")
    for word in arguments.b:
        if not word.startswith(OF_B) or "=" not in word:
            raise UserError(f"--b: got {word}, need SETTING=VALUE of a setting that begins with {', '.join(OF_B)}")


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


def comparison_of(a: Contender, b: Contender, prompts: Mapping[str, RowPrompts]) -> Comparison:
    """Return what is asked."""
    return Comparison.of(
        a.side,
        b.side,
        num_samples=a.settings.eval.samples,
        rows={name: len(own) for name, own in prompts.items()},
        question={
            "a": a.question,
            "b": b.question,
            "rows": {name: own.digest for name, own in prompts.items()},
            "seed": a.settings.run.seed,
        },
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        by=who(),
    )


def place_of(output: str | None, b: Contender, comparison_id: str) -> Path:
    """Return the folder of the comparison: the second side's run keeps it, where it is a run's."""
    if output is not None:
        path = Path(output)
    else:
        path = (b.model.directory if b.model is not None else b.settings.run.directory) / FOLDER / comparison_id
    check_place("--output", path)
    return path


def ask(
    folder: ComparisonFolder, which: Which, contender: Contender, prompts: Mapping[str, RowPrompts], *, logs: Path
) -> None:
    """Have one side answer what it has not answered yet."""
    wanted: dict[str, list[tuple[int, int]]] = {}
    for side, task, row, sample in folder.left:
        if side == which:
            wanted.setdefault(task, []).append((row, sample))
    if not wanted:
        return

    def take(task: TaskSettings, attempt: Attempt, codec: TextCodec) -> None:
        slot = attempt.trajectory.slot
        folder.add(
            Answer(
                side=which,
                task=task.name,
                row=attempt.prompt.index,
                sample=slot.sibling,
                reward=slot.reward if slot.status is SlotStatus.SCORED else None,
                error=slot.reason,
                num_tokens=slot.num_output_tokens,
                text="\n\n".join(codec.decode(timed.turn.output_ids) for timed in attempt.turns),
                version=contender.side.version or slot.newest,
            )
        )

    with tempfile.TemporaryDirectory(dir=logs) as place:
        settings = contender.written(Path(place))
        tasks = [one for one in held_out_of(settings) if one[0].name in wanted]
        check_held_out(settings, tasks, urls=contender.urls)
        asked = [Asked(task, prompts[task.name], wanted[task.name]) for task, _, _ in tasks]
        traced_in = contender.model.directory if contender.model is not None else logs
        seed = contender.settings.run.seed
        answer_held_out(settings, asked, take, urls=contender.urls, logs=logs, traced_in=traced_in, seed=seed)


def write_pages(folder: ComparisonFolder, prompts: Mapping[str, RowPrompts]) -> None:
    """Leave the result for people: as Markdown, and as HTML."""
    changed = changed_rows(folder.answers)
    rows = {(one.task, one.row): text_of(prompts[one.task][one.row].row) for one in changed[: page.MAX_ROWS]}
    write_whole(folder.path / TEXT, escaped(markdown(folder.comparison, changed, rows)).encode())
    write_whole(folder.path / PAGE, page.render(folder.comparison, changed, rows).encode())


def text_of(row: Mapping[str, Any]) -> str:
    """Return a row as people read it, a column a line."""
    encoder = msgspec.json.Encoder(enc_hook=lambda value: f"<{type(value).__name__}>")
    return "\n".join(
        f"{name}: {value if isinstance(value, str) else encoder.encode(value).decode()}" for name, value in row.items()
    )


def tell(folder: ComparisonFolder, *, at_least: float | None, as_json: bool) -> int:
    """Say the result and return the exit status."""
    comparison = folder.comparison
    overall = comparison.overall
    assert overall is not None
    is_accepted = None if at_least is None else overall.low is not None and overall.low >= at_least
    if as_json:
        told = {"path": str(folder.path), "is_accepted": is_accepted, **msgspec.to_builtins(comparison)}
        say(json_text(told))
    else:
        for line in sentences(comparison):
            say(line)
        say(f"both answers to the rows that differ: {folder.path / PAGE}")
        if at_least is not None:
            low = "none" if overall.low is None else f"{overall.low:+.3f}"
            verdict = "accepted" if is_accepted else "rejected"
            say(f"{verdict}: {comparison.b.name}, low end {low}, at least {at_least:g} is asked for")
    return 0 if (bool(overall.num_rows) if is_accepted is None else is_accepted) else 1
