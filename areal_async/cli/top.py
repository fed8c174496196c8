"""``top``: a live run on one screen, asked anew all the time; keys turn the panes, pause it and resume it.

It asks each role what ``status`` asks it, and nothing else, so that being watched costs next to nothing. Events and
steps are shown as they come.
"""

import argparse
import functools
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress

import anyio
import structlog

from areal_async.bus import Bus, Report, ask_service, hearing_reports
from areal_async.cli.orders import DONE, who
from areal_async.cli.status import check_remote, remote_settings
from areal_async.config.settings import Settings
from areal_async.errors import BusError, UserError, leaves_of
from areal_async.launch.run import visit_at, visit_live
from areal_async.launch.run_directory import RunDirectory, find_run
from areal_async.monitor.liveness import BeatsSeen, locked
from areal_async.monitor.snapshot import CONNECT_S, NUM_READ, event_in, read_snapshot
from areal_async.monitor.tail import JsonLines
from areal_async.monitor.top.screen import draw
from areal_async.monitor.top.terminal import TopTerminal
from areal_async.monitor.top.view import TopView

REFRESH_S = 0.7
"""Between two questions to everybody; what they say stands on the screen within a second."""
ANSWER_S = 0.3
"""For the roles to answer; one that is late is shown with its last answer, until that is too old."""
LOOK_AT_STEPS_S = 0.2
MIN_PAUSE_S = 0.1
REDRAW_S = 1.0
RETRY_S = 1.0
SNAPSHOT_DEADLINE_S = 2.0
"""For the broker, after which it is said not to answer."""
ORDER_DEADLINE_S = 5.0
NOTICE_S = 5.0
MAX_ROWS = 1 << 30
SCROLLS = {"up": -1, "down": 1, "page up": -10, "page down": 10, "home": -MAX_ROWS, "end": MAX_ROWS}
TURNS = {"left": -1, "right": 1}


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Show the run until the user has seen enough."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError(f"top: got no terminal, need one; status --run {arguments.run} prints what it shows once")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    check_remote(arguments)
    directory = find_run(arguments.run) if arguments.url is None else None

    def visit() -> AbstractAsyncContextManager[tuple[Settings, Bus]]:
        return visit_live(directory) if directory is not None else visit_at(remote_settings(arguments), CONNECT_S)

    async def show() -> None:
        view, has_moved = TopView(), True
        while has_moved:
            async with visit() as (settings, bus):
                top = _Top(settings, bus, view=view, by=arguments.by or who(), directory=directory)
                await top.run()
                has_moved = top.has_moved

    anyio.run(show, backend_options={"use_uvloop": True})
    return 0


