"""The door: cheap help, suggestions, one sentence for what a user or a run did wrong, a traceback for our bugs."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from areal_async.cli.main import VERBS, expected_error, main, split_overrides
from areal_async.errors import BusError, PipelineError, UserError
from areal_async.process.host import PLACES

HEAVY = {"anyio", "nats", "numpy", "pydantic", "rich", "structlog", "textual", "torch", "transformers"}


def _raise(error: BaseException) -> Callable[..., int]:
    def run(*_: object) -> int:
        raise error

    return run


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["try", "--help"], ["node", "--help"]])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    code = (
        "import sys\n"
        "from areal_async.cli.main import main\n"
        f"try: main({words!r})\n"
        "except SystemExit as exc: assert exc.code == 0\n"
        "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "usage: python -m areal_async" in done.stdout
    assert HEAVY.isdisjoint(done.stderr.split())


def test_every_verb_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0

    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in VERBS)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["rum"], "unknown verb rum; did you mean run"),
        (["zzz"], "unknown verb zzz; need one of run, init, try, eval, compare, sft, "),
        (["run", "--frsh"], "unknown option --frsh; did you mean --fresh"),
        (["trainer", "--run-directory", "x", "--run.steps", "3"], "unknown option --run.steps; need one of "),
        (["node", "--run-directory", "x"], "--node-id: got none, need the node's own among those of the run"),
        (["run"], "run: got neither a workflow nor settings; name FILE.py or an environment, --config FILE.yaml, or"),
        (["run", "a.py", "b.py"], "unrecognized arguments: b.py; see "),
        (["run", "--config", "no.yaml"], "configuration: no file no.yaml; "),
        (["sft", "--run.name", "x"], "dataset: got nothing, need a value; "),
        (["reward-model", "--run.name", "x"], "dataset: got nothing, need a value; "),
        (["controller", "--run-directory", "no/such"], "configuration: no file no/such/config.yaml; "),
    ],
)
def test_mistakes_get_one_sentence_and_status_2(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2

    error = capsys.readouterr().err
    assert error.startswith(sentence)
    assert error.count("\n") == 1


def test_failed_run_gets_one_sentence_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("areal_async.cli.roles.run", _raise(BusError("stream\nis gone")))

    assert main(["controller", "--run-directory", "x"]) == 1
    assert capsys.readouterr().err == "stream is gone\n"


def test_grouped_errors_are_told_as_the_one_that_explains_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group = ExceptionGroup("", [BusError("gone"), ExceptionGroup("", [UserError("no column answer")])])
    monkeypatch.setattr("areal_async.cli.roles.run", _raise(group))

    assert main(["controller", "--run-directory", "x"]) == 2
    assert capsys.readouterr().err == "no column answer\n"


def test_group_with_a_bug_in_it_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    group = ExceptionGroup("", [PipelineError("gone"), ZeroDivisionError()])
    monkeypatch.setattr("areal_async.cli.roles.run", _raise(group))

    assert expected_error(group) is None
    with pytest.raises(ExceptionGroup):
        main(["controller", "--run-directory", "x"])


def test_interruption_has_the_status_that_shells_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_async.cli.roles.run", _raise(KeyboardInterrupt()))

    assert main(["controller", "--run-directory", "x"]) == 130


@pytest.mark.parametrize(
    ("words", "own", "overrides"),
    [
        (["f.py", "--run.steps", "5"], ["f.py"], ["--run.steps", "5"]),
        (["--run.steps", "5", "f.py"], ["f.py"], ["--run.steps", "5"]),
        (["--run.steps=5", "f.py"], ["f.py"], ["--run.steps=5"]),
        (["--config", "c.yaml", "--tasks", "[]"], ["--config", "c.yaml"], ["--tasks", "[]"]),
        (["--config=c.yaml", "--fresh", "f.py"], ["--config=c.yaml", "--fresh", "f.py"], []),
        (["--inference.context_length", "-1", "f.py"], ["f.py"], ["--inference.context_length", "-1"]),
    ],
)
def test_value_of_a_setting_is_never_taken_for_the_workflow(
    words: list[str], own: list[str], overrides: list[str]
) -> None:
    assert split_overrides(words, VERBS["run"]) == (own, overrides)


@pytest.mark.parametrize("verb", ["run", "try", "sft", "reward-model", "replay"])
def test_help_settings_lists_every_setting_with_its_sentence(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help-settings"]) == 0

    text = capsys.readouterr().out
    assert "--trainer.lr (" in text
    assert "    Peak learning rate of AdamW." in text


ANSWERS = """
import sys
from rich.console import Console
from areal_async.cli import status
from areal_async.cli.main import main
from areal_async.process.stdio import say


def draw_in_a_group():
    try:
        Console().print("1")
    except BaseException as exc:
        raise BaseExceptionGroup("tasks", [exc])


status.run = lambda *_: {how} or 0
sys.exit(main(["status", "--run", "x"]))
"""
LOST = "stdout: got No space left on device, need what can be written; what is said from here on goes nowhere\n"


@pytest.mark.parametrize("how", ["Console().print('1')", "draw_in_a_group()", "say('1')", "print('1')"])
def test_a_verb_whose_answer_cannot_be_written_ends_so_and_says_it_unless_its_reader_has_gone(how: str) -> None:
    command = [sys.executable, "-c", ANSWERS.format(how=how)]
    reader, writer = os.pipe()
    os.close(reader)  # as `head` does when it has its lines

    unread = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    with open("/dev/full", "w") as full:
        lost = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)

    assert (unread.returncode, unread.stderr) == (141, "")
    assert (lost.returncode, lost.stderr) == (2, LOST)


def test_an_error_of_a_file_that_is_not_stdout_is_a_bug_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_async.cli.status.run", _raise(OSError(28, "No space left on device")))

    with pytest.raises(OSError, match="No space left"):
        main(["status", "--run", "x"])


@pytest.mark.parametrize(
    ("code", "status", "last"),
    [
        pytest.param("sys.exit(main(['--version']))", 141, "", id="a verb that only prints ends, as of SIGPIPE"),
        pytest.param("say('1'); say('2'); print('still here', file=sys.stderr)", 0, "still here\n", id="a run goes on"),
    ],
)
def test_whoever_reads_no_more_of_it_sees_no_traceback(code: str, status: int, last: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as `head` does when it has its lines
    imports = "import sys\nfrom areal_async.cli.main import main\nfrom areal_async.process.stdio import say\n"

    done = subprocess.run([sys.executable, "-c", imports + code], stdout=writer, stderr=subprocess.PIPE, text=True)

    os.close(writer)
    assert (done.returncode, done.stderr) == (status, last)


def test_a_process_is_started_with_the_gpus_that_its_launcher_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything asks how many there are."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    monkeypatch.setenv(PLACES, "1")

    assert main(["trainer", "--run-directory", "/nowhere"]) == UserError.exit_code
    assert "GPUs: got 1 on host" in capsys.readouterr().err
