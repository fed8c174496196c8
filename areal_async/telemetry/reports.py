"""What a process says of itself, as far as it can be read: anybody may have written a report who may send one."""

from collections.abc import Mapping
from typing import Any

import msgspec

from areal_async.telemetry.wait_graph import WaitReport


def waits_in(report: Mapping[str, Any]) -> WaitReport:
    """Return what a process waits for; nothing where it tells of none in due form."""
    try:
        return msgspec.convert(report.get("waits", {}), WaitReport)
    except msgspec.ValidationError:
        return WaitReport()


def servers_in(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what a node tells of its inference servers, by their ids."""
    servers = report.get("servers")
    pairs = servers.items() if isinstance(servers, dict) else ()
    return {str(server_id): server for server_id, server in pairs if isinstance(server, dict)}
