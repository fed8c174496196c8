"""``compare``: two versions, models, servers or settings answer the same held-out rows, and how much better one is.

By the code of ``eval``, here, one side after the other: each row as often, drawn by the same seeds. Of a live run its
own nodes do it (``by_nodes``), and its checkpoints stay meanwhile. What has been answered is kept as it comes, so the
same command goes on after whatever has ended it.
"""

import argparse
import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from areal_async.cli.compare.by_nodes import ask_nodes, refuse_what_nodes_cannot
from areal_async.cli.compare.contenders import OF_B, Contender, contenders
from areal_async.cli.compare.progress import Progress, tell_progress
from areal_async.cli.evaluate import Asked, answer_held_out, check_held_out, held_out_of, read_held_out
from areal_async.cli.orders import who
from areal_async.cli.starting.trials import TemporaryFolder
from areal_async.config.settings import TaskSettings
from areal_async.data.rows import RowPrompts
from areal_async.errors import UserError
from areal_async.launch.run_directory import RunDirectory, find_run
from areal_async.monitor.output import check_place
from areal_async.monitor.report import comparison as page
from areal_async.monitor.text import json_text
from areal_async.process.atomic_folders import write_whole
from areal_async.process.plain_text import escaped
from areal_async.process.stdio import say
from areal_async.protocol.types import SlotStatus
from areal_async.rollout.policy.text import TextCodec
from areal_async.rollout.trial import Attempt
from areal_async.versions.comparison import (
    FOLDER,
    PAGE,
    TEXT,
    Answer,
    Comparison,
    ComparisonFolder,
    Which,
    changed_rows,
    opened,
)
from areal_async.versions.comparison_text import markdown, sentences


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Compare, and say what it came to.

    The status is 1 where the interval's low end is below ``--at-least``; without that, where both have answered no row.
    """
    check_arguments(arguments)
    with ExitStack() as stack:
        a, b = contenders(arguments, overrides, stack)
        live = live_run(arguments)
        logs = stack.enter_context(TemporaryFolder("compare"))
        b.check()
        prompts = read_held_out(a.tasks)
        if live is not None:
            given = [word for word in ("--b" * bool(arguments.b), *overrides) if word]
            refuse_what_nodes_cannot(a.settings, prompts, given[0] if given else "")
        rows = {name: own.digest for name, own in prompts.items()}
        comparison = comparison_of(a, b, prompts, rows)
        path = place_of(arguments.output, b, comparison.comparison_id)
        folder = stack.enter_context(opened(path, comparison))
        sides: tuple[tuple[Which, Contender], ...] = (("a", a), ("b", b))
        if not arguments.anew:
            for which, side in sides:
                take_evaluated(folder, which, side, rows)
        if not arguments.json:
            say(f"{path}: {len(folder.answers)} answers are there, {len(folder.left)} are asked for")
        for which, side in sides:
            if live is not None:
                ask_nodes(live, folder, which, side, prompts)
            ask(folder, which, side, prompts, logs=logs)
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
    if arguments.output is not None:
        check_place("--output", Path(arguments.output))
    if arguments.limit is not None and arguments.limit < 1:
        raise UserError(f"--limit: got {arguments.limit}, need at least 1")
    if arguments.at_least is not None and not math.isfinite(arguments.at_least):
        raise UserError(f"--at-least: got {arguments.at_least}, need a number")
    for word in arguments.b:
        if not word.startswith(OF_B) or "=" not in word:
            raise UserError(f"--b: got {word}, need SETTING=VALUE of a setting that begins with {', '.join(OF_B)}")


def live_run(arguments: argparse.Namespace) -> RunDirectory | None:
    """Return the run whose own nodes are to answer; None where servers that run already or are started here do."""
    if arguments.run is None or arguments.here:
        return None
    directory = find_run(arguments.run)
    return directory if directory.is_live else None


def comparison_of(a: Contender, b: Contender, prompts: Mapping[str, RowPrompts], rows: Mapping[str, str]) -> Comparison:
    """Return what is asked, given each task's prompts and the hash of their rows."""
    return Comparison.of(
        a.side,
        b.side,
        num_samples=a.settings.eval.samples,
        rows={name: len(own) for name, own in prompts.items()},
        question={
            "a": a.question,
            "b": b.question,
            "rows": dict(rows),
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


def take_evaluated(folder: ComparisonFolder, which: Which, side: Contender, rows: Mapping[str, str]) -> None:
    """Take over what an evaluation has got to the same questions; what the model said it does not keep."""
    left = set(folder.left)
    found = [one for one in side.evaluated(rows) if (which, one.task, one.row, one.sample) in left]
    for one in found:
        folder.add(Answer(side=which, version=side.side.version, **msgspec.structs.asdict(one)))
    if found:
        tell_progress(f"{side.side.name}: {len(found)} answers are its evaluation's; --anew asks them again")


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
    num_wanted = sum(map(len, wanted.values()))
    if not contender.urls:
        tell_progress(f"{contender.side.name}: a server is started here for {num_wanted} answers")
    progress = Progress(contender.side.name, num_wanted)

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
        progress.note()

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
