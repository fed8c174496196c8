"""``doctor FILE.py``: look before a run. Exit status 1 when something is to be cured first."""

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import anyio
import msgspec
from rich.console import Console
from rich.text import Text

from areal_async.cli.checks import check_groups
from areal_async.cli.run import choose_config, load_run_settings
from areal_async.doctor.preflight import Level, PreflightFinding, look_ahead
from areal_async.process.host import visible_gpus
from areal_async.process.stdio import say
from areal_async.telemetry import log

MARKS = {
    Level.GOOD: Text("ok     ", style="green"),
    Level.WARNING: Text("warning", style="yellow"),
    Level.ERROR: Text("error  ", style="bold red"),
}


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
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
                _show(finding, console)
        return findings

    findings = anyio.run(look)
    if arguments.json:
        say(json.dumps(msgspec.to_builtins(findings), indent=1))
    else:
        _sum_up(findings, config)
    return 1 if any(finding.level is Level.ERROR for finding in findings) else 0


def _show(finding: PreflightFinding, console: Console) -> None:
    console.print(Text.assemble(MARKS[finding.level], " ", (finding.check, "bold"), f": {finding.saw}"))
    if finding.cure:
        console.print(Text(f"        -> {finding.cure}"))


def _sum_up(findings: Sequence[PreflightFinding], config: Path) -> None:
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    verdict = "cure the errors first" if counts[Level.ERROR] else "the run may start"
    say(f"{config}: {_count(counts[Level.ERROR], 'error')}, {_count(counts[Level.WARNING], 'warning')}; {verdict}")


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
