"""Whether what a run measures can go where its settings send it."""

import importlib.util
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

from areal_async.config.metrics import TO_FILES
from areal_async.config.settings import Settings
from areal_async.doctor.preflight.findings import PreflightFinding, error, good, warning
from areal_async.telemetry.exporters.traces import check_installed

CONNECT_DEADLINE_S = 2.0
PORTS = {"http": 80, "https": 443}


def check_traces(settings: Settings) -> Iterator[PreflightFinding]:
    """Look for the packages, and for somebody who listens."""
    where = settings.metrics.traces
    if where is None:
        return
    check_installed(settings.metrics)
    if where == TO_FILES:
        yield good("traces", f"go to {settings.run_directory / 'traces'}")
        return
    url = urlsplit(where)
    try:
        address = (url.hostname or "", url.port or PORTS[url.scheme])
        socket.create_connection(address, timeout=CONNECT_DEADLINE_S).close()
    except (OSError, ValueError) as exc:
        cure = "start it, or correct metrics.traces; the run goes on without its spans else"
        yield warning("traces", f"no collector answers at {where}: {exc}", cure)
    else:
        yield good("traces", f"a collector listens at {where}")


def check_trackers(settings: Settings) -> Iterator[PreflightFinding]:
    """Look for the package of a tracker that is asked for."""
    project = settings.metrics.wandb_project
    if project is not None and importlib.util.find_spec("wandb") is None:
        cure = "pip install areal-async[wandb], or leave it out"
        yield error("tracker", f"metrics.wandb_project is {project!r}, and the package wandb is not installed", cure)
