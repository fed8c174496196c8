"""Every step's and evaluation's numbers to TensorBoard and, on request, to Weights & Biases."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_async.errors import UserError
from areal_async.settings import Settings

TAGS = {
    "reward_mean": "reward/mean",
    "reward_std": "reward/std",
    "staleness_mean": "staleness/mean",
    "staleness_max": "staleness/max",
}
"""Where a number's place on the board is not told by its first word."""
GROUPS = {
    "time": "time", "logprob": "gap", "ratio": "policy", "clip": "policy", "entropy": "policy", "kl": "policy",
    "behave": "policy", "num": "batch", "groups": "batch", "output": "batch", "truncated": "batch",
    "dropped": "batch", "failed": "batch", "value": "critic", "loss": "policy", "grad": "optimizer", "lr": "optimizer",
}  # fmt: skip


def tag_of(key: str) -> str:
    """Return a metric's tag, ``<group>/<name>``: boards show a group's curves together."""
    if key in TAGS or "/" in key:
        return TAGS.get(key, key)
    return f"{GROUPS.get(key.partition('_')[0], 'other')}/{key}"


class Curves:
    """The boards that a run's numbers go to."""

    def __init__(self, settings: Settings, run_directory: Path) -> None:
        """Start anew: what an earlier start of the run wrote is to be written again.

        Raises:
            UserError: Weights & Biases is asked for and not installed.
        """
        self._directory = run_directory / "tensorboard"
        self._has_board = settings.metrics.tensorboard
        self._board: Any = None
        self._num_rewinds = 0
        self._tracker = _start_wandb(settings, run_directory) if settings.metrics.wandb_project else None
        if self._has_board:
            shutil.rmtree(self._directory, ignore_errors=True)

    def rewind(self, *, to_step: int) -> None:
        """Have boards forget what they were given of later steps, which are done anew."""
        if self._board is not None:
            self._board.close()
            self._num_rewinds += 1
            self._board = _open_board(self._directory, self._num_rewinds, purge_step=to_step + 1)

    def add(self, line: Mapping[str, Any], *, step: int, prefix: str = "") -> None:
        """Write the numbers of one line."""
        scalars = {
            (prefix + key if prefix else tag_of(key)): float(value)
            for key, value in line.items()
            if isinstance(value, int | float) and key != "step"
        }
        if self._has_board:
            self._board = self._board or _open_board(self._directory, self._num_rewinds)
            for tag, value in scalars.items():
                self._board.add_scalar(tag, value, step)
        if self._tracker is not None:
            self._tracker.log({**scalars, "step": step})

    def flush(self) -> None:
        """Make what was added visible."""
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        """Write what is left."""
        if self._board is not None:
            self._board.close()
        if self._tracker is not None:
            self._tracker.finish()


def _open_board(directory: Path, number: int, *, purge_step: int | None = None) -> Any:
    # Imported here: a command that writes no curves need not load it.
    from tensorboardX import SummaryWriter

    # Numbered: the library names a file by the second, and would open the last one again.
    return SummaryWriter(str(directory), purge_step=purge_step, filename_suffix=f".{number}")


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
