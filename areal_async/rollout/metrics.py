"""What a node says about itself every second (where there are many nodes more seldom), as one JSON object."""

import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import anyio
import msgspec

from areal_async.bus import serving
from areal_async.inference.commands import most_servers
from areal_async.inference.pool import ServerHandle, ServerPool
from areal_async.rollout.node_context import NodeContext
from areal_async.rollout.user_code.loop_watchdog import LoopWatchdog
from areal_async.telemetry import wait_graph
from areal_async.telemetry.exporters.prometheus import exporting

INTERVAL_S = 1.0
NUM_INTERVALS = 10
"""Over which the time to a first token is a mean; streams begin less often than tokens come."""

_SERVER_FIELDS = (
    "version", "num_requests", "limit", "outstanding_tokens", "num_generated_tokens", "num_prompt_tokens",
    "num_cached_tokens", "num_first_tokens", "num_swaps",
)  # fmt: skip
"""Told as they are."""


class _Counters(NamedTuple):
    num_generated_tokens: int
    num_first_tokens: int
    first_token_total_s: float


class Pace:
    """How fast each server was in the last seconds; told every second what they have done in all."""

    def __init__(self) -> None:
        self._noted: deque[tuple[float, dict[ServerHandle, _Counters]]] = deque(maxlen=NUM_INTERVALS + 1)

    def note(self, servers: Iterable[ServerHandle], *, now_s: float) -> None:
        """Take in what the servers have done until now."""
        counters = {
            one: _Counters(one.num_generated_tokens, one.num_first_tokens, one.first_token_total_s) for one in servers
        }
        self._noted.append((now_s, counters))

    def of(self, server: ServerHandle) -> dict[str, float | None]:
        """Return its tokens per second since the last report, and its mean time to a first token over the last ten.

        The latter is None while no stream has begun.
        """
        known = [(at_s, counters[server]) for at_s, counters in self._noted if server in counters]
        if len(known) < 2:
            return {"tokens_per_s": 0.0, "first_token_mean_s": None}
        (_, oldest), (before_s, before), (now_s, now) = known[0], known[-2], known[-1]
        num_begun = now.num_first_tokens - oldest.num_first_tokens
        waited_s = now.first_token_total_s - oldest.first_token_total_s
        return {
            "tokens_per_s": round((now.num_generated_tokens - before.num_generated_tokens) / (now_s - before_s), 1),
            "first_token_mean_s": round(waited_s / num_begun, 4) if num_begun else None,
        }


async def run_metrics(node: NodeContext, pool: ServerPool, watchdog: LoopWatchdog, pace: Pace) -> None:
    """Report until cancelled, every second and whenever asked. Nobody waits for a report, and a lost one is lost."""
    tokens_per_s = 0.0

    def report() -> dict[str, Any]:
        return {**node_report(node, pool, watchdog, pace), "tokens_per_s": tokens_per_s}

    async with (
        serving(
            node.bus, instance=node.node_id, description="runs workflows and their inference servers", report=report
        ),
        exporting(node.settings, node.settings.run_directory, role="node", instance=node.node_id, report=report),
    ):
        num_tokens_before, before_s = 0, time.monotonic()
        while True:
            await anyio.sleep(INTERVAL_S * node.bus.connection.times)
            now_s, num_tokens = time.monotonic(), _num_generated_tokens(node, pool)
            tokens_per_s = round((num_tokens - num_tokens_before) / (now_s - before_s), 1)
            num_tokens_before, before_s = num_tokens, now_s
            pace.note((server for one in _pools(node, pool).values() for server in one.servers.values()), now_s=now_s)
            await node.bus.emit(node.bus.names.metrics("node", node.node_id), msgspec.json.encode(report()))


def node_report(node: NodeContext, pool: ServerPool, watchdog: LoopWatchdog, pace: Pace) -> dict[str, Any]:
    """Return the state of the node as it is now."""
    counts = node.counts
    return {
        "node_id": node.node_id,
        "state": f"runs {counts.num_groups_running} groups, {counts.num_trajectories_running} trajectories",
        "waits_for": _waits_for(node, pool),
        "waits": wait_graph.report(wait_graph.node(node.node_id)),
        **vars(counts),
        "num_groups_waiting_for_stream": node.backpressure.num_waiting,
        "num_requests_waiting": pool.num_waiting,
        "num_dead_letters": node.bus.num_dead_letters,
        "last_failure": counts.last_failure[:200],
        "num_generated_tokens": _num_generated_tokens(node, pool),
        "loop_lag_p99_s": round(watchdog.lag.p99_s, 4),
        "loop_lag_max_s": round(watchdog.lag.max_s, 4),
        "servers": server_reports(node, pool, pace),
        "arms": {name: why[:200] for name, why in node.arms.hindrances.items()} if node.arms else {},
        "fleet": {
            "num_servers": node.settings.inference.num_servers,
            "most_servers": most_servers(node.settings, num_gpus_lent=node.arms.num_gpus if node.arms else 0),
        },
    }


def server_reports(node: NodeContext, pool: ServerPool, pace: Pace) -> dict[str, dict[str, Any]]:
    """Return what each server of the node does now, by its id."""
    return {
        server.id: {
            **{field: getattr(server, field) for field in _SERVER_FIELDS},
            "fence": server.fence or server.doubt,
            "first_token_total_s": round(server.first_token_total_s, 4),
            "swap_total_s": round(server.swap_total_s, 4),
            "frozen": name,
            **pace.of(server),
        }
        for name, one in _pools(node, pool).items()
        for server in one.servers.values()
    }


def _waits_for(node: NodeContext, pool: ServerPool) -> str:
    """Name what holds the node up, the most telling first; empty when nothing does."""
    pools = (pool, *(model.pool for model in node.frozen.values()))  # nothing waits for an arm
    servers = [server for one in pools for server in one.servers.values()]
    fenced = [f"server {server.id} ({server.fence})" for server in servers if server.fence]
    if fenced:
        return ", ".join(fenced)
    if node.backpressure.num_waiting:
        return f"room in the trajectory stream, for {node.backpressure.num_waiting} groups"
    num_requests = sum(server.num_requests for server in servers)
    if num_requests:
        return f"{num_requests} completions of {len(servers)} servers"
    return "tickets" if not node.counts.num_groups_running else "its workflows and rewards"


def _pools(node: NodeContext, pool: ServerPool) -> dict[str, ServerPool]:
    """Return the pool of each policy's servers by its name, and of each arm's; that of the trained one by none."""
    arms = {f"arm_{one.arm.name}": one.model.pool for one in node.arms.served.values()} if node.arms else {}
    return {"": pool, **{name: model.pool for name, model in node.frozen.items()}, **arms}


def _num_generated_tokens(node: NodeContext, pool: ServerPool) -> int:
    return sum(one.num_generated_tokens for one in _pools(node, pool).values())
