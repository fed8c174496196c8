"""``changes.jsonl``: a run's own record of the settings that were changed while it went on, or when it was resumed."""

from pathlib import Path

import msgspec
import structlog

from areal_async.protocol.events import SettingChanged

log = structlog.get_logger()


def record_change(run_directory: Path, event: SettingChanged) -> None:
    """Add a line; on a full disk the event alone must do."""
    path = run_directory / "changes.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")
    except OSError as exc:
        log.warning("changes.not_written", path=str(path), cause=str(exc))
