"""``top``: a live run on one screen, asked anew every second; keys turn the panes, pause it and resume it.

It asks each role what ``status`` asks it, once a second, and nothing else, so that being watched costs next to nothing.
"""

import argparse
import logging
import os
import sys
import termios
import time
import tty
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress

import anyio
import structlog
from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live

from areal_async.bus import Bus, Report, ask_service, gather_reports
from areal_async.cli.orders import DONE, who
from areal_async.cli.status import CONNECT_S, read_snapshot, remote_settings
from areal_async.cli.tail import JsonLines
from areal_async.cli.top_screen import draw
from areal_async.cli.top_view import PANES, TopView
from areal_async.errors import BusError, UserError
from areal_async.launch.run import visit_at, visit_live
from areal_async.launch.run_directory import find_run
from areal_async.settings import Settings

REFRESH_S = 0.9
ANSWER_S = 0.4
"""For the roles to answer; one that is late is shown with its last answer, until that is too old."""
ORDER_DEADLINE_S = 5.0
NUM_EVENTS = 100
NOTICE_S = 5.0
ESCAPES = {
    "\x1b[A": "up", "\x1b[B": "down", "\x1b[C": "right", "\x1b[D": "left", "\x1b[5~": "page up", "\x1b[6~": "page down",
    "\x1bOA": "up", "\x1bOB": "down", "\x1bOC": "right", "\x1bOD": "left", "\t": "right",
}  # fmt: skip
SCROLLS = {"up": -1, "down": 1, "page up": -10, "page down": 10}
TURNS = {"left": -1, "right": 1}


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Show the run until the user has seen enough."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError(f"top: got no terminal, need one; status --run {arguments.run} prints what it shows once")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    visit: AbstractAsyncContextManager[tuple[Settings, Bus]] = (
        visit_live(find_run(arguments.run))
        if arguments.url is None
        else visit_at(remote_settings(arguments), CONNECT_S)
    )

    async def show() -> None:
        async with visit as (settings, bus):
            await _Top(settings, bus, by=arguments.by or who()).run()

    anyio.run(show, backend_options={"use_uvloop": True})
    return 0


class _Top:
    def __init__(self, settings: Settings, bus: Bus, *, by: str) -> None:
        self._settings = settings
        self._bus = bus
        self._by = by
        self._view = TopView()
        self._steps = JsonLines(settings.run_directory / "metrics.jsonl")
        self._console = Console(file=sys.stdout)
        self._told_s = 0.0

    async def run(self) -> None:
        with _keyboard(), Live(console=self._console, screen=True, auto_refresh=False) as live:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._run_asking, live)
                async for key in _keys():
                    if key == "q":
                        break
                    await self._press(key)
                    self._draw(live)
                tasks.cancel_scope.cancel()

    async def _run_asking(self, live: Live) -> None:
        """Ask and draw for ever.

        consumes:     answers of the roles, the broker and the run's files
        waits for:    the next second
        produces:     the screen
        unblocked by: cancellation alone
        """
        while True:
            since_s = time.monotonic()
            self._draw(live)
            for line in self._steps.read_new().lines:
                self._view.add_step(line)
            try:
                with anyio.fail_after(ORDER_DEADLINE_S):
                    self._view.status = await read_snapshot(
                        self._settings, self._bus, gather=self._gather, num_events=NUM_EVENTS
                    )
            except (BusError, TimeoutError) as exc:
                self._tell(f"the broker does not answer: {str(exc) or f'not within {ORDER_DEADLINE_S:g} s'}")
            if self._view.notice and time.monotonic() - self._told_s > NOTICE_S:
                self._view.notice = ""
            self._draw(live)
            await anyio.sleep(max(0.05, REFRESH_S - (time.monotonic() - since_s)))

    async def _gather(self) -> dict[tuple[str, str], Report]:
        answers = await gather_reports(self._bus, within_s=ANSWER_S)
        return self._view.hear(answers, now_s=time.monotonic())

    async def _press(self, key: str) -> None:
        view = self._view
        match key:
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
            case _ if key.isdecimal() and 1 <= int(key) <= len(PANES):
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

    def _draw(self, live: Live) -> None:
        # The terminal's own word: LINES and COLUMNS may be inherited from another one, and do not follow it.
        with suppress(OSError):
            self._console.size = ConsoleDimensions(*os.get_terminal_size(sys.stdout.fileno()))
        width, height = self._console.size
        live.update(Group(*draw(self._view, width, height)), refresh=True)


@contextmanager
def _keyboard() -> Iterator[None]:
    """Have every key at once and unseen, while the block runs."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


async def _keys() -> AsyncIterator[str]:
    """Yield each key that is pressed, by its letter or its name; ends with the input."""
    file = sys.stdin.fileno()
    while True:
        await anyio.wait_readable(file)
        text = os.read(file, 64).decode(errors="replace")
        if not text:
            return
        while text:
            escape = next((one for one in ESCAPES if text.startswith(one)), "")
            yield ESCAPES.get(escape, text[0])
            text = text[len(escape) or 1 :]
