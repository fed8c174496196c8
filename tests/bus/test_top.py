"""``top`` outlives the run that it shows, takes nothing that one which starts again needs, and no shell's terminal."""

import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from areal_async.bus import EmbeddedBroker, Role, declare, open_bus
from areal_async.config.settings import Settings
from areal_async.launch.run_directory import RunDirectory
from areal_async.monitor.top.feed import TopFeed
from areal_async.monitor.top.view import TopView
from tests.brokers import running_broker, until
from tests.e2e.terminal import SHELL, SHOWN_WITHIN_S, Terminal

pytestmark = pytest.mark.anyio
KEYS = "q quit"


@asynccontextmanager
async def _launched(settings: Settings, directory: RunDirectory) -> AsyncIterator[EmbeddedBroker]:
    """What a launcher holds."""
    with directory.locked("test"):
        async with running_broker(settings) as broker:
            directory.write_bus_url(broker.url)
            yield broker


async def test_a_run_that_ends_is_looked_for_until_it_is_started_again_elsewhere_and_its_lock_is_left_alone(
    settings: Settings,
) -> None:
    directory, view = RunDirectory(settings.run_directory), TopView()
    directory.write_settings(settings)

    async with AsyncExitStack() as visit, anyio.create_task_group() as tasks:
        async with _launched(settings, directory) as broker:
            key = broker.credentials(Role.OPERATOR)
            connecting = open_bus(broker.url, names=settings.names, role=Role.OPERATOR, credentials=key)
            bus = await visit.enter_async_context(connecting)
            await declare(bus, settings)
            feed = TopFeed(settings, bus, view=view, directory=directory)
            tasks.start_soon(feed.run, lambda: None)
            await until(lambda: view.status is not None)
            held = directory.lock.stat().st_mtime_ns
        await until(lambda: view.status is not None and view.status.state == "ended")
        assert directory.lock.stat().st_mtime_ns == held
        assert not feed.has_moved
        async with _launched(settings, directory):
            await until(lambda: feed.has_moved)


async def test_a_stopped_top_leaves_the_terminal_as_it_was_and_fg_has_it_draw_again(settings: Settings) -> None:
    directory = RunDirectory(settings.run_directory)
    directory.write_settings(settings)
    async with _launched(settings, directory) as broker:
        key = broker.credentials(Role.OPERATOR)
        async with open_bus(broker.url, names=settings.names, role=Role.OPERATOR, credentials=key) as bus:
            await declare(bus, settings)
            await anyio.to_thread.run_sync(_stop_and_go_on, directory.path)


def _stop_and_go_on(run: Path) -> None:
    shell = Terminal((80, 24), program=SHELL)
    shell.press(f"{sys.executable} -m areal_async top --run {run}\n")
    shell.wait(lambda text: KEYS in text and shell.is_taken, "top")

    shell.press("\x1a")
    shell.wait(lambda text: "Stopped" in text and shell.is_as_before, "that it is stopped, and the shell's terminal")
    shell.press("echo $((40+2))\n")
    shell.wait(lambda text: "echo $((40+2))\n" in _lean(text) and "\n42\n" in _lean(text), "what is typed")
    shell.resize(100, 30)
    shell.press("fg\n")
    shell.wait(lambda _: shell.lines[-1].startswith(KEYS) and shell.is_taken, "top in the larger terminal")

    (top,) = Path(f"/proc/{shell.process.pid}/task/{shell.process.pid}/children").read_text().split()
    os.kill(int(top), signal.SIGSTOP)  # which nobody can heed: the shell has to find its modes again by itself
    state = Path(f"/proc/{top}/stat")
    shell.wait(lambda _: state.read_text().rpartition(") ")[2].startswith("T"), "that it is stopped")
    shell.press("stty sane; clear; echo $((41+2))\n")
    shell.wait(lambda text: _lean(text).startswith("43\n"), "the shell")
    shell.press("fg\n")
    shell.wait(lambda text: KEYS in text and shell.is_taken, "top again")
    shell.press("?")  # one key, without Enter
    shell.wait(lambda text: "leave; the run goes on" in text, "its help")

    os.kill(int(top), signal.SIGTERM)
    shell.wait(lambda text: "Terminated" in text and shell.is_as_before, "its end")
    shell.press("exit 0\n")
    assert shell.process.wait(timeout=SHOWN_WITHIN_S) == 0, shell.text


def _lean(text: str) -> str:
    """Return a screen without the blanks at the ends of its lines."""
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())
