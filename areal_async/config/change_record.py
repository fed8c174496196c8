"""A run's own record of what people did to it, on its disk for good: ``orders.jsonl`` and ``changes.jsonl``."""

from pathlib import Path

import msgspec
import structlog

from areal_async.protocol.events import RunOrdered, SettingChanged

ORDERS, CHANGES = "orders.jsonl", "changes.jsonl"

log = structlog.get_logger()


def record_change(run_directory: Path, event: RunOrdered | SettingChanged) -> None:
    """Add a line: an order, or a setting that was changed while the run went on or when it was resumed.

    On a full disk the event alone must do.
    """
    path = run_directory / (ORDERS if isinstance(event, RunOrdered) else CHANGES)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")
    except OSError as exc:
        log.warning("changes.not_written", path=str(path), cause=str(exc))
