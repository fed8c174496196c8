"""The places where processes run, by their names in ``launch.backend``."""

from collections.abc import Callable, Mapping

from areal_async.launch.backend import Backend
from areal_async.launch.local import LocalBackend
from areal_async.launch.slurm import SlurmBackend

BACKENDS: Mapping[str, Callable[[], Backend]] = {"local": LocalBackend, "slurm": SlurmBackend}
