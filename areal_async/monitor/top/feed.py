"""What fills ``top``'s view: the roles' answers, asked for all the time, the events and the steps as they come.

It asks each role what ``status`` asks it, and nothing else, so that being watched costs next to nothing.
"""

import functools
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio

from areal_async.bus import Bus, Report, hearing_reports
from areal_async.config.settings import Settings
from areal_async.errors import BusError, UserError, leaves_of
from areal_async.launch.run_directory import RunDirectory
from areal_async.monitor.liveness import BeatsSeen, locked
from areal_async.monitor.snapshot import NUM_READ, event_in, read_snapshot
from areal_async.monitor.top.view import TopView
from areal_async.process.bell import Bell
from areal_async.process.json_lines import JsonLines

REFRESH_S = 0.7
"""Seconds between two questions to everybody; what they say stands on the screen within a second."""
ANSWER_S = 0.3
"""Seconds that the roles have to answer; one that is late is shown with its last answer, until that is too old."""
LOOK_AT_STEPS_S = 0.2
MIN_PAUSE_S = 0.1
RETRY_S = 1.0
SNAPSHOT_DEADLINE_S = 2.0
"""Seconds that the broker has to answer before it is said not to."""


class TopFeed:
    """A run whose answers, events and steps go into a view, while its broker stays where it is."""

    def __init__(self, settings: Settings, bus: Bus, *, view: TopView, directory: RunDirectory | None) -> None:
        """Feed ``view``; ``directory`` is None for a run elsewhere, of which only its broker can be asked."""
        self._settings = settings
        self._bus = bus
        self._directory = directory
        self._url = directory.read_bus_url() if directory is not None else ""
        self._ask_live = locked(directory) if directory is not None else BeatsSeen(bus).is_live
        self.has_moved = False
        """The run was started again, with its broker at another address: it is to be visited there."""
        self._view = view
        self._steps = JsonLines(settings.run_directory / "metrics.jsonl")
        self._answers: dict[tuple[str, str], Report] = {}
        self._heard = Bell()

    async def run(self, on_news: Callable[[], None]) -> None:
        """Feed the view until cancelled or until the run's broker is at another address; say so at each change."""
        async with hearing_reports(self._bus, self._on_report) as ask, anyio.create_task_group() as tasks:
            tasks.start_soon(self._run_events, on_news)
            tasks.start_soon(self._run_steps, on_news)
            await self._run_asking(ask, on_news)
            tasks.cancel_scope.cancel()

    async def _run_asking(self, ask: Callable[[], Awaitable[None]], on_news: Callable[[], None]) -> None:
        """Ask everybody, also of a run that has ended: it may be started again.

        consumes:     answers of the roles and the broker
        waits for:    ``REFRESH_S``
        produces:     the view's status
        unblocked by: cancellation, or another address of the broker
        """
        gather = functools.partial(self._gather, ask)
        while not self.has_moved:
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
            elif cause:
                self._view.lose_broker(cause)
            on_news()
            await anyio.sleep(max(MIN_PAUSE_S, REFRESH_S - (time.monotonic() - since_s)))

    async def _gather(self, ask: Callable[[], Awaitable[None]]) -> dict[tuple[str, str], Report]:
        """Ask the roles, and wait for those that have answered before; one that is late is heard the next time."""
        self._answers.clear()
        await ask()
        with anyio.move_on_after(ANSWER_S):
            while not self._view.reports or not self._view.reports.keys() <= self._answers.keys():
                await self._heard.wait()
        return self._view.take_reports(self._answers, now_s=time.monotonic())

    def _on_report(self, role: tuple[str, str], report: Report) -> None:
        self._answers[role] = report
        self._heard.ring()

    async def _run_events(self, on_news: Callable[[], None]) -> None:
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
                        on_news()
            except BusError:  # _run_asking tells
                await anyio.sleep(RETRY_S)

    async def _run_steps(self, on_news: Callable[[], None]) -> None:
        """Take in each step's line as it is written, until cancelled."""
        while True:
            if lines := self._steps.read_new().lines:
                for line in lines:
                    self._view.add_step(line)
                on_news()
            await anyio.sleep(LOOK_AT_STEPS_S)

    def _has_ended(self) -> bool:
        """Say whether nobody runs the run any more; of one elsewhere that is never known."""
        return self._directory is not None and not self._directory.is_live

    def _is_elsewhere(self) -> bool:
        """Say whether the run's broker has another address now than the one that is asked."""
        with suppress(UserError):  # it is about to be written
            return self._directory is not None and self._directory.read_bus_url() != self._url
        return False
