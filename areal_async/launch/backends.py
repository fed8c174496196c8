"""The places where processes run, by their names in ``launch.backend``."""

import importlib.util
from collections.abc import Callable, Mapping

from areal_async.config.launch import LaunchSettings
from areal_async.errors import UserError
from areal_async.launch.backend import Backend
from areal_async.launch.hosts import HostsBackend
from areal_async.launch.local import LocalBackend
from areal_async.launch.slurm import SlurmBackend


def _ray(launch: LaunchSettings) -> Backend:
    if importlib.util.find_spec("ray") is None:
        raise UserError(
            "launch.backend: got ray, need the package ray; pip install 'areal-async[ray]' on every host of the "
            "cluster, or take another"
        )
    # Imported here: it takes a second.
    from areal_async.launch.ray import RayBackend

    return RayBackend(launch)


BACKENDS: Mapping[str, Callable[[LaunchSettings], Backend]] = {
    "local": lambda launch: HostsBackend(launch) if launch.hosts else LocalBackend(),
    "ray": _ray,
    "slurm": lambda _: SlurmBackend(),
}


def make_backend(launch: LaunchSettings) -> Backend:
    """Return the place that the settings say.

    Raises:
        UserError: it cannot be had here.
    """
    return BACKENDS[launch.backend](launch)
