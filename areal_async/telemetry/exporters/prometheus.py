"""``/metrics`` of one process, and the file that tells Prometheus where it is.

Ports are free ones, since any number of processes share a host; ``<run.directory>/prometheus/*.json``, a file per
process, are in the form of Prometheus's file-based service discovery, whose ``file_sd_configs`` follow them.

A process that ends takes its file with it. One that is killed leaves it, for Prometheus to see that it does not answer;
the next process here that is scraped, of any run, removes what the dead of this host have left.
"""

import asyncio
import json
import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import structlog

from areal_async.config.metrics import MetricsSettings
from areal_async.config.settings import Settings
from areal_async.errors import UserError, WireError
from areal_async.process.atomic_folders import write_whole
from areal_async.protocol.wire import decode_json
from areal_async.telemetry.exporters.samples import COUNTER, GAUGE, MetricSample, kind_of, samples

STOP_DEADLINE_S = 3.0
HOST, PID, NAMESPACE = "__areal_host", "__areal_pid", "__areal_pid_namespace"
"""Labels of the process that wrote the file; Prometheus drops labels with this prefix once it has read them."""

log = structlog.get_logger()


@asynccontextmanager
async def exporting(
    settings: Settings, run_directory: Path, *, role: str, report: Callable[[], dict[str, Any]], instance: str = "0"
) -> AsyncIterator[None]:
    """Serve ``report``'s numbers while the block runs, where ``metrics.prometheus`` asks for it.

    Args:
        report: called for each scrape, on the event loop; it must not block or raise.

    Raises:
        UserError: ``metrics.prometheus_host`` is no address of this host.
    """
    if not settings.metrics.prometheus:
        yield
        return
    from areal_async.process.http_server import serve_app  # here: most processes serve nothing

    listening = _listen(settings.metrics.prometheus_host)
    server, serving = serve_app(metrics_app(run_directory, role=role, report=report), listening)
    target = f"{_host(settings.metrics.prometheus_host)}:{listening.getsockname()[1]}"
    # In one folder for all runs: the discovery follows patterns of file names, not of folders.
    path = settings.run.directory / "prometheus" / f"{settings.run.name}-{role}-{instance}.json"
    remove_dead_targets(path.parent)
    write_target(path, target, labels={"run": settings.run.name, "role": role, "instance": instance} | _own_labels())
    log.info("prometheus.serving", url=f"http://{target}/metrics")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        server.should_exit = True
        with anyio.move_on_after(STOP_DEADLINE_S, shield=True):
            await asyncio.wait([serving])
        serving.cancel()


def metrics_app(directory: Path, *, role: str, report: Callable[[], dict[str, Any]]) -> Any:
    """Return the ASGI application that answers with ``report``'s numbers, and with this process's.

    Args:
        directory: where it writes; how full its disk is is told too.
        report: as of ``exporting``.
    """
    # Imported here: most runs never need it.
    from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry, make_asgi_app

    registry = CollectorRegistry(auto_describe=False)
    for own in (PROCESS_COLLECTOR, GC_COLLECTOR, PLATFORM_COLLECTOR):
        registry.register(own)
    registry.register(_Collector(lambda: [*samples(role, report()), *_disk(directory)]))
    return make_asgi_app(registry)


def check_listening(metrics: MetricsSettings) -> None:
    """Check that this host can listen at ``metrics.prometheus_host``, before a process is started that would.

    Raises:
        UserError: ``metrics.prometheus_host`` is no address of this host.
    """
    if metrics.prometheus:
        _listen(metrics.prometheus_host).close()


def write_target(path: Path, target: str, *, labels: dict[str, str]) -> None:
    """Write one group of targets atomically: Prometheus watches the folder."""
    write_whole(path, json.dumps([{"targets": [target], "labels": labels}]).encode() + b"\n")


def remove_dead_targets(folder: Path) -> None:
    """Remove the target files of this host's processes that have ended.

    Containers may share a host's name, and each numbers its own processes: files of other PID namespaces are left.
    """
    own = _own_labels()
    for path in folder.glob("*.json"):
        with suppress(OSError, ValueError, WireError):  # another removes or rewrites it now, or it is none of ours
            (group,) = decode_json(path.read_bytes(), list[_Group], what=str(path))
            pid = group.labels.get(PID, "")
            is_near = all(group.labels.get(name) == own[name] for name in (HOST, NAMESPACE))
            if is_near and pid.isdecimal() and not Path("/proc", pid).exists():
                path.unlink(missing_ok=True)
                log.info("prometheus.target_removed", path=str(path))


class _Group(msgspec.Struct):
    targets: list[str]
    labels: dict[str, str]


def _own_labels() -> dict[str, str]:
    namespace = Path("/proc/self/ns/pid").stat().st_ino
    return {HOST: socket.gethostname(), PID: str(os.getpid()), NAMESPACE: str(namespace)}


class _Collector:
    """The metric families of a process's current report."""

    def __init__(self, read: Callable[[], Iterable[MetricSample]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Any]:
        """Return one family per name."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds = {GAUGE: GaugeMetricFamily, COUNTER: CounterMetricFamily}
        families: dict[str, Any] = {}
        for sample in self._read():
            if sample.name not in families:
                families[sample.name] = kinds[kind_of(sample.name)](sample.name, sample.help, labels=[*sample.labels])
            families[sample.name].add_metric([*sample.labels.values()], sample.value)
        return families.values()


def _disk(run_directory: Path) -> Iterable[MetricSample]:
    usage = shutil.disk_usage(run_directory)
    yield MetricSample("areal_disk_free_bytes", "Free space where the run directory is.", usage.free)
    yield MetricSample("areal_disk_size_bytes", "Size of that file system.", usage.total)


def _listen(address: str) -> socket.socket:
    try:
        return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError as exc:
        raise UserError(f"metrics.prometheus_host: got {address}, need an address of this host ({exc})") from exc


def _host(address: str) -> str:
    """Return the name that others reach this process by, as it stands in a URL."""
    name = socket.gethostname() if address in ("0.0.0.0", "::") else address
    return f"[{name}]" if ":" in name else name
