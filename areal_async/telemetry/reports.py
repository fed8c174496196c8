"""What a process says of itself, as far as it can be read: anybody may have written a report who may send one."""

from collections.abc import Mapping
from typing import Any

import msgspec

from areal_async.protocol.fields import ServerIndex
from areal_async.telemetry.wait_graph import WaitReport


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """How many inference servers of the policy under training a node may have."""

    num_servers: ServerIndex
    """As its settings say: what it has unless operators have ordered otherwise."""
    most_servers: ServerIndex
    """For which it has GPUs."""


def fleet_in(report: Mapping[str, Any]) -> FleetReport | None:
    """Return what a node tells of the servers that it may have; None where it tells of none in due form."""
    try:
        return msgspec.convert(report.get("fleet"), FleetReport)
    except msgspec.ValidationError:
        return None


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
