"""From Python a command is started and followed: what it is given, what it raises, and how it is interrupted."""

import asyncio
import os
import signal
import sys
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import areal_async
from areal_async import runs, user_files
from areal_async.cli.evaluate import Result
from areal_async.errors import PipelineError, UserError
from areal_async.user_files import import_file


async def plain(prompt: Any, policy: Any) -> float:
    return 1.0


def in_a_cell() -> Any:
    space: dict[str, Any] = {}
    exec(compile("async def cell(prompt, policy): return 1.0", "<ipython-input-1>", "exec"), space)
    return space["cell"]


def test_a_function_is_named_by_its_file_and_a_path_as_it_is() -> None:
    assert runs._spec(plain) == f"{os.path.relpath(__file__)}:plain"
    assert runs._spec(Path("a b/mine.py")) == "a b/mine.py"
    assert runs._spec("mine.py:other") == "mine.py:other"
    assert runs._spec(None) is None


def test_a_function_that_no_other_process_can_import_is_refused_with_what_to_do() -> None:
    async def local(prompt: Any, policy: Any) -> float:
        return 1.0

    with pytest.raises(UserError, match=r"got .*<locals>.local, need a coroutine at the top level of a file"):
        areal_async.train(local)
    with pytest.raises(UserError, match=r"got cell, which is in no file but in a notebook .* %%writefile cell.py"):
        areal_async.train(in_a_cell())
    with pytest.raises(UserError, match="in no file"):
        areal_async.evaluate(in_a_cell())


def test_scores_are_what_the_command_answers_with() -> None:
    assert [(one.name, one.type) for one in fields(areal_async.Scores)] == [
        (one.name, one.type) for one in fields(Result)
    ]


def test_settings_are_written_as_the_command_line_has_them() -> None:
    settings = {
        "run": {"steps": 2, "name": "--x"},
        "trainer": {"betas": [0.9, 0.99], "lora": {"rank": 4}, "elastic": True},
        "model": {"path": Path("a b")},
        "tasks": {"0": {"eval": {"limit": None}}},
    }

    assert [*runs._words(settings)] == [
        "--run.steps=2",
        "--run.name=--x",
        "--trainer.betas=[0.9,0.99]",
        "--trainer.lora.rank=4",
        "--trainer.elastic=true",
        "--model.path=a b",
        "--tasks.0.eval.limit=null",
    ]
    with pytest.raises(UserError, match=r"steps: got 3, need a section of settings as a dict: steps=\{...\}"):
        areal_async.train("mine.py", steps=3)


def test_what_the_command_would_say_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UserError, match="^workflow: no file nothing.py; name a Python file"):
        areal_async.train("nothing.py", quiet=True)
    with pytest.raises(UserError, match=r"run.stepz.* did you mean run.steps"):
        areal_async.train("nothing.py", run={"stepz": 1})
    assert list(tmp_path.iterdir()) == []


def _have_started(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Have a program in the place of the command: the command itself takes seconds to start."""
    monkeypatch.setattr(runs, "module_command", lambda *_: [sys.executable, "-c", code])


def test_the_last_line_of_what_failed_is_the_error_and_the_others_are_passed_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _have_started(monkeypatch, "import sys; print('step'); print('careful\\nit failed', file=sys.stderr); sys.exit(1)")
    heard: list[str] = []

    with pytest.raises(PipelineError, match="^it failed$"):
        runs._follow([], heard.append)
    assert heard == ["step\n"]
    assert capsys.readouterr().err == "careful\n"


@pytest.mark.parametrize("is_within_a_loop", [False, True])
def test_an_interrupt_reaches_the_command_once_and_is_raised_when_that_has_ended(
    is_within_a_loop: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code = f"""
import signal, sys, time
def end(*_):
    open({str(tmp_path / "ended")!r}, "a").write("once ")
    sys.exit(0)
signal.signal(signal.SIGINT, end)
print("ready", flush=True)
signal.pause()
"""
    _have_started(monkeypatch, code)

    def interrupt(_: str) -> None:
        threading.Timer(0, os.kill, (os.getpid(), signal.SIGINT)).start()

    async def cell() -> None:
        runs._follow([], interrupt)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell()) if is_within_a_loop else runs._follow([], interrupt)
    assert (tmp_path / "ended").read_text() == "once "


def test_a_script_is_imported_up_to_where_it_starts_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(user_files, "_own_folders", [])
    (tmp_path / "script.py").write_text(
        "import areal_async\nasync def answer(prompt, policy): return 1.0\n"
        "try:\n    areal_async.train(answer)\nexcept Exception:\n    pass\nraise RuntimeError('not reached')\n"
    )

    module = import_file(tmp_path / "script.py", what="workflow")

    assert module.answer.__name__ == "answer"
    assert not user_files.is_importing()
