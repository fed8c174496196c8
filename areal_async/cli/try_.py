"""``try``: run a workflow on a few rows, without a trainer and without a bus, and show what it did, token by token.

It is the code of a node that runs. Nothing is left on disk, except a server's log where the server could not start.
"""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from areal_async.cli.run import CONFIGS, choose_config, load_run_settings
from areal_async.cli.starting.checks import (
    check_dataset,
    check_interpreter,
    check_served,
    check_template,
    check_workflow,
)
from areal_async.cli.starting.trials import TemporaryFolder, opened_trial
from areal_async.config.paths import is_same_function
from areal_async.config.settings import DatasetSettings, Settings, TaskSettings
from areal_async.data.rows import RowPrompts, load_rows
from areal_async.errors import UserError
from areal_async.inference.commands import check_tool_call_parser
from areal_async.monitor.trial_output import JsonOutput, Output, TerminalOutput
from areal_async.process.host import visible_gpus
from areal_async.protocol.types import Prompt, SlotStatus

MAX_ATTEMPTS = 4096
SPARE_STREAMS = 64


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run the siblings; the status is 1 when one of them failed."""
    check_arguments(arguments)
    config = choose_trial_config(arguments.file, arguments.config, has_gpu=bool(visible_gpus()))
    settings = load_run_settings(config, arguments.file, overrides)
    task = task_of(settings, arguments.file)
    check(settings, task, has_row=arguments.row is not None, has_server=bool(arguments.server))
    output: Output = JsonOutput() if arguments.json else TerminalOutput(with_tokens=arguments.tokens)
    output.tell(f"settings: {config}; workflow {task.workflow}, model {settings.model.path}")
    with TemporaryFolder("try") as logs:
        anyio.run(_run, settings, task, arguments, output, logs, backend_options={"use_uvloop": True})
    output.summarise()
    return 1 if output.num_of(SlotStatus.FAILED) else 0


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse what means nothing.

    Raises:
        UserError: one of them.
    """
    if arguments.file is None:
        raise UserError(
            "try: got no workflow; name FILE.py, with :name when the coroutine is called otherwise, or an environment"
        )
    for name, least in (("n", 1), ("index", 0), ("prompts", 1)):
        if getattr(arguments, name) < least:
            raise UserError(f"--{name}: got {getattr(arguments, name)}, need at least {least}")
    if arguments.n * arguments.prompts > MAX_ATTEMPTS:
        raise UserError(f"--n times --prompts: got {arguments.n * arguments.prompts}, need at most {MAX_ATTEMPTS}")
    if arguments.row is not None and (arguments.index or arguments.prompts > 1):
        raise UserError("--row: got --index or --prompts as well; a row given by hand is the only one")


def choose_trial_config(file: str, config: str | None, *, has_gpu: bool) -> Path:
    """Return the settings that ``run`` would take; where it would take none, those of gsm8k.

    Raises:
        UserError: these are not there either.
    """
    try:
        return choose_config(file, config, has_gpu=has_gpu)
    except UserError:
        usual = CONFIGS / ("gsm8k.yaml" if has_gpu else "gsm8k_cpu.yaml")
        if not usual.is_file():
            raise
        return usual


def task_of(settings: Settings, file: str) -> TaskSettings:
    """Return the task whose workflow this is."""
    return next(task for task in settings.tasks if is_same_function(task.workflow, file))


def check(settings: Settings, task: TaskSettings, *, has_row: bool, has_server: bool) -> None:
    """Refuse what can be seen to be wrong before much is imported or fetched.

    Raises:
        UserError: the workflow, its rows, the model or the server's interpreter is not there.
    """
    check_workflow(task.workflow, settings.env_of(task))
    check_served(settings)
    if not has_row:
        check_dataset(settings.dataset_of(task), "dataset")
    check_template(settings)
    if not has_server:
        check_interpreter(settings.inference.python)
        check_tool_call_parser(settings.inference)


def read_row(text: str) -> dict[str, Any]:
    """Return the row that was given by hand.

    Raises:
        UserError: no JSON object.
    """
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, ValueError, RecursionError) as exc:
        raise UserError(f'--row: got {text:.100}, need a JSON object like \'{{"question": "..."}}\': {exc}') from exc


def read_prompts(dataset: DatasetSettings, *, index: int, num_prompts: int) -> Sequence[Prompt]:
    """Return rows of a data set.

    Raises:
        UserError: it has no such rows.
    """
    rows = load_rows(dataset, shows_progress=False)
    if index + num_prompts > len(rows):
        raise UserError(
            f"--index {index} --prompts {num_prompts}: {dataset.source} has {len(rows)} rows, need some of these"
        )
    return RowPrompts(rows, range(index, index + num_prompts))


async def _run(
    settings: Settings, task: TaskSettings, arguments: argparse.Namespace, output: Output, logs: Path
) -> None:
    """Do everything of one command that needs the event loop."""
    if arguments.row is not None:
        prompts: Sequence[Prompt] = [Prompt(epoch=0, index=0, row=read_row(arguments.row))]
    else:
        dataset = settings.dataset_of(task)
        read = functools.partial(read_prompts, dataset, index=arguments.index, num_prompts=arguments.prompts)
        prompts = await anyio.to_thread.run_sync(read)
    async with opened_trial(
        settings,
        task,
        urls=arguments.server,
        logs=logs,
        max_streams=len(prompts) * arguments.n + SPARE_STREAMS,
        tell=output.tell,
    ) as (trial, codec):
        output.begin(codec)
        await trial.run(prompts, num_siblings=arguments.n, on_attempt=output.show)
