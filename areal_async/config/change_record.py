"""A run's own record of what people did to it, on its disk for good: ``orders.jsonl`` and ``changes.jsonl``."""

from pathlib import Path

import msgspec
import structlog

from areal_async.protocol.events import RunOrdered, SettingChanged
from areal_async.protocol.run_state import Rollback

ORDERS, CHANGES = "orders.jsonl", "changes.jsonl"

log = structlog.get_logger()


def record_change(run_directory: Path, event: RunOrdered | SettingChanged) -> None:
    """Add a line: an order, or a setting that was changed while the run went on or when it was resumed.

    Once, whoever does it: who gives an order to go back is ended by it, maybe before this, so who carries it out
    does the same. On a full disk the event alone must do.
    """
    path = run_directory / (ORDERS if isinstance(event, RunOrdered) else CHANGES)
    line = msgspec.json.encode(event) + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.seek(0)
            if line not in file.readlines():
                file.write(line)
    except OSError as exc:
        log.warning("changes.not_written", path=str(path), cause=str(exc))


def ordered_rollback(order: Rollback) -> RunOrdered:
    """Return what is recorded of an order to go back, alike for each who records it."""
    return RunOrdered(order=f"rollback to {order.version}", by=order.by, reason=order.reason, at=order.at)
