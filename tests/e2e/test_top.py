"""``top`` outlives what happens to its run: a broker or a controller that does not answer for a while, and its end."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.terminal import Terminal
from tests.e2e.test_run import Run, collect, role_processes

pytestmark = [pytest.mark.timeout(240), pytest.mark.whole_runs]


def _has(*pieces: str) -> Callable[[str], bool]:
    return lambda text: all(piece in text for piece in pieces)


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_top_says_who_does_not_answer_goes_on_when_they_do_and_says_when_the_run_has_ended(tmp_path: Path) -> None:
    run = Run(tmp_path, "watched", run__steps=5000)
    with run.start() as process:
        run.wait_for_step(1, process)
        screen = Terminal((100, 30), "--run", str(run.directory))
        screen.wait(_has("run watched: running", "in flight"), "the run")

        (controller,) = role_processes(run, "controller")
        with _stopped(controller):
            screen.wait(_has("! controller 0 does not answer", "keeps the books, and does not answer"), "its absence")
        screen.wait(_has("in flight", "no alarm"), "its return")

        with _stopped(int((run.directory / "bus" / "nats.pid").read_text())):
            screen.wait(_has("run watched: no broker", "what stands here was said before"), "the broker's absence")
        screen.wait(_has("run watched: running", "no alarm"), "the broker's return")

        process.send_signal(signal.SIGINT)
        ended = collect(process)
    assert ended.returncode == 0, ended.stdout
    screen.wait(_has("run watched: ended", "status --run watched tells how", "no alarm"), "the end")
    screen.press("q")
    assert screen.process.wait(timeout=10) == 0, screen.text
