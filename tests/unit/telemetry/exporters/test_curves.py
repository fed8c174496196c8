"""What TensorBoard would read, read back from its event files."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

from areal_async.config.settings import MetricsSettings, RunSettings, Settings
from areal_async.errors import UserError
from areal_async.monitor.boards import BoardWriter
from areal_async.telemetry.exporters.curves import tag_of


def _settings(tmp_path: Path, **metrics: Any) -> Settings:
    (tmp_path / "seen").mkdir(exist_ok=True)
    return Settings(run=RunSettings(name="seen", directory=tmp_path), metrics=MetricsSettings(**metrics))


def _write(path: Path, *lines: dict[str, Any], anew: bool = False) -> None:
    if anew:
        path.unlink()
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def _step(step: int, reward: float) -> dict[str, Any]:
    return {"step": step, "weights_version": f"1-{step}", "reward_mean": reward, "time_train_s": 1.5}


def _curves(directory: Path) -> dict[str, dict[int, float]]:
    """Read as TensorBoard does: a start of a session takes back what was said of its step and later ones."""
    board = EventAccumulator(str(directory))
    board.Reload()
    return {tag: {event.step: round(event.value, 6) for event in board.Scalars(tag)} for tag in board.Tags()["scalars"]}


def _num_written(directory: Path, tag: str) -> int:
    """Return how many values of a curve stand in the files."""
    events = (event for path in directory.iterdir() for event in RawEventFileLoader(str(path)).Load())
    return sum(value.tag == tag for event in events for value in Event.FromString(event).summary.value)


def test_steps_and_evaluations_become_curves_once_each(tmp_path: Path) -> None:
    """Whatever the number of looks at the files."""
    follower = BoardWriter(_settings(tmp_path))
    _write(tmp_path / "seen" / "metrics.jsonl", _step(1, 0.1), _step(2, 0.2))
    follower.catch_up()
    _write(tmp_path / "seen" / "metrics.jsonl", _step(3, 0.3))
    _write(tmp_path / "seen" / "eval.jsonl", {"eval_id": "1-2", "workflow": "gsm8k", "accuracy": 0.5, "num_failed": 0})
    follower.close()
    assert _num_written(tmp_path / "seen" / "tensorboard", "reward/mean") == 3
    curves = _curves(tmp_path / "seen" / "tensorboard")
    assert curves["reward/mean"] == {1: 0.1, 2: 0.2, 3: 0.3}
    assert curves["time/time_train_s"] == {1: 1.5, 2: 1.5, 3: 1.5}
    assert curves["eval/gsm8k/accuracy"] == {2: 0.5}


def test_steps_that_are_done_anew_replace_those_they_replace_in_the_file(tmp_path: Path) -> None:
    """A restored trainer rewrites ``metrics.jsonl``; the board follows it."""
    follower, path = BoardWriter(_settings(tmp_path)), tmp_path / "seen" / "metrics.jsonl"
    _write(path, _step(1, 0.1), _step(2, 0.2), _step(3, 0.3))
    follower.catch_up()
    _write(path.with_suffix(".tmp"), _step(1, 0.1), _step(2, 0.7))
    path.with_suffix(".tmp").rename(path)
    follower.close()
    assert _curves(tmp_path / "seen" / "tensorboard")["reward/mean"] == {1: 0.1, 2: 0.7}


def test_a_resumed_run_writes_its_history_once(tmp_path: Path) -> None:
    """Another process follows the same files."""
    settings = _settings(tmp_path)
    _write(tmp_path / "seen" / "metrics.jsonl", _step(1, 0.1))
    for _ in range(2):
        BoardWriter(settings).close()
    assert _num_written(tmp_path / "seen" / "tensorboard", "reward/mean") == 1


def test_a_disk_that_is_full_ends_the_curves_and_neither_the_run_nor_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever comes after it is neither raised nor waited for, however much of it."""
    follower = BoardWriter(_settings(tmp_path))
    path = tmp_path / "seen" / "metrics.jsonl"
    _write(path, _step(1, 0.1))
    follower.catch_up()

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tensorboard.summary.writer.record_writer.RecordWriter.write", fail)
    for step in range(2, 100):
        _write(path, _step(step, 0.1))
        follower.catch_up()
    follower.close()
    assert _curves(tmp_path / "seen" / "tensorboard")["reward/mean"] == {1: 0.1}


def test_nothing_is_written_where_it_is_not_wanted(tmp_path: Path) -> None:
    """``metrics.tensorboard: false``."""
    _write_to = tmp_path / "seen" / "metrics.jsonl"
    follower = BoardWriter(_settings(tmp_path, tensorboard=False))
    _write(_write_to, _step(1, 0.1))
    follower.close()
    assert not (tmp_path / "seen" / "tensorboard").exists()


def test_a_run_goes_on_without_a_board_that_is_not_installed_and_says_so_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the default to write one, and no default job needs it."""
    monkeypatch.setitem(sys.modules, "tensorboard", None)

    with capture_logs() as logs:
        follower = BoardWriter(_settings(tmp_path))
        _write(tmp_path / "seen" / "metrics.jsonl", _step(1, 0.1))
        follower.close()

    assert [(line["event"], line["cause"]) for line in logs] == [
        ("curves.no_tensorboard", "metrics.tensorboard: got true, need the package tensorboard")
    ]
    assert not (tmp_path / "seen" / "tensorboard").exists()


def test_a_tracker_that_is_not_installed_is_said_in_one_sentence(tmp_path: Path) -> None:
    """Before the run starts."""
    with pytest.raises(UserError, match=r"need the package wandb; pip install areal-async\[wandb\]"):
        BoardWriter(_settings(tmp_path, wandb_project="mine"))


def test_a_numbers_group_is_told_by_its_first_word() -> None:
    """Boards show ``<group>/<name>`` together."""
    assert tag_of("time_step_s") == "time/time_step_s"
    assert tag_of("reward/gsm8k") == "reward/gsm8k"
    assert tag_of("something_new") == "other/something_new"


def test_no_launcher_loads_torch_for_its_curves(tmp_path: Path) -> None:
    """It takes seconds, in which its event loop stands."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from areal_async.telemetry.exporters.curves import Curves\n"
        "from areal_async.config.settings import Settings\n"
        "curves = Curves(Settings(), Path(sys.argv[1]))\n"
        "curves.add({'reward_mean': 0.5}, step=1)\n"
        "curves.close()\n"
        "sys.exit('torch' in sys.modules)\n"
    )

    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0
    assert _curves(tmp_path / "tensorboard") == {"reward/mean": {1: 0.5}}
