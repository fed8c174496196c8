"""A diagnosis as people read it: counts, verdicts, and what refutes a promise or is missing for its proof."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from areal_async.doctor.audit.report import Diagnosis, PromiseVerdict, Ruling

MAX_SHOWN = 20
"""Findings printed per promise; ``--json`` has them all."""
STYLES = {PromiseVerdict.PROVED: "green", PromiseVerdict.REFUTED: "bold red", PromiseVerdict.UNDECIDED: "yellow"}


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
    table = Table("what became of", Column("groups", justify="right"), Column("trajectories", justify="right"))
    for name in dict.fromkeys([*diagnosis.groups, *diagnosis.slots]):
        columns = diagnosis.groups, diagnosis.slots
        table.add_row(name, *(f"{counts[name]:,}" if name in counts else "" for counts in columns))
    return table


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
