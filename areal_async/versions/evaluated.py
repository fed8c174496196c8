"""What an evaluation came to, in words, from its line of ``eval.jsonl``; lines of earlier versions say less."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_async.process.json_lines import read_last_json_line


def last_evaluation(run_directory: Path) -> dict[str, Any]:
    """Return ``accuracy`` and the whole line, ``evaluation``, of a run's newest one; None and nothing for none."""
    line = read_last_json_line(run_directory / "eval.jsonl") or {}
    return {"accuracy": line.get("accuracy"), "evaluation": line}


def kind(line: Mapping[str, Any]) -> str:
    """Return what its figure is called."""
    num_samples = line.get("num_samples") or 1
    return f"avg@{num_samples}" if num_samples > 1 else "mean reward" if line.get("is_graded") else "accuracy"


def figure(line: Mapping[str, Any]) -> str:
    """Return ``0.512``, or ``avg@8 0.412, pass@8 0.700``, or ``none`` where no row had a reward."""
    accuracy = line.get("accuracy")
    if accuracy is None or line.get("num_scored") == 0:
        return "none"
    name = f"{kind(line)} " if kind(line).startswith("avg") else ""
    return f"{name}{accuracy:.3f}{passing(line)}"


def measured(line: Mapping[str, Any]) -> str:
    """Return ``accuracy 0.512``, ``mean reward -0.120`` or as ``figure``, with its name in any case."""
    text = figure(line)
    return text if text.startswith("avg") else f"{kind(line)} {text}"


def answers(line: Mapping[str, Any]) -> str:
    """Return what its numbers of scored and failed ones count."""
    return "answers" if kind(line).startswith("avg") else "rows"


def passing(line: Mapping[str, Any]) -> str:
    """Return ``, pass@8 0.700`` of the most answers it has that of; nothing for one answer a row."""
    chances = line.get("pass_at") or {}
    if not chances:
        return ""
    most = max(chances, key=int)
    return f", pass@{most} {chances[most]:.3f}"


def failures(line: Mapping[str, Any]) -> str:
    """Return ``, 3 failed: the most frequent reason (2 times)``; nothing where all rows have a reward."""
    num_failed = line.get("num_failed") or 0
    if not num_failed:
        return ""
    reasons = line.get("reasons") or {}
    why = max(reasons, key=reasons.__getitem__, default="")
    return f", {num_failed} failed" + (f": {why} ({reasons[why]} times)" if why else "")
