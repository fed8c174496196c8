"""Every line is one JSON object with its ids, whoever logs it; stderr gets warnings as one readable line."""

import io
import json
import logging
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from areal_async.errors import UserError
from areal_async.telemetry import log


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Leave logging as it was: other tests rely on it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    for handler in handlers:
        root.removeHandler(handler)
    yield
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def _lines(directory: Path, role: str = "node") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / f"{role}.jsonl").read_text().splitlines()]


def test_lines_carry_time_level_role_and_the_bound_ids(tmp_path: Path) -> None:
    log.configure("node", tmp_path / "logs")

    with structlog.contextvars.bound_contextvars(group_id="0-1-0"):
        structlog.get_logger().info("slot.scored", reward=1.0, path=Path("a"))

    [line] = _lines(tmp_path / "logs")
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "slot.scored", "level": "info", "role": "node", "group_id": "0-1-0", "reward": 1.0, "path": "a",
    }  # fmt: skip


def test_standard_library_loggers_come_out_the_same_way(tmp_path: Path) -> None:
    log.configure("node", tmp_path)

    logging.getLogger("some.library").warning("disk at %d %%", 93)
    logging.getLogger("httpx").info("HTTP Request: POST")

    [line] = _lines(tmp_path)
    assert (line["event"], line["level"], line["role"]) == ("disk at 93 %", "warning", "node")


def test_warnings_are_logged(tmp_path: Path) -> None:
    log.configure("node", tmp_path)

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        logging.captureWarnings(True)
        warnings.warn("careful", UserWarning, stacklevel=1)

    assert "careful" in _lines(tmp_path)[0]["event"]


def test_stderr_gets_warnings_alone_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("node", tmp_path)

    structlog.get_logger().info("server.started")
    structlog.get_logger().warning("server.fenced", server_id="s0", reason="two\nlines")

    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.endswith("warning node: server.fenced server_id=s0 reason=two | lines\n")


def test_a_stack_stands_in_the_file_and_not_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("try", tmp_path)

    structlog.get_logger().warning("loop.blocked", place="mine.py:3 mine", frames=["run.py:1 run", "mine.py:3 mine"])

    assert capsys.readouterr().err.endswith("warning try: loop.blocked place=mine.py:3 mine\n")
    assert json.loads((tmp_path / "try.jsonl").read_text())["frames"] == ["run.py:1 run", "mine.py:3 mine"]


def test_exceptions_keep_their_traceback_in_the_file_and_their_sentence_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure("node", tmp_path)

    try:
        raise ValueError("bad row")
    except ValueError:
        structlog.get_logger().exception("row.refused")

    [line] = _lines(tmp_path)
    assert line["exception"][0]["exc_type"] == "ValueError"
    assert line["exception"][0]["frames"]
    error = capsys.readouterr().err
    assert error.endswith("error node: row.refused (ValueError: bad row)\n")
    assert error.count("\n") == 1


def test_failure_is_recorded_in_the_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("node", tmp_path)

    try:
        raise ValueError("the end")
    except ValueError as exc:
        log.record_failure(exc)

    [line] = _lines(tmp_path)
    assert (line["event"], line["level"]) == ("process.failed", "error")
    assert line["exception"][0]["exc_value"] == "the end"
    assert capsys.readouterr().err == ""


def test_configuring_again_moves_to_the_new_file(tmp_path: Path) -> None:
    log.configure("node", tmp_path)
    log.configure("trainer", tmp_path)

    structlog.get_logger().info("step.ended")

    assert _lines(tmp_path, "node") == []
    assert [line["role"] for line in _lines(tmp_path, "trainer")] == ["trainer"]


def test_without_a_directory_only_stderr_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("tool", None)

    structlog.get_logger().warning("something.odd")

    assert "something.odd" in capsys.readouterr().err


def test_a_log_that_cannot_be_written_is_one_sentence() -> None:
    with pytest.raises(UserError, match="log: got /proc/no/node.jsonl, need what can be written: No such file or dir"):
        log.configure("node", Path("/proc/no"))


HOSTILE = "\x1b[2J\x9b\u202e\rend\ud800"


def test_what_would_act_on_a_terminal_is_seen_in_the_file_and_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure("node", tmp_path)

    try:
        raise ValueError(HOSTILE)
    except ValueError:
        structlog.get_logger().exception(HOSTILE, reason=HOSTILE)
    logging.getLogger("user").warning("printed %s", HOSTILE)

    text = (tmp_path / "node.jsonl").read_text()
    error = capsys.readouterr().err
    assert not [one for one in text + error if one != "\n" and not one.isprintable()]
    assert _lines(tmp_path)[0]["reason"] == HOSTILE
    assert r"reason=\x1b[2J\u009b\u202e\x0dend\ud800" in error


def test_a_log_that_was_taken_away_is_made_again_with_its_folder(tmp_path: Path) -> None:
    logs = tmp_path / "run" / "logs"
    log.configure("node", logs)
    structlog.get_logger().info("first")

    shutil.rmtree(logs)
    structlog.get_logger().info("second")
    (logs / "node.jsonl").unlink()
    structlog.get_logger().info("third")
    structlog.get_logger().info("fourth")

    assert [line["event"] for line in _lines(logs)] == ["third", "fourth"]


def test_the_log_of_a_run_that_was_taken_away_makes_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("launcher", tmp_path / "run" / "logs")

    shutil.rmtree(tmp_path / "run")
    for _ in range(2):
        structlog.get_logger().info("told to nobody")

    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().err == ""


def test_lines_that_a_full_disk_does_not_take_are_counted_and_nothing_is_said_of_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure("node", tmp_path)
    path = tmp_path / "node.jsonl"
    path.unlink()
    path.symlink_to("/dev/full")

    for number in range(3):
        structlog.get_logger().info("lost", number=number)
    path.unlink()
    structlog.get_logger().info("there is room")

    told, after = _lines(tmp_path)
    assert (told["event"], told["level"], told["num_lines"]) == ("log.left_out", "warning", 3)
    assert after["event"] == "there is room"
    assert capsys.readouterr().err == ""


def test_a_warning_that_stderr_does_not_take_stands_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.configure("node", tmp_path)
    said = io.StringIO()

    class Full(io.StringIO):
        def write(self, text: str, /) -> int:
            said.write(text)
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    structlog.get_logger().warning("server.fenced")

    assert [line["event"] for line in _lines(tmp_path)] == ["server.fenced"]
    assert said.getvalue().count("\n") == 1


def test_a_mistake_in_a_line_is_still_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("node", tmp_path)

    logging.getLogger("user").info("%d", "no number")

    assert "--- Logging error ---" in capsys.readouterr().err
