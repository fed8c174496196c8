"""The audit trail of a run: who did what to it, and when. From its files, so without its broker, and for good."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from areal_async.config.change_record import CHANGES, ORDERS
from areal_async.process.json_lines import json_lines
from areal_async.versions import tags


class Act(NamedTuple):
    """One thing that somebody did."""

    at: str
    """Time, in UTC as ISO 8601."""
    by: str
    what: str
    why: str


def read(run_directory: Path) -> list[Act]:
    """Return all starts, orders, changes of settings and tags of a run, oldest first.

    Raises:
        UserError: its tags were damaged.
    """
    return sorted([*_orders(run_directory), *_changes(run_directory), *_tags(run_directory)], key=lambda act: act.at)


def _orders(run_directory: Path) -> Iterator[Act]:
    for line in json_lines(run_directory / ORDERS):
        yield _act(line, str(line.get("order", "")))


def _changes(run_directory: Path) -> Iterator[Act]:
    for line in json_lines(run_directory / CHANGES):
        yield _act(line, f"set {line.get('setting')}: {line.get('before')!r:.100} -> {line.get('after')!r:.100}")


def _act(line: Mapping[str, Any], what: str) -> Act:
    at, by, why = (str(line.get(name, "")) for name in ("at", "by", "reason"))
    return Act(at, by, what, why)


def _tags(run_directory: Path) -> Iterator[Act]:
    for tag in tags.history(run_directory):
        behind = " by force" if tag.is_forced else f" by comparison {tag.comparison}" if tag.comparison else ""
        yield Act(tag.at, tag.by, f"tag {tag.tag}: {tag.was or 'none'} -> {tag.version or 'none'}{behind}", tag.why)
