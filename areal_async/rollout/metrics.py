"""What a node says about itself every second, as one JSON object on its metrics subject."""

import time
from typing import Any

import anyio
import msgspec

from areal_async import waits
from areal_async.bus import serving
from areal_async.exporters.prometheus import exporting
from areal_async.inference.pool import Pool
from areal_async.rollout.lag import LoopWatch
from areal_async.rollout.workplace import Workplace

INTERVAL_S = 1.0


async def run_metrics(place: Workplace, pool: Pool, watch: LoopWatch) -> None:
    """Report until cancelled, every second and whenever asked. Nobody waits for a report, and a lost one is lost."""
    tokens_per_s = 0.0

    def report() -> dict[str, Any]:
        return {**node_report(place, pool, watch), "tokens_per_s": tokens_per_s}

    async with (
        serving(
            place.bus, instance=place.node_id, description="runs workflows and their inference servers", report=report
        ),
        exporting(place.settings, place.settings.run_directory, role="node", instance=place.node_id, report=report),
    ):
        num_tokens_before, before_s = 0, time.monotonic()
        while True:
            await anyio.sleep(INTERVAL_S)
            now_s, num_tokens = time.monotonic(), _num_generated_tokens(place, pool)
            tokens_per_s = round((num_tokens - num_tokens_before) / (now_s - before_s), 1)
            num_tokens_before, before_s = num_tokens, now_s
            await place.bus.emit(place.bus.names.metrics("node", place.node_id), msgspec.json.encode(report()))


def node_report(place: Workplace, pool: Pool, watch: LoopWatch) -> dict[str, Any]:
    """Return the state of the node as it is now."""
    counts = place.counts
    pools = {"": pool, **{name: model.pool for name, model in place.frozen.items()}}
    return {
        "node_id": place.node_id,
        "state": f"runs {counts.num_groups_running} groups, {counts.num_trajectories_running} trajectories",
        "waits_for": _waits_for(place, pool),
        "waits": waits.report(waits.node(place.node_id)),
        "num_groups_running": counts.num_groups_running,
        "num_trajectories_running": counts.num_trajectories_running,
        "num_groups_waiting_for_stream": place.backpressure.num_waiting,
        "num_requests_waiting": pool.num_waiting,
        "num_scored": counts.num_scored,
        "num_failed": counts.num_failed,
        "num_rejected": counts.num_rejected,
        "num_dead_letters": place.bus.num_dead_letters,
        "last_failure": counts.last_failure[:200],
        "num_generated_tokens": _num_generated_tokens(place, pool),
        "loop_lag_p99_s": round(watch.lag.p99_s, 4),
        "loop_lag_max_s": round(watch.lag.max_s, 4),
        "servers": {
            server.id: {
                "version": server.version,
                "fence": server.fence or server.doubt,
                "num_requests": server.num_requests,
                "limit": server.limit,
                "outstanding_tokens": server.outstanding_tokens,
                "frozen": name,
            }
            for name, one in pools.items()
            for server in one.servers.values()
        },
    }


def _waits_for(place: Workplace, pool: Pool) -> str:
    """Name what holds the node up, the most telling first; empty when nothing does."""
    pools = (pool, *(model.pool for model in place.frozen.values()))
    servers = [server for one in pools for server in one.servers.values()]
    fenced = [f"server {server.id} ({server.fence})" for server in servers if server.fence]
    if fenced:
        return ", ".join(fenced)
    if place.backpressure.num_waiting:
        return f"room in the trajectory stream, for {place.backpressure.num_waiting} groups"
    num_requests = sum(server.num_requests for server in servers)
    if num_requests:
        return f"{num_requests} completions of {len(servers)} servers"
    return "tickets" if not place.counts.num_groups_running else "its workflows and rewards"


def _num_generated_tokens(place: Workplace, pool: Pool) -> int:
    return pool.num_generated_tokens + sum(model.pool.num_generated_tokens for model in place.frozen.values())
