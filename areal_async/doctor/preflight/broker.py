"""Whether the broker is there, lets this run in, and keeps what it acknowledges."""

import json
import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import anyio.to_thread

from areal_async.bus import Role, open_run_bus
from areal_async.bus.access import addresses_of
from areal_async.bus.api import ApiError
from areal_async.bus.streams import reserved_bytes
from areal_async.config.settings import MAX_PAYLOAD_BYTES, Settings
from areal_async.doctor.preflight.findings import PreflightFinding, error, gigabytes, good, good_if, of_mistake, warning
from areal_async.errors import BusError, UserError

ANSWER_DEADLINE_S = 10.0
MONITOR_PORT = 8222
MONITOR_DEADLINE_S = 3.0
DEFAULT_SYNC_NS = 120e9
CLOCK_TOLERANCE_S = 5.0
"""The broker counts leases by its own clock; ours only dates records."""


async def check_broker(settings: Settings) -> list[PreflightFinding]:
    """Look at an external broker as the run's operator will; the embedded one is our own."""
    if settings.bus.url == "embedded":
        return [good("broker", "embedded: it syncs every message before it acknowledges it (sync_interval: always)")]
    started = time.monotonic()
    try:
        async with open_run_bus(
            settings, settings.run_directory, settings.bus.url, Role.OPERATOR, operation_deadline_s=ANSWER_DEADLINE_S
        ) as bus:
            took_s = time.monotonic() - started
            greeting = bus.connection.server_info
            account: dict[str, Any] = await bus.api.ask("$JS.API.INFO")
            saw = f"{settings.bus.url}: nats-server {greeting.get('version')}, connected in {took_s:.2f} s"
            findings = [good("broker", saw), _payload(int(greeting.get("max_payload", 0))), _room(account, settings)]
            findings += _copies(settings, greeting)
    except UserError as mistake:
        return [of_mistake("broker", mistake)]
    except (BusError, ApiError) as exc:
        return [error("broker", f"{settings.bus.url}: {exc}", "enable JetStream there for this account")]
    return findings + await _durability(settings)


def _payload(limit: int) -> PreflightFinding:
    saw = f"messages up to {gigabytes(limit)}, a run sends up to {gigabytes(MAX_PAYLOAD_BYTES)}"
    cure = f"set max_payload: {MAX_PAYLOAD_BYTES} at the broker"
    return good_if(limit >= MAX_PAYLOAD_BYTES, "broker's payload", saw, cure, otherwise=error)


def _room(account: dict[str, Any], settings: Settings) -> PreflightFinding:
    limit, used = account.get("limits", {}).get("max_storage", -1), account.get("storage", 0)
    wanted = reserved_bytes(settings)
    if limit < 0:
        saw = f"the account has no limit of its own; the run's streams take {gigabytes(wanted)}"
        return good("broker's storage", saw)
    saw = f"{gigabytes(max(limit - used, 0))} left to this account, the run's streams want {gigabytes(wanted)}"
    cure = "raise the account's limit, or lower rollout.max_stream_bytes or rollout.max_image_stream_bytes"
    return good_if(limit - used >= wanted, "broker's storage", saw, cure, otherwise=error)


def _copies(settings: Settings, greeting: dict[str, Any]) -> list[PreflightFinding]:
    """Hold the copies that are asked for against the servers there are, as far as the broker tells those to clients."""
    wanted = settings.bus.replicas
    if wanted == 1:
        return []
    cure = "start a cluster as configs/deploy/nats says, or set bus.replicas: 1"
    if not greeting.get("cluster"):
        return [error("broker's copies", f"bus.replicas is {wanted}, and this server is in no cluster", cure)]
    known = {*greeting.get("connect_urls", ()), *(urlsplit(one).netloc for one in addresses_of(settings.bus.url))}
    num_servers = max(len(greeting.get("connect_urls", ())), len(addresses_of(settings.bus.url)))
    saw = (
        f"bus.replicas is {wanted}; servers of cluster {greeting['cluster']} that are known: {', '.join(sorted(known))}"
    )
    return [good_if(num_servers >= wanted, "broker's copies", saw, cure, otherwise=error)]


async def _durability(settings: Settings) -> list[PreflightFinding]:
    """Read the monitoring page of each server: nothing else tells how a broker syncs, and who of a cluster is there."""
    hosts = dict.fromkeys(urlsplit(one).hostname for one in addresses_of(settings.bus.url))
    pages = (
        [settings.bus.monitor_url] if settings.bus.monitor_url else [f"http://{host}:{MONITOR_PORT}" for host in hosts]
    )
    findings: list[PreflightFinding] = []
    for page in pages:
        try:
            told = await anyio.to_thread.run_sync(_read_varz, f"{page.rstrip('/')}/varz")
        except (OSError, ValueError) as exc:
            saw = f"cannot see how it syncs: no monitoring page at {page} ({type(exc).__name__})"
            cure = "set bus.monitor_url, or make sure yourself of jetstream {sync_interval: always}"
            findings.append(warning("broker's disk", saw, cure))
        else:
            findings += judge_varz(told, now=datetime.now(UTC), replicas=settings.bus.replicas)
    return findings


def _read_varz(url: str) -> dict[str, Any]:
    with urlopen(url, timeout=MONITOR_DEADLINE_S) as answer:
        told = json.load(answer)
    if not isinstance(told, dict):
        raise ValueError(f"{url} is no monitoring page of a broker")
    return told


def judge_varz(told: dict[str, Any], *, now: datetime, replicas: int = 1) -> list[PreflightFinding]:
    """Say what the broker's own page means for a run that keeps so many copies."""
    config = told.get("jetstream", {}).get("config") or {}
    if config.get("sync_always"):
        findings = [good("broker's disk", "it syncs every message before it acknowledges it (sync_always)")]
    else:
        every_s = config.get("sync_interval", DEFAULT_SYNC_NS) / 1e9
        saw = f"it syncs every {every_s:g} s: a power cut loses messages that it has acknowledged"
        if replicas > 1:
            saw += f"; one that all servers have in common {replicas} copies do not outlive"
        findings = [warning("broker's disk", saw, "set jetstream {sync_interval: always} at the broker")]
    if replicas > 1:
        findings.append(_peers(told, replicas))
    try:
        apart_s = abs((datetime.fromisoformat(str(told.get("now"))) - now).total_seconds())
    except ValueError:
        return findings
    saw, cure = f"{apart_s:.1f} s from this host's", "start a time service on both hosts"
    return [*findings, good_if(apart_s <= CLOCK_TOLERANCE_S, "broker's clock", saw, cure, otherwise=warning)]


def _peers(told: dict[str, Any], replicas: int) -> PreflightFinding:
    meta = told.get("jetstream", {}).get("meta") or {}
    peers, leader = int(meta.get("cluster_size", 1)), meta.get("leader")
    away = [str(one.get("name")) for one in meta.get("replicas", ()) if one.get("offline")]
    saw = f"{peers} servers store, led by {leader or 'none of them'}"
    if away:
        saw += f"; away: {', '.join(away)}"
    cure = f"start {replicas} servers with JetStream in one cluster, as configs/deploy/nats says"
    return good_if(peers >= replicas and bool(leader) and not away, "broker's servers", saw, cure, otherwise=error)
