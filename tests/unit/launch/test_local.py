"""Children write to their output, die with the launcher, and leave their last sentence."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from areal_async.errors import PipelineError
from areal_async.launch.backend import ProcessSpec
from areal_async.launch.local import LocalBackend
from tests.brokers import until

pytestmark = pytest.mark.anyio


def _spec(code: str, output: Path | None, **environment: str) -> ProcessSpec:
    return ProcessSpec(name="child", command=(sys.executable, "-c", code), environment=environment, output=output)


async def test_output_of_both_streams_is_kept_after_what_is_there(tmp_path: Path) -> None:
    output = tmp_path / "logs" / "child.out"
    output.parent.mkdir()
    output.write_text("earlier\n")
    code = "import os, sys; print(os.environ['GREETING'], flush=True); sys.exit('bye')"

    process = await LocalBackend().start(_spec(code, output, GREETING="hello"))
    status = await process.wait()

    assert status == 1
    assert output.read_text() == "earlier\nhello\nbye\n"
    assert process.last_sentence() == "bye"


@pytest.mark.parametrize("made_again", [True, False])
async def test_child_whose_output_is_taken_away_has_the_last_sentence_of_what_is_there(
    tmp_path: Path, made_again: bool
) -> None:
    output = tmp_path / "child.out"
    output.write_text("earlier\n" * 100)
    process = await LocalBackend().start(_spec("pass", output))
    await process.wait()

    output.unlink()
    if made_again:
        output.write_text("dying of \x1b[2J\n")

    assert process.last_sentence() == ("dying of \\x1b[2J" if made_again else "")


async def test_silent_child_has_no_last_sentence_of_an_earlier_one(tmp_path: Path) -> None:
    output = tmp_path / "child.out"
    output.write_text("earlier\n")

    process = await LocalBackend().start(_spec("pass", output))
    await process.wait()

    assert process.last_sentence() == ""


async def test_last_sentence_of_a_child_that_ended_before_its_start_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def open_and_wait(*arguments: Any, **options: Any) -> anyio.abc.Process:
        process = await open_process(*arguments, **options)
        await process.wait()  # as on a busy machine
        return process

    open_process = anyio.open_process
    monkeypatch.setattr("anyio.open_process", open_and_wait)

    process = await LocalBackend().start(_spec("import sys; sys.exit('bye')", tmp_path / "child.out"))

    assert process.last_sentence() == "bye"


async def test_last_sentence_of_a_group_of_exceptions_is_not_the_frame_around_it(tmp_path: Path) -> None:
    code = "raise ExceptionGroup('two', [ValueError('first'), KeyError('second')])"

    process = await LocalBackend().start(_spec(code, tmp_path / "child.out"))
    await process.wait()

    assert process.last_sentence() == "KeyError: 'second'"


async def test_kill_takes_the_grandchildren_along(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    process = await LocalBackend().start(_spec(code, tmp_path / "out"))
    grandchild = int(await _first_line(tmp_path / "out"))

    process.kill()
    status = await process.wait()

    assert status == -signal.SIGKILL
    await until(lambda: not _is_alive(grandchild))


async def test_child_dies_with_the_launcher_even_when_that_is_killed(tmp_path: Path) -> None:
    launcher_code = (
        "import anyio, sys\n"
        "from pathlib import Path\n"
        "from areal_async.launch.backend import ProcessSpec\n"
        "from areal_async.launch.local import LocalBackend\n"
        "async def main():\n"
        "    code = 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'\n"
        "    process = await LocalBackend().start(ProcessSpec(\n"
        "        name='child', command=(sys.executable, '-c', code), environment={}, output=Path(sys.argv[1])))\n"
        "    await process.wait()\n"
        "anyio.run(main)\n"
    )
    launcher = await anyio.open_process([sys.executable, "-c", launcher_code, str(tmp_path / "out")])
    try:
        child = int(await _first_line(tmp_path / "out"))
    finally:
        launcher.kill()
        await launcher.wait()
        await launcher.aclose()

    await until(lambda: not _is_alive(child))


async def test_program_that_is_not_there_ends_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(PipelineError, match="child: cannot be started"):
        await LocalBackend().start(_spec("pass", tmp_path / "file" / "out"))


async def test_ending_a_child_that_has_ended_does_nothing(tmp_path: Path) -> None:
    process = await LocalBackend().start(_spec("pass", tmp_path / "out"))
    await process.wait()

    process.terminate()
    process.kill()

    assert await process.wait() == 0


async def _first_line(path: Path) -> str:
    await until(lambda: path.exists() and path.read_text().endswith("\n"))
    return _lines(path)[0]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def _is_alive(pid: int) -> bool:
    """Whether it still runs; one that nobody has reaped yet does not."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"
