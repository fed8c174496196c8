"""``doctor``: examine a run and say what holds. Exit status 0 when nothing is refuted, 1 when something is.

With a workflow or settings it looks before a run instead (``preflight``).
With ``--graph`` it draws the calls that a training step is made of instead, and needs no run.
"""

import argparse
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec
from rich.console import Console

from areal_async.algorithms.graphs import step_graph
from areal_async.cli.run import choose_config, load_run_settings
from areal_async.cli.starting.checks import check_groups
from areal_async.config.sources import load_settings
from areal_async.doctor import Diagnosis, examine
from areal_async.doctor.audit import screen as audit
from areal_async.doctor.preflight import Level, PreflightFinding, look_ahead
from areal_async.doctor.preflight import screen as preflight
from areal_async.errors import BusError, UserError
from areal_async.launch.run import NotLiveError, visit_live
from areal_async.launch.run_directory import RunDirectory, find_run
from areal_async.process.host import visible_gpus
from areal_async.process.stdio import say
from areal_async.telemetry import log


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Examine one run and print the diagnosis, or print the graph of a step.

    Raises:
        UserError: neither a run nor settings, settings beside a run, or a graph that cannot run.
    """
    if arguments.graph is not None:
        say(step_graph(load_settings(Path(arguments.graph), overrides)).mermaid())
        return 0
    if arguments.file is not None or arguments.config is not None:
        if arguments.run is not None:
            raise UserError("doctor: got a run and one that is to be started, need one of them; leave --run out")
        return _look_ahead(arguments, overrides)
    if overrides:
        raise UserError(f"doctor: got {overrides[0]} with --run, need a run's own settings; leave it out")
    if arguments.run is None:
        raise UserError("doctor: got neither a run nor settings; name FILE.py, --run NAME or --graph FILE.yaml")
    log.quieten()
    directory = find_run(arguments.run)
    diagnosis = anyio.run(examine_now, directory, backend_options={"use_uvloop": True})
    if arguments.json:
        say(json.dumps(diagnosis.as_json(), indent=1))
    else:
        audit.show(diagnosis, Console(highlight=False))
    return 0 if diagnosis.is_clean else 1


def _look_ahead(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Look at what a run with these settings will meet here, and print it as it is found.

    Raises:
        UserError: the settings themselves are wrong.
    """
    has_gpu = bool(visible_gpus())
    config = choose_config(arguments.file, arguments.config, has_gpu=has_gpu)
    settings = load_run_settings(config, arguments.file, overrides)
    check_groups(settings)
    log.quieten(logging.CRITICAL)
    console = Console(highlight=False, soft_wrap=True)

    async def look() -> list[PreflightFinding]:
        findings = []
        async for finding in look_ahead(settings):
            findings.append(finding)
            if not arguments.json:
                preflight.show(finding, console)
        return findings

    findings = anyio.run(look)
    if arguments.json:
        say(json.dumps(msgspec.to_builtins(findings), indent=1))
    else:
        say(preflight.summary(findings, config))
    return 1 if any(finding.level is Level.ERROR for finding in findings) else 0


async def examine_now(directory: RunDirectory) -> Diagnosis:
    """Examine a run as it is: one that ends meanwhile, or is started, is examined anew as what it is then.

    Raises:
        UserError: it has left nothing to look at, or its broker does not answer.
        BusError: its broker goes away while it is asked.
    """
    while True:
        broker = await _find_broker(directory)
        try:
            return await examine(directory.read_settings(), directory.path, broker or directory.read_bus_url())
        except* (UserError, BusError):
            if await _find_broker(directory) == broker:
                raise


async def _find_broker(directory: RunDirectory) -> str | None:
    """Return where the broker of a live run answers; None when nobody runs it.

    Raises:
        UnreachableError: it lives, and its broker does not answer.
    """
    with suppress(NotLiveError):
        async with visit_live(directory) as (_, bus):
            return bus.connection.url
    return None
