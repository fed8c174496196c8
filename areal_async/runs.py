"""Training and evaluating from Python: a script or a notebook has the same command run that people type.

Each call starts ``python -m areal_async run`` (or ``eval``) and follows it to its end: no event loop of the caller's is
used or needed, and whatever the run does to its processes, its signals and its memory is not done to the caller's. What
the command would say of a mistake is raised.

Invariant: when a call returns or raises, the command has ended; where the caller is killed, it is told to end in order.
"""

import importlib
import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

import msgspec

from areal_async.api import Workflow
from areal_async.errors import PipelineError, UserError
from areal_async.process.interpreter import module_command
from areal_async.process.parent_death import guarded
from areal_async.user_files import is_importing, stop_importing

__all__ = ["Run", "Scores", "evaluate", "train"]

ENDED = "areal_async.cli.projects.ended"
"""Imported at its use, unseen: a type checker of a user's would read ten times as much, torch included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run that is over, as its directory has it."""

    name: str
    path: Path
    """Its directory, absolute."""
    status: str
    """``finished``, or ``stopped`` before its last step: the same call goes on from there."""
    metrics: list[dict[str, Any]]
    """A row for each training step, first to last: those of ``metrics.jsonl``."""
    model: Path | None
    """Folder of the trained model, as Hugging Face has it; None where there is none yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """What a model came to on one task's held-out rows."""

    workflow: str
    model: str
    """A folder, a run's version, or a live run's weights."""
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
    num_samples: int
    """Answers to each row."""
    pass_at: dict[str, float]
    """pass@k by k, of several answers."""
    is_graded: bool
    """Whether a reward is neither 0 nor 1: ``accuracy`` is a mean reward then."""


def train(
    workflow: Workflow | str | os.PathLike[str] | None = None,
    *,
    config: str | os.PathLike[str] | None = None,
    fresh: bool = False,
    quiet: bool = False,
    **settings: object,
) -> Run:
    """Train a model with a workflow, as ``areal-async run`` does, and wait for the end.

    A run of that name that was stopped goes on. Ctrl-C, or a notebook's interrupt, ends the run in order after its
    step, with a checkpoint, and is raised then; a second one kills it.

    Args:
        workflow: a coroutine function at the top level of a file, ``"FILE.py"`` or ``"FILE.py:name"``, or the name of a
            run that is to go on; None for the settings' own. Processes of the run import the file: of a script it is
            executed up to the call of ``train``.
        config: file of settings; None takes ``configs/<stem>.yaml``, or ``configs/<stem>_cpu.yaml`` without a GPU.
        fresh: remove what a run of this name left, and start anew.
        quiet: print nothing of what the run says.
        settings: a section each: ``run={"steps": 20}, trainer={"lr": 1e-5}``.

    Raises:
        UserError: a mistake that the caller can mend.
        PipelineError: the run has failed.
        KeyboardInterrupt: as above.
    """
    if is_importing():
        stop_importing()
    words = list(_words(settings))
    named = None if config is None else os.fspath(config)
    file = _spec(workflow)
    known = importlib.import_module(ENDED)
    directory = known.directory_of(file, named, words)
    command = ["run", *([] if file is None else [file]), *([] if named is None else ["--config", named])]
    _follow([*command, *(["--fresh"] if fresh else []), "--no-display", *words], None if quiet else _print)
    return Run(**known.ended(directory))


def evaluate(
    workflow: Workflow | str | os.PathLike[str] | None = None,
    *,
    run: Run | str | os.PathLike[str] | None = None,
    version: str | None = None,
    model: str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    samples: int | None = None,
    **settings: object,
) -> list[Scores]:
    """Return how right answers to held-out rows are, a score for each task, as ``areal-async eval`` does.

    Args:
        workflow: as for ``train``; or else ``run``.
        run: a run, by its name or directory, or what ``train`` returned; its own tasks are evaluated.
        version: with ``run``, of its checkpoints: ``1-20``, a step, ``best``, ``last`` or a tag.
        model: folder or hub name of a model; None takes the settings'.
        config: as for ``train``.
        limit: so many rows only, from the first.
        samples: so many sampled answers to each row, in place of a greedy one.
        settings: as for ``train``.

    Raises:
        UserError: a mistake that the caller can mend.
        PipelineError: the evaluation has failed.
    """
    if is_importing():
        stop_importing()
    file = _spec(workflow)
    options = {
        "--run": run.path if isinstance(run, Run) else run,
        "--version": version,
        "--model": model,
        "--config": config,
        "--limit": limit,
        "--samples": samples,
    }
    command = ["eval", *([] if file is None else [file]), "--json"]
    command += [word for name, value in options.items() if value is not None for word in (name, str(value))]
    scores: list[Scores] = []
    _follow(
        [*command, *_words(settings)],
        lambda line: scores.append(msgspec.json.decode(line, type=Scores)),
        is_good=lambda: bool(scores),  # status 1 says that none of a task's rows was scored: so do the scores
    )
    return scores


