"""A live run is watched in a terminal emulator, and the README's chapter "Operating a run" is done to it.

``top`` is legible at two sizes, with nothing beyond the edge, it is drawn anew by itself, and its keys work.
Every command of the chapter is run, and its client, which knows nothing of this package.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from areal_async import events, waits
from areal_async.bus.streams import all_streams
from areal_async.subjects import Names
from tests.e2e.terminal import SHOWN_WITHIN_S, Terminal
from tests.e2e.test_readme import REPOSITORY, blocks, commands
from tests.e2e.test_run import Run, collect, wait_until

pytestmark = [pytest.mark.timeout(240), pytest.mark.whole_runs]

COLUMNS_80, COLUMNS_200 = (80, 24), (200, 50)
ORDERS = ("status", "top", "pause", "resume", "eval", "stop")


def _has(*pieces: str) -> Callable[[str], bool]:
    return lambda text: all(piece in text for piece in pieces)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One run for all of this file, under the README's name; the last test ends it."""
    directory = tmp_path_factory.mktemp("operating") / "runs"
    directory.mkdir()
    run = Run(directory, "gsm8k", run__steps=5000)
    with run.start() as process:
        run.wait_for_step(2, process)
        yield run
        with suppress(subprocess.TimeoutExpired):  # stopped by the last test, it still sums up
            process.wait(timeout=20)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        ended = collect(process)
    assert ended.returncode == 0, ended.stdout


def test_a_run_is_watched_paused_and_resumed_on_a_screen_of_either_size(live: Run) -> None:
    run = live
    small = Terminal(COLUMNS_80, "--run", str(run.directory), "--by", "ann")
    small.wait(_has("run gsm8k: running", "tokens/s generated", "controller 0", "trainer 0", "no alarm"), "the run")
    for row, name in enumerate(("reward", "speed", "a step", "staleness", "groups", "stored"), start=1):
        assert small.lines[row].startswith(name), small.text
    assert re.search(r"staleness.* █+ \d+ %", small.text), small.text
    assert small.lines[-1].startswith("q quit"), small.text

    small.press("2")
    small.wait(_has("tokens/s  requests  first ms", "0-0", "serves"), "the servers")
    small.wait(lambda text: re.search(r"0-0 +1-\d+ +[1-9]\d* +\d+/\d+ +\d+ ", text) is not None, "its speed")
    small.press("\x1b[C")
    small.wait(_has("who waits", "for what", "trainer"), "the waits")
    small.press("4")
    small.wait(lambda text: "waits for" in text and re.search(r"\d-\d+-\d", text) is not None, "the leases")
    small.press("5")
    small.wait(_has("weights.announced", "by newest"), "the events")
    small.press("s")
    small.wait(_has("by oldest", "role.started"), "the events, sorted")
    small.press("/role.st\r")
    small.wait(lambda text: "role.started" in text and "announced" not in text, "the events that are wanted")
    small.press("\x1b")
    small.wait(_has("weights.announced"), "all of them")
    small.press("?")
    small.wait(_has("leave; the run goes on"), "the help")
    small.press("?1")
    small.resize(120, 40)
    small.wait(_has("last events", "waits for"), "the larger screen")
    small.resize(*COLUMNS_80)
    small.wait(lambda text: "last events" not in text and text.splitlines()[-1].startswith("q quit"), "the smaller one")

    small.press("p")
    small.wait(_has("run gsm8k: paused", "by ann"), "the pause")
    assert small.wait(_has("trainer 0", "waiting"), "the trainer's rest") < SHOWN_WITHIN_S
    screens = set()
    while len(screens) < 3:  # "... s ago" goes on: it is drawn anew though nothing moves
        small.wait(lambda text: text not in screens, "another screen")
        screens.add(small.text)
    small.press("q")
    assert small.process.wait(timeout=10) == 0, small.text

    wide = Terminal(
        COLUMNS_200, "--run", "gsm8k", "--bus.url", (run.directory / "bus" / "url").read_text().strip(),
        "--bus.credentials", str(run.directory / "credentials" / "operator.nk"),
    )  # fmt: skip
    wide.wait(_has("run gsm8k: paused", "/5000", "of at most 2", "last events", "run.ordered"), "the run from afar")
    wide.press("r")
    wide.wait(_has("run gsm8k: running"), "its order")
    wide.press("q")
    assert wide.process.wait(timeout=10) == 0, wide.text


def _chapter() -> str:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"^## Operating a run\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    return str(found)


def test_every_command_and_the_plain_client_of_the_chapter_do_what_it_says(live: Run) -> None:
    directory = live.directory.parents[1]
    (own, change, tool), (client,) = (
        [body for kind, body in blocks(_chapter()) if kind == language] for language in ("console", "python")
    )
    words = [shlex.split(command, comments=True)[1:] for command, _ in commands(own)]
    assert [one[2] for one in words] == list(ORDERS)
    ((changing, _),) = commands(change)

    (directory / "plain.py").write_text(client)
    told = _run(directory, "plain.py").splitlines()
    assert sorted(told[:3]) == ["areal-controller 0", "areal-node 0", "areal-trainer 0"]
    assert [line.split()[0] for line in told[3:5]] == ["tickets", "trajectories"]
    assert all(line.split()[1].isdecimal() for line in told[3:5])
    assert told[5:] == ["pause True", "resume False"]
    assert _state(directory) == "running"
    _run(directory, *shlex.split(changing)[1:])
    assert _status(directory)["changes"] == {"trainer.lr": 1e-6, "rollout.max_staleness": 1}
    for one in words:
        if one[2] == "top":
            terminal = Terminal(COLUMNS_80, *one[3:], directory=directory)
            terminal.wait(lambda text: "run gsm8k: running" in text, "the run in top")
            terminal.press("q")
            assert terminal.process.wait(timeout=10) == 0
            continue
        _run(directory, *one)
        if one[2] in ("pause", "resume"):
            assert _state(directory) == ("paused" if one[2] == "pause" else "running")
    wait_until(lambda: _state(directory) == "not running", "the run to end")

    asked = re.findall(r"areal\.gsm8k\.(\S+)", tool)
    assert asked == ["status.controller.0", "control.pause"], "the tool's subjects are the plain client's"


def test_the_table_of_the_chapter_names_every_event_and_every_stream() -> None:
    chapter = _chapter()
    kinds = {
        kind.__struct_config__.tag
        for kind in [*vars(events).values(), waits.Stall]
        if isinstance(kind, type) and issubclass(kind, events.Event) and "." in str(kind.__struct_config__.tag)
    }
    streams = {stream.rpartition("_")[2] for stream in all_streams(Names("x")) if not stream.startswith("KV")}

    assert [kind for kind in kinds if f"`{kind}`" not in chapter] == []
    assert [stream for stream in streams if f"_{stream}`" not in chapter] == []


def _run(directory: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=directory, capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
    return done.stdout


def _status(directory: Path) -> dict[str, Any]:
    time.sleep(0.2)
    status: dict[str, Any] = json.loads(_run(directory, "-m", "areal_async", "status", "--run", "gsm8k", "--json"))
    return status


def _state(directory: Path) -> str:
    return str(_status(directory)["state"])
