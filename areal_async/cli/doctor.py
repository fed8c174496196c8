"""``doctor``: examine a run and say what holds. Exit status 0 when nothing is refuted, 1 when something is.

With a workflow or settings it looks before a run instead (``preflight``).
With ``--graph`` it draws the calls that a training step is made of instead, and needs no run.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_async.algorithms.graphs import step_graph
from areal_async.cli import preflight
from areal_async.config.sources import load_settings
from areal_async.doctor import Diagnosis, examine
from areal_async.doctor.audit.report import PromiseVerdict, Ruling
from areal_async.errors import BusError, UserError
from areal_async.launch.run import NotLiveError, visit_live
from areal_async.launch.run_directory import RunDirectory, find_run
from areal_async.process.stdio import say
from areal_async.telemetry import log

MAX_SHOWN = 20
"""Findings printed per promise; ``--json`` has them all."""
STYLES = {PromiseVerdict.PROVED: "green", PromiseVerdict.REFUTED: "bold red", PromiseVerdict.UNDECIDED: "yellow"}


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
        return preflight.run(arguments, overrides)
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
        show(diagnosis, Console(highlight=False))
    return 0 if diagnosis.is_clean else 1


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


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print it for people."""
    state = "alive" if diagnosis.is_live else "finished" if diagnosis.is_finished else "stopped, not finished"
    checkpoint = f"newest checkpoint {diagnosis.checkpoint}" if diagnosis.checkpoint else "no checkpoint yet"
    console.print(f"run {diagnosis.run}: {state}; {checkpoint}")
    console.print(_counts(diagnosis))
    console.print(_verdicts(diagnosis.rulings))
    for ruling in diagnosis.rulings:
        for line in _details(ruling):
            console.print(Text(line))
    for note in diagnosis.notes:
        console.print(Text(f"note: {note}"))


def _counts(diagnosis: Diagnosis) -> Table:
    table = Table("what became of", "groups", "trajectories")
    for name in dict.fromkeys([*diagnosis.groups, *diagnosis.slots]):
        table.add_row(name, _count(diagnosis.groups, name), _count(diagnosis.slots, name))
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _count(counts: Mapping[str, int], name: str) -> str:
    return f"{counts[name]:,}" if name in counts else ""


def _verdicts(rulings: Sequence[Ruling]) -> Table:
    table = Table("promise", "verdict", "looked at")
    for ruling in rulings:
        verdict = Text(ruling.verdict.value, style=STYLES[ruling.verdict])
        table.add_row(f"{ruling.promise} {ruling.title}", verdict, Text(ruling.sentence))
    return table


def _details(ruling: Ruling) -> list[str]:
    """Return what refutes a promise, and what is missing for its proof."""
    lines = [f"{ruling.promise} is refuted by {ruling.num_findings}:"] if ruling.findings else []
    lines += [f"  {finding.id}: {finding.text}" for finding in ruling.findings[:MAX_SHOWN]]
    if ruling.num_findings > MAX_SHOWN:
        lines.append(f"  and {ruling.num_findings - MAX_SHOWN} more; --json lists them all")
    return lines + [f"{ruling.promise} lacks for a proof: {missing}" for missing in ruling.missing]