def _spec(workflow: Workflow | str | os.PathLike[str] | None) -> str | None:
    """Return a workflow as the command line names it.

    Raises:
        UserError: a function that no other process could import.
    """
    if workflow is None or isinstance(workflow, str | os.PathLike):
        return None if workflow is None else os.fspath(workflow)
    function = inspect.unwrap(workflow)
    name = getattr(function, "__qualname__", "")
    code = getattr(function, "__code__", None)
    if code is None or "." in name or name == "<lambda>":
        raise UserError(
            f"workflow: got {name or repr(workflow)}, need a coroutine at the top level of a file, which the run's "
            "processes import; write async def there, or name FILE.py:name"
        )
    if not Path(code.co_filename).is_file():
        raise UserError(
            f"workflow: got {name}, which is in no file but in a notebook or a prompt, need one that the run's "
            f"processes can import; write its cell to a file, with %%writefile {name}.py as the first line, and give "
            f"'{name}.py'"
        )
    return f"{os.path.relpath(code.co_filename)}:{name}"


def _words(settings: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Yield settings as the command line has them: ``--section.key=value``."""
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _words(value, f"{name}.")
        elif not prefix and not isinstance(value, Mapping):
            raise UserError(f"{name}: got {value!r:.100}, need a section of settings as a dict: {name}={{...}}")
        else:
            yield f"--{name}={_text(value)}"


def _text(value: object) -> str:
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    return msgspec.json.encode(value).decode()


def _print(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


def _follow(
    words: list[str], tell: Callable[[str], object] | None, *, is_good: Callable[[], bool] = lambda: False
) -> None:
    """Run one command to its end.

    Args:
        tell: takes each line that it says.
        is_good: whether what it has said is an answer whatever its status.

    Raises:
        UserError, PipelineError: as it says itself.
        KeyboardInterrupt: it was interrupted here, and has ended.
    """
    # In a session of its own: Ctrl-C of a terminal would reach it twice.
    process = subprocess.Popen(
        guarded(module_command("areal_async", *words), by=signal.SIGTERM),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    last: list[str] = []
    errors = threading.Thread(target=_pass_on, args=(process.stderr, last), daemon=True)
    errors.start()
    try:
        with _interrupts_to(process) as interrupts:
            for line in process.stdout:
                if tell is not None:
                    tell(line)
            process.wait()
            errors.join()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        process.stdout.close()
        process.stderr.close()
    if interrupts:
        raise KeyboardInterrupt
    if process.returncode and not is_good():
        sentence = last[0].strip() if last else f"{' '.join(words)}: ended with status {process.returncode}"
        raise (UserError if process.returncode == UserError.exit_code else PipelineError)(sentence)
    if last:
        sys.stderr.write(last[0])


@contextmanager
def _interrupts_to(process: "subprocess.Popen[str]") -> Iterator[list[int]]:
    """Hand each Ctrl-C of the block on to a process, and give a list of them.

    A handler: ``asyncio.run`` has one of its own, which would keep the first of them until its loop goes on.
    """
    interrupts: list[int] = []

    def hand_on(number: int, _: FrameType | None) -> None:
        interrupts.append(number)
        process.send_signal(number)

    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield interrupts
        return
    signal.signal(signal.SIGINT, hand_on)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def _pass_on(errors: IO[str], last: list[str]) -> None:
    """Pass on what is said on stderr but for the last line, which says why a command has failed."""
    for line in errors:
        if last:
            sys.stderr.write(last.pop())
        last.append(line)
