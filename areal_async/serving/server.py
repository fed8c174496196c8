"""The process of ``serve``: arms that follow their names, the endpoint before them, and an end that lets answers end.

Told to end, it takes nothing more on, finishes what has begun within ``serve.shutdown_deadline_s``, writes what is to
be recorded, and ends the servers; told twice, it does not wait for answers.
"""

import asyncio
import resource
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import structlog

from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.process.http_server import ConnectionLimits, serve_app
from areal_async.rollout.endpoint.admission import AdmissionLimits
from areal_async.serving.app import ServeApp
from areal_async.serving.arms import Arm, Place
from areal_async.serving.folders import Versions
from areal_async.serving.gpus import starts_beside
from areal_async.serving.keys import Keyring
from areal_async.serving.records import Recorder
from areal_async.serving.split import Share
from areal_async.telemetry.exporters.prometheus import metrics_app
from areal_async.telemetry.exporters.samples import SERVER

KEEP_ALIVE_S = 120
"""Longer than clients keep a connection that they do not use: none is closed under a request."""
UNREAD_DEADLINE_S = 60.0
"""A client that reads nothing of its answer for so long, twice at the most, has left."""
BACKLOG = 2048
STOP_DEADLINE_S = 3.0
MAX_FILES = 1 << 16
"""Files that a process has use for: a request takes two connections, its client's and its server's."""
TOLD_BY = (signal.SIGINT, signal.SIGTERM)

log = structlog.get_logger()


async def serve(
    settings: Settings,
    *,
    name: str,
    shares: Sequence[Share],
    versions: Versions,
    directory: Path,
    keyring: Keyring,
    tell: Callable[[str], None],
) -> None:
    """Serve until told to end.

    Args:
        name: of the model whose traffic is split, as clients see it.
        directory: for records and logs.
        tell: takes what the user should know.

    Raises:
        UserError: the address cannot be listened at, or a version that is meant is not there.
        PipelineError: servers fail again and again.
    """
    place = Place(
        settings=settings,
        versions=versions,
        log_directory=directory / "logs",
        is_beside=starts_beside(settings, num_arms=len(shares)),
        num_arms=len(shares),
        tell=tell,
    )
    limits = check_files(settings.serve.max_requests)
    with bound_socket(settings.serve.host, settings.serve.port) as bound:
        async with Recorder(directory, settings.serve) as recorder, anyio.create_task_group() as tasks:
            ending = anyio.Event()
            await tasks.start(_wait_to_end, ending, tasks.cancel_scope)
            arms = [Arm(share, place, tasks) for share in shares]
            async with anyio.create_task_group() as starting:
                for arm in arms:
                    starting.start_soon(arm.start)
            app = ServeApp(settings, name=name, arms=arms, keyring=keyring, recorder=recorder, limits=limits)
            app.metrics = metrics_app(directory, role="serve", report=lambda: _report(app, arms, recorder))
            async with listening(app, bound, limits):
                tell(f"serving at http://{settings.serve.host}:{bound.getsockname()[1]}/v1")
                for arm in arms:
                    tasks.start_soon(arm.run)
                tasks.start_soon(versions.tidy)
                tasks.start_soon(_follow_keys, keyring, settings.serve.follow_s)
                await ending.wait()
                await _finish(app, settings.serve.shutdown_deadline_s, tell)
            tasks.cancel_scope.cancel()


def check_files(max_requests: int) -> AdmissionLimits:
    """Return the limits of this process, which may open as many files from here on as its host lets it.

    Raises:
        UserError: so many requests would be more connections than that.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = MAX_FILES if most == resource.RLIM_INFINITY else min(most, MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, most))
    limits = AdmissionLimits.of_process()
    if max_requests > limits.max_connections // 2:
        raise UserError(
            f"serve.max_requests: got {max_requests} where a process may open {num_files} files, need "
            f"{limits.max_connections // 2} at most; lower it, or raise that (ulimit -n)"
        )
    return limits


async def _wait_to_end(
    ending: anyio.Event, all_of_it: anyio.CancelScope, *, task_status: anyio.abc.TaskStatus[None]
) -> None:
    """Say that it is to end when a signal says so; cancel everything at the second."""
    with anyio.open_signal_receiver(*TOLD_BY) as signals:
        task_status.started()
        async for _ in signals:
            if ending.is_set():
                all_of_it.cancel()
            ending.set()


async def _finish(app: ServeApp, deadline_s: float, tell: Callable[[str], None]) -> None:
    """Take on nothing more, and let what has begun end."""
    app.is_closing = True
    if app.num_answers:
        tell(f"ends after the {app.num_answers} answers that have begun, within {deadline_s:g} s")
    with anyio.move_on_after(deadline_s):
        await app.wait_idle()
    if num_left := await app.cut_off():
        tell(f"{num_left} answers were cut off after {deadline_s:g} s")


@asynccontextmanager
async def listening(app: ServeApp, bound: socket.socket, limits: AdmissionLimits) -> AsyncIterator[None]:
    """Listen while the block lasts.

    Raises:
        UserError: somebody else listens there since the address was bound.
    """
    backlog = min(BACKLOG, limits.max_connections // 2)
    try:
        bound.listen(backlog)
    except OSError as exc:
        port = bound.getsockname()[1]
        raise UserError(f"serve.port: got {port}, need a port at which nobody else listens by now") from exc
    server, serving = serve_app(
        app,
        bound,
        limits=ConnectionLimits(
            max_connections=limits.max_connections,
            head_deadline_s=limits.head_deadline_s,
            unread_deadline_s=UNREAD_DEADLINE_S,
        ),
        backlog=backlog,
        timeout_keep_alive=KEEP_ALIVE_S,
        server_header=False,
    )
    try:
        yield
    finally:
        server.should_exit = True
        with anyio.move_on_after(STOP_DEADLINE_S, shield=True):
            await asyncio.wait([serving])
        serving.cancel()


async def _follow_keys(keyring: Keyring, interval_s: float) -> None:
    while True:
        await anyio.sleep(interval_s)
        await anyio.to_thread.run_sync(keyring.refresh)


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket at an address, at which nobody is answered before somebody listens.

    Raises:
        UserError: it cannot be had.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except (OSError, UnicodeError) as exc:
        bound.close()
        raise UserError(
            f"serve.host, serve.port: got {host}, {port}, need an address of this host and a free port "
            f"({getattr(exc, 'strerror', None) or exc}); choose others, or port 0 for a free one"
        ) from exc
    return bound


def _report(app: ServeApp, arms: Sequence[Arm], recorder: Recorder) -> dict[str, Any]:
    """Return what ``/metrics`` is made of."""
    servers = {
        server.id: {
            **{field.key: getattr(server, field.key) for field in SERVER},
            "frozen": arm.name,
            "fence": server.fence,
            "version": server.version,
        }
        for arm in arms
        for served in arm.alive
        for server in served.fleet.pool.servers.values()
    }
    return {
        "num_answers": app.num_answers,
        "num_feedback": app.counts.num_feedback,
        "num_mixed": app.counts.num_mixed,
        "num_left_out": recorder.num_left_out,
        "requests": dict(app.counts.requests),
        "tokens": dict(app.counts.tokens),
        "servers": servers,
    }