class _Top:
    def __init__(self, settings: Settings, bus: Bus, *, view: TopView, by: str, directory: RunDirectory | None) -> None:
        self._settings = settings
        self._bus = bus
        self._by = by
        self._directory = directory
        self._url = directory.read_bus_url() if directory is not None else ""
        self._ask_live = locked(directory) if directory is not None else BeatsSeen(bus).is_live
        self.has_moved = False
        """The run was started again, with its broker at another address: it is to be visited there."""
        self._view = view
        self._steps = JsonLines(settings.run_directory / "metrics.jsonl")
        self._answers: dict[tuple[str, str], Report] = {}
        self._heard = anyio.Event()
        self._news = anyio.Event()
        self._told_s = 0.0

    async def run(self) -> None:
        with TopTerminal() as terminal:
            draw_now = functools.partial(self._draw, terminal)
            async with hearing_reports(self._bus, self._hear) as ask, anyio.create_task_group() as tasks:
                for loop in (self._run_events, self._run_steps, self._run_sizes):
                    tasks.start_soon(loop)
                tasks.start_soon(self._run_asking, ask, tasks.cancel_scope.cancel)
                tasks.start_soon(self._run_drawing, draw_now)
                tasks.start_soon(functools.partial(terminal.run_stops, on_return=draw_now))
                async for key in terminal.keys():
                    if key == "q" and not self._view.is_typing:
                        break
                    await self._press(key)
                    draw_now()
                tasks.cancel_scope.cancel()

    async def _run_asking(self, ask: Callable[[], Awaitable[None]], leave: Callable[[], None]) -> None:
        """Ask everybody, also of a run that has ended: it may be started again.

        consumes:     answers of the roles and the broker
        waits for:    ``REFRESH_S``
        produces:     the view's status
        unblocked by: cancellation, or another address of the broker, where ``leave`` is called
        """

        async def gather() -> dict[tuple[str, str], Report]:
            return await self._gather(ask)

        while True:
            since_s = time.monotonic()
            cause = f"not within {SNAPSHOT_DEADLINE_S:g} s"
            with anyio.move_on_after(SNAPSHOT_DEADLINE_S):
                try:
                    self._view.status = await read_snapshot(
                        self._settings, self._bus, gather=gather, ask_live=self._ask_live, num_events=0
                    )
                    cause = ""
                except* BusError as group:
                    cause = str(leaves_of(group)[0])
            if cause and self._has_ended():
                self._view.end()
            elif cause and self._is_elsewhere():
                self.has_moved = True
                leave()
                return
            elif cause:
                self._view.lose_broker(cause)
            self._news.set()
            await anyio.sleep(max(MIN_PAUSE_S, REFRESH_S - (time.monotonic() - since_s)))

    async def _gather(self, ask: Callable[[], Awaitable[None]]) -> dict[tuple[str, str], Report]:
        """Ask the roles, and wait for those that have answered before; whoever is late is heard the next time."""
        self._answers.clear()
        await ask()
        with anyio.move_on_after(ANSWER_S):
            while not self._view.reports or not self._view.reports.keys() <= self._answers.keys():
                self._heard = anyio.Event()
                await self._heard.wait()
        return self._view.hear(self._answers, now_s=time.monotonic())

    def _hear(self, who: tuple[str, str], report: Report) -> None:
        self._answers[who] = report
        self._heard.set()

    async def _run_events(self) -> None:
        """Take in what has happened lately, and what happens.

        consumes:     the stream of events
        waits for:    the next one
        produces:     the view's events
        unblocked by: cancellation alone
        """
        stream, next_sequence = self._bus.names.events_stream, 0
        self._view.events.clear()
        while True:
            try:
                if not next_sequence:
                    next_sequence = max(1, (await self._bus.stream_state(stream)).last_sequence - NUM_READ)
                async for message in self._bus.follow(stream, self._bus.names.all_events, start_sequence=next_sequence):
                    next_sequence = message.sequence + 1
                    if (event := event_in(message)) is not None:
                        self._view.events.append(event)
                        self._news.set()
            except BusError:  # _run_asking tells
                await anyio.sleep(RETRY_S)

    async def _run_steps(self) -> None:
        """Take in each step's line as it is written, for ever."""
        while True:
            if lines := self._steps.read_new().lines:
                for line in lines:
                    self._view.add_step(line)
                self._news.set()
            await anyio.sleep(LOOK_AT_STEPS_S)

    async def _run_sizes(self) -> None:
        """Draw anew whenever the terminal has another size, for ever."""
        with anyio.open_signal_receiver(signal.SIGWINCH) as sizes:
            async for _ in sizes:
                self._news.set()

    async def _run_drawing(self, draw_now: Callable[[], None]) -> None:
        """Draw what is new, a few times a second at most, and every second how long ago everything was.

        consumes:     the view
        waits for:    news
        produces:     the screen
        unblocked by: cancellation alone
        """
        while True:
            with anyio.move_on_after(REDRAW_S):
                await self._news.wait()
            self._news = anyio.Event()
            if self._view.notice and time.monotonic() - self._told_s > NOTICE_S:
                self._view.notice = ""
            draw_now()
            await anyio.sleep(MIN_PAUSE_S)

    def _has_ended(self) -> bool:
        """Say whether nobody runs the run any more; of one elsewhere that is never known."""
        return self._directory is not None and not self._directory.is_live

    def _is_elsewhere(self) -> bool:
        """Say whether the run's broker has another address now than the one that is asked."""
        with suppress(UserError):  # it is about to be written
            return self._directory is not None and self._directory.read_bus_url() != self._url
        return False

    async def _press(self, key: str) -> None:
        view = self._view
        if view.is_typing:
            view.type(key)
            return
        match key:
            case "/":
                view.is_typing = True
            case "escape":
                view.type(key)
            case "p":
                await self._order("pause")
            case "r":
                await self._order("resume")
            case "s":
                view.sort_next()
            case "?":
                view.shows_help = not view.shows_help
            case _ if key in SCROLLS:
                view.scroll(SCROLLS[key])
            case _ if key in TURNS:
                view.turn_to(view.pane + TURNS[key])
            case _ if key.isdecimal() and 1 <= int(key) <= len(view.panes):
                view.turn_to(int(key) - 1)

    async def _order(self, order: str) -> None:
        try:
            subject = self._bus.names.control(order)
            await ask_service(self._bus, subject, {"by": self._by}, deadline_s=ORDER_DEADLINE_S)
            self._tell(DONE[order])
        except (UserError, BusError) as exc:
            self._tell(str(exc))

    def _tell(self, notice: str) -> None:
        self._view.notice, self._told_s = notice, time.monotonic()

    def _draw(self, terminal: TopTerminal) -> None:
        terminal.show(draw(self._view, *terminal.size))
