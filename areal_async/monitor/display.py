"""Showing a run while it runs: a live panel on a terminal, one plain line per step elsewhere.

Both only watch. They read the run's files and listen on the bus, and a display that falls behind slows nothing.
"""

import sys
from collections.abc import Iterable
from typing import IO, cast

import anyio
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_async.bus import Bus
from areal_async.launch.supervisor import Notify
from areal_async.monitor.token_text import shown, visible
from areal_async.monitor.view import (
    RunView,
    by_task,
    evaluation_text,
    notice_text,
    number,
    reward_text,
    step_text,
    trained_tokens_per_s,
)
from areal_async.process.stdio import LossyStdout, say
from areal_async.versions.evaluated import figure

REFRESH_S = 0.5
SPARKLINE_STEPS = 40
_BARS = "▁▂▃▄▅▆▇█"


class PlainDisplay:
    """One line per step, evaluation and notice; for logs, pipes and CI."""

    def __init__(self, view: RunView) -> None:
        self._view = view

    def notify(self, text: str) -> None:
        """Show one line now."""
        say(visible(text, newline=" "))

    async def watch(self, bus: Bus) -> None:
        """Show what happens until cancelled.

        consumes:     metrics and events on the bus, the run's two files of lines
        waits for:    the next message; the next look at the files
        produces:     the display
        unblocked by: cancellation alone
        """
        self._view.read_files()  # an earlier start has told these
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen, bus, self._view, self.notify)
            try:
                while True:
                    self.write_news()
                    await anyio.sleep(REFRESH_S)
            finally:
                self.write_news()  # what came just before the end

    def write_news(self) -> None:
        """Write a line for each step and evaluation that the files have gained."""
        steps, evaluations = self._view.read_files()
        for line in steps:
            self.notify(step_text(line, self._view))
        for line in evaluations:
            self.notify(evaluation_text(line, self._view))


class LiveDisplay:
    """A panel that is drawn over itself, twice a second; notices scroll above it."""

    def __init__(self, view: RunView, console: Console) -> None:
        self._view = view
        self._console = console

    def notify(self, text: str) -> None:
        """Show one line now, above the panel."""
        self._console.print(visible(text, newline=" "), highlight=False, markup=False)

    async def watch(self, bus: Bus) -> None:
        """Show what happens until cancelled; consumes, waits and is unblocked as the plain one."""
        view = self._view
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen, bus, view, self.notify)
            with Live(console=self._console, auto_refresh=False, transient=True) as live:
                while True:
                    view.read_files()
                    live.update(render(view), refresh=True)
                    await anyio.sleep(REFRESH_S)


def choose_display(view: RunView, *, is_plain: bool) -> PlainDisplay | LiveDisplay:
    """Return the live panel where stdout is a terminal and it is wanted."""
    console = Console(file=cast("IO[str]", LossyStdout(sys.stdout)))
    return PlainDisplay(view) if is_plain or not console.is_terminal else LiveDisplay(view, console)


async def listen(bus: Bus, view: RunView, notify: Notify) -> None:
    """Feed a view from the bus until cancelled."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_listen_to_events, bus, notify)
        async with bus.subscribe(bus.names.all_metrics) as messages:
            async for subject, data in messages:
                view.on_metrics(subject, data)


async def _listen_to_events(bus: Bus, notify: Notify) -> None:
    async with bus.subscribe(bus.names.all_events) as messages:
        async for subject, data in messages:
            if (text := notice_text(subject, data)) is not None:
                notify(text)


def render(view: RunView) -> RenderableType:
    """Draw the panel."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, row in _rows(view):
        table.add_row(Text(shown(name)), Text(shown(row)) if isinstance(row, str) else row)
    return Panel(table, title=f"run {view.settings.run.name}", title_align="left", expand=False)


def sparkline(values: Iterable[float]) -> str:
    """Draw numbers as bars between their least and their greatest; nothing for none."""
    numbers = list(values)
    low, high = min(numbers, default=0.0), max(numbers, default=0.0)
    span = high - low
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1)) if span else 0] for value in numbers)


def _rows(view: RunView) -> Iterable[tuple[str, RenderableType]]:
    steps, done = view.settings.run.steps, view.step
    progress = Table.grid(padding=(0, 1))
    progress.add_row(Text(f"{done}/{steps}"), ProgressBar(total=steps, completed=done, width=40))
    yield "step", progress
    if view.alarms:
        yield "alarms", Text(", ".join(view.alarms).replace("_", " "), style="bold red")
    if view.steps:
        yield from _step_facts(view).items()
    yield "groups", _groups_text(view)
    for name, server in view.servers.items():
        fence = f", fenced: {server['fence']}" if server.get("fence") else ""
        requests = int(number(server, "num_requests"))
        yield f"server {name}", f"version {server.get('version') or 'none'}, {requests} requests{fence}"
    for workflow, evaluations in by_task(view.evaluations, view.settings).items() if view.evaluations else ():
        last = [f"{figure(line)} @{line.get('step', '?')}" for line in evaluations[-6:]]
        yield f"eval {workflow}".strip(), "  ".join(last)
    yield from sorted(view.roles.items())


def _step_facts(view: RunView) -> dict[str, str]:
    line, bound = view.newest_step, view.settings.rollout.max_staleness
    curve = sparkline(number(step, "reward_mean") for step in list(view.steps)[-SPARKLINE_STEPS:])
    return {
        "reward": f"{reward_text(view)}  {curve}",
        "staleness": f"mean {number(line, 'staleness_mean'):.2f}, max {int(number(line, 'staleness_max'))} of {bound}",
        "tokens/s": f"generated {view.sum_of_nodes('tokens_per_s'):.0f}, trained {trained_tokens_per_s(line):.0f}",
        "time": f"{number(line, 'time_step_s'):.1f} s: wait {number(line, 'time_wait_data_s'):.1f},"
        f" train {number(line, 'time_train_s'):.1f}, weights {number(line, 'time_weights_s'):.1f}",
    }


def _groups_text(view: RunView) -> str:
    in_flight, credits = (int(number(view.controller, key)) for key in ("in_flight", "credits"))
    running = int(view.sum_of_nodes("num_groups_running"))
    text = (
        f"in flight {in_flight} (running {running}, ready or training {max(0, in_flight - running)}), credits {credits}"
    )
    skipped = int(number(view.controller, "skipped"))
    return f"{text}, passed over {skipped} prompts" if skipped else text
