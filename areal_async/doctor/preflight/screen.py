"""What a look before a run has found, as people read it."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from areal_async.doctor.preflight.findings import Level, PreflightFinding

MARKS = {
    Level.GOOD: Text("ok     ", style="green"),
    Level.WARNING: Text("warning", style="yellow"),
    Level.ERROR: Text("error  ", style="bold red"),
}


def show(finding: PreflightFinding, console: Console) -> None:
    """Print one finding, and its cure."""
    console.print(Text.assemble(MARKS[finding.level], " ", (finding.check, "bold"), f": {finding.saw}"))
    if finding.cure:
        console.print(Text(f"        -> {finding.cure}"))


def summary(findings: Sequence[PreflightFinding], config: Path) -> str:
    """Return what all findings come to."""
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    verdict = "cure the errors first" if counts[Level.ERROR] else "the run may start"
    return f"{config}: {_count(counts[Level.ERROR], 'error')}, {_count(counts[Level.WARNING], 'warning')}; {verdict}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
