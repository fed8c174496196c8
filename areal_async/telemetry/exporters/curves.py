"""The numbers of every step and evaluation, written to TensorBoard and, on request, to Weights & Biases."""

import importlib.util
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from areal_async.config.settings import Settings
from areal_async.errors import UserError

TAGS = {
    "reward_mean": "reward/mean",
    "reward_std": "reward/std",
    "staleness_mean": "staleness/mean",
    "staleness_max": "staleness/max",
}
"""Metric -> its tag, where the first word does not give its group."""
GROUPS = {
    "time": "time", "logprob": "gap", "ratio": "policy", "clip": "policy", "entropy": "policy", "kl": "policy",
    "behave": "policy", "num": "batch", "groups": "batch", "output": "batch", "truncated": "batch",
    "dropped": "batch", "failed": "batch", "temperature": "batch", "value": "critic", "loss": "policy",
    "grad": "optimizer", "lr": "optimizer",
}  # fmt: skip


log = structlog.get_logger()


def tag_of(key: str) -> str:
    """Return a metric's tag, ``<group>/<name>``: boards show a group's curves together."""
    if key in TAGS or "/" in key:
        return TAGS.get(key, key)
    return f"{GROUPS.get(key.partition('_')[0], 'other')}/{key}"


class Curves:
    """The boards of one run."""

    def __init__(self, settings: Settings, run_directory: Path) -> None:
        """Start anew: what an earlier start of the run wrote is to be written again.

        Raises:
            UserError: Weights & Biases is asked for and not installed.
        """
        self._directory = run_directory / "tensorboard"
        self._has_board = settings.metrics.tensorboard and _has_tensorboard()
        self._board: _Board | None = None
        self._num_rewinds = 0
        self._tracker = _start_wandb(settings, run_directory) if settings.metrics.wandb_project else None
        if self._has_board:
            shutil.rmtree(self._directory, ignore_errors=True)

    def rewind(self, *, to_step: int) -> None:
        """Have boards forget the steps after ``to_step``, which are done again."""
        if self._board is not None:
            self._board.close()
            self._num_rewinds += 1
            self._board = _Board(self._directory, self._num_rewinds, purge_step=to_step + 1)

    def add(self, line: Mapping[str, Any], *, step: int, prefix: str = "") -> None:
        """Write the numbers of one line."""
        scalars = {
            (prefix + key if prefix else tag_of(key)): float(value)
            for key, value in line.items()
            if isinstance(value, int | float) and key != "step"
        }
        if self._has_board:
            self._board = self._board or _Board(self._directory, self._num_rewinds)
            self._board.add(scalars, step)
        if self._tracker is not None:
            self._tracker.log({**scalars, "step": step})

    def flush(self) -> None:
        """Make what was added visible."""
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        """Write the rest and close the boards."""
        if self._board is not None:
            self._board.close()
        if self._tracker is not None:
            self._tracker.finish()


class _Board:
    """One file of events.

    The library's own ``EventFileWriter`` writes from a thread, which an error ends silently, as on a full disk: the
    next ``add`` then blocks without end. Here the error is raised.
    """

    def __init__(self, directory: Path, number: int, *, purge_step: int | None = None) -> None:
        # Imported here and below: a command that writes no curves need not load it.
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(parents=True, exist_ok=True)
        # Its readers know the file by its name, and read a directory's in their order.
        path = directory / f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{number:06d}"
        self._writer = RecordWriter(path.open("xb"))
        self.flush, self.close = self._writer.flush, self._writer.close
        self._write(file_version="brain.Event:2")
        if purge_step is not None:
            self._write(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Write the numbers of one step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(step=step, summary=Summary(value=values))

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.write(Event(wall_time=time.time(), **fields).SerializeToString())


def _has_tensorboard() -> bool:
    """Say whether event files can be written, and in one sentence of the log why not: they are no reason not to run."""
    is_installed = importlib.util.find_spec("tensorboard") is not None
    if not is_installed:
        log.info(
            "curves.no_tensorboard",
            cause="metrics.tensorboard: got true, need the package tensorboard",
            cure="pip install areal-async[tensorboard], or set it to false",
        )
    return is_installed


def _start_wandb(settings: Settings, run_directory: Path) -> Any:
    try:
        import wandb
    except ImportError as exc:
        raise UserError(
            f"metrics.wandb_project: got {settings.metrics.wandb_project!r}, need the package wandb; "
            "pip install areal-async[wandb], or leave it out"
        ) from exc
    run = wandb.init(
        project=settings.metrics.wandb_project,
        dir=str(run_directory),
        name=settings.run.name,
        id=settings.run.name,
        resume="allow",
        config=settings.model_dump(mode="json"),
    )
    # Steps that a restored run does again come a second time, which the tracker's own counter would refuse.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run
