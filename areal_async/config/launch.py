"""The ``launch`` section: where processes are started."""

import re
import shlex
from typing import Literal, Self

from pydantic import Field, model_validator

from areal_async.config.section import OutputPath, Section

OWN_HOST = "127.0.0.1"
"""What the launcher calls its own."""
HOST = re.compile(r"[A-Za-z0-9_\[:][A-Za-z0-9_.@:%\[\]-]*")
"""One word, and no option, to whatever is to run a command there."""
HOST_MARK = "{host}"
"""Stands for the host in ``launch.remote_command``."""


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
    weights_cache: OutputPath | None = None
    """Folder of each host's own disk in which its node keeps the last three versions for its servers: rebuilt from what
    has changed in bf16 weights, which the trainer then writes beside them, or copied once. ``None`` has each server
    read each version where the trainer writes it. Not for what is broadcast, nor for adapters."""

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
        if len({OWN_HOST, *self.hosts}) <= len(self.hosts):
            raise ValueError(
                f"hosts: got {list(self.hosts)}, need a different name for each, and none for the launcher's own; name "
                "each once"
            )
        if (odd := next((host for host in self.hosts if not HOST.fullmatch(host)), None)) is not None:
            raise ValueError(
                f"hosts: got {odd!r}, need the name or address of a host, as in user@node2; leave out all else"
            )
        try:
            words = self.words_for("host")
        except ValueError as exc:
            raise ValueError(f"remote_command: got {self.remote_command!r} ({exc}), need words as a shell has") from exc
        if not words or "\0" in self.remote_command or HOST_MARK not in self.remote_command:
            raise ValueError(
                f"remote_command: got {self.remote_command!r}, need a command with {HOST_MARK} in it; write it like "
                f"ssh {HOST_MARK}"
            )
        return self

    def words_for(self, host: str) -> list[str]:
        """Return the words of ``remote_command`` for one of the hosts, whose name stays within its word."""
        return [word.replace(HOST_MARK, host) for word in shlex.split(self.remote_command)]
