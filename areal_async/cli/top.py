"""``top``: a live run on one screen, asked anew all the time; keys turn the panes, pause it and resume it."""

import argparse
import functools
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import anyio

from areal_async.bus import Bus, ask_service
from areal_async.cli.orders import DONE, who
from areal_async.cli.status import check_remote, remote_settings
from areal_async.config.settings import Settings
from areal_async.errors import BusError, UserError
from areal_async.launch.run import visit_at, visit_live
from areal_async.launch.run_directory import find_run
from areal_async.monitor.snapshot import CONNECT_S
from areal_async.monitor.top.app import TopApp
from areal_async.monitor.top.feed import TopFeed
from areal_async.monitor.top.view import TopView
from areal_async.telemetry import log

ORDER_DEADLINE_S = 5.0


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Show the run until the user has seen enough."""
    if not all(one.isatty() for one in (sys.stdin, sys.stdout, sys.stderr)):
        raise UserError(f"top: got no terminal, need one; status --run {arguments.run} prints what it shows once")
    log.quieten(logging.CRITICAL)
    for name in ("COLUMNS", "LINES"):  # inherited, perhaps from another terminal; this one tells its own size
        os.environ.pop(name, None)
    check_remote(arguments)
    directory = find_run(arguments.run) if arguments.url is None else None
    by = arguments.by or who()

    def visit() -> AbstractAsyncContextManager[tuple[Settings, Bus]]:
        return visit_live(directory) if directory is not None else visit_at(remote_settings(arguments), CONNECT_S)

    async def show() -> TopApp:
        view = TopView()
        while True:
            async with visit() as (settings, bus):
                feed = TopFeed(settings, bus, view=view, directory=directory)
                app = TopApp(view, order=functools.partial(_order, bus, by))
                await _show(app, feed)
                if not feed.has_moved:
                    return app

    app = anyio.run(show, backend_options={"use_uvloop": True})
    if app.return_value == signal.SIGINT:
        raise KeyboardInterrupt
    if app.return_value is not None:
        signal.signal(app.return_value, signal.SIG_DFL)
        signal.raise_signal(app.return_value)
    return app.return_code or 0


async def _show(app: TopApp, feed: TopFeed) -> None:
    """Show what the feed tells until the user leaves or the feed ends, for whichever reason."""

    async def follow() -> None:
        try:
            await feed.run(app.draw_soon)
        finally:
            if not tasks.cancel_scope.cancel_called:
                app.exit()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        with anyio.CancelScope(shield=True):  # it gives the terminal back whatever ends the feed
            await app.run_async(mouse=False)
        tasks.cancel_scope.cancel()


async def _order(bus: Bus, by: str, order: str) -> str:
    """Give the run an order; return what became of it."""
    try:
        await ask_service(bus, bus.names.control(order), {"by": by}, deadline_s=ORDER_DEADLINE_S)
    except (UserError, BusError) as exc:
        return str(exc)
    return DONE[order]
