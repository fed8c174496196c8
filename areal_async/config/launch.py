"""The ``launch`` section: where processes are started."""

import shlex
from typing import Literal, Self

from pydantic import Field, model_validator

from areal_async.config.section import Section


class LaunchSettings(Section):
    """Where processes are started.

    Of several hosts the first ``trainer.num_hosts`` have the trainer's ranks, and each other one a node with the
    servers that ``inference`` says. Where none is left over, each has both.
    """

    backend: Literal["local", "ray", "slurm"] = "local"
    """``local``: as children of the launcher. ``slurm``: as steps of the allocation that it runs in. ``ray``: by actors
    of a Ray cluster."""
    join_wait_s: float = Field(default=600.0, ge=0)
    """Seconds that a node which has joined waits for its run to come back once its launcher is silent; a host may have
    its own."""
    hosts: tuple[str, ...] = ()
    """With ``local``: hosts beside the launcher's own, on which an agent starts processes. They see the run directory
    and this installation under the same paths."""
    remote_command: str = "ssh -o BatchMode=yes -o ServerAliveInterval=25 {host}"
    """What runs a command on one of ``hosts``, before that command's words; it needs no terminal and no password."""

    num_hosts: int = Field(default=1, ge=1)
    """With ``ray``: hosts of the cluster that the run asks for, the launcher's own or not."""
    cpus_per_host: int = Field(default=1, ge=1)
    """With ``ray``: CPUs that are asked for on each of them. They bind nothing: Ray counts them."""
    gpus_per_host: int | None = Field(default=None, ge=0)
    """With ``ray``: GPUs that are asked for on each of them; ``None`` are as many as the host with most has."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hosts and self.backend != "local":
            raise ValueError(
                f"hosts: got {', '.join(self.hosts)} with backend={self.backend}, which has hosts of its own, need "
                "local; leave them out"
            )
        if self.num_hosts > 1 and self.backend != "ray":
            raise ValueError(
                f"num_hosts: got {self.num_hosts} with backend={self.backend}, need ray; name hosts in launch.hosts, "
                "or as the Slurm job's --nodes"
            )
        if len(set(self.hosts)) < len(self.hosts) or not all(self.hosts):
            raise ValueError(f"hosts: got {list(self.hosts)}, need a different name for each; name each once")
        try:
            words = shlex.split(self.remote_command.format(host="host"))
        except (ValueError, LookupError) as exc:
            raise ValueError(
                f"remote_command: got {self.remote_command!r} ({exc}), need words, {{host}} among them"
            ) from exc
        if not words:
            raise ValueError("remote_command: got nothing, need a command; write it like ssh {host}")
        return self
