"""The places where processes run, by their names in ``launch.backend``."""

from collections.abc import Callable, Mapping

from areal_async.config.launch import LaunchSettings
from areal_async.launch.backend import Backend
from areal_async.launch.hosts import HostsBackend
from areal_async.launch.local import LocalBackend
from areal_async.launch.slurm import SlurmBackend

BACKENDS: Mapping[str, Callable[[LaunchSettings], Backend]] = {
    "local": lambda launch: HostsBackend(launch) if launch.hosts else LocalBackend(),
    "slurm": lambda _: SlurmBackend(),
}


def make_backend(launch: LaunchSettings) -> Backend:
    """Return the place that the settings say.

    Raises:
        UserError: it cannot be had here.
    """
    return BACKENDS[launch.backend](launch)
