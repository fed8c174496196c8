"""The seam between supervision and the place where processes run: this host now, a cluster's scheduler as well."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from areal_async.process.host import visible_gpus
from areal_async.protocol.run_state import OrderedHosts

REMOVED = "it was removed from the run"
"""Why nothing can be started on such a host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessSpec:
    """A process to start."""

    name: str
    """``controller``, ``node-0``, ``trainer-1``."""
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Added to the launcher's own."""
    host: str | None = None
    """One of the backend's; ``None`` is the launcher's own."""
    output: Path | None
    """Takes its stdout and stderr, after what is there; ``None`` leaves it the launcher's own."""


class Process(Protocol):
    """A process that was started."""

    @property
    def spec(self) -> ProcessSpec: ...

    async def wait(self) -> int:
        """Wait for its end and return the exit status; negative for a signal. Any number may wait."""

    def terminate(self) -> None:
        """Ask it to end. Nothing happens when it has."""

    def kill(self) -> None:
        """End it, and what it started, now. Nothing happens when it has ended."""

    def ask_stacks(self) -> None:
        """Have it write where it stands (``stacks``), a few times in its life. Nothing happens when it has ended."""

    def last_sentence(self) -> str:
        """Return the last line that it wrote to its output since it was started; empty when there is none."""


class LauncherWorks:
    """A backend whose launcher's host is the first worker."""

    hosts: tuple[str, ...]
    addresses: Mapping[str, str] = MappingProxyType({})

    @property
    def workers(self) -> tuple[str, ...]:
        return self.hosts

    @property
    def gpus(self) -> tuple[str, ...]:
        return visible_gpus()


class Backend(Protocol):
    """Starts processes that end with the launcher, however that ends."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Where processes can be started, the launcher's own host first."""

    @property
    def workers(self) -> tuple[str, ...]:
        """Those of them that ranks and nodes may be on."""

    @property
    def gpus(self) -> tuple[str, ...]:
        """The first worker's, as ``CUDA_VISIBLE_DEVICES`` takes them; the others are taken to have as many."""

    @property
    def addresses(self) -> Mapping[str, str]:
        """Where workers are reached by the others; the launcher's own host, by ``address``, is not in it."""

    @property
    def absent(self) -> Mapping[str, str]:
        """Those of them where nothing can be started now, each with why not."""

    def set_hosts(self, ordered: OrderedHosts) -> None:
        """Have other hosts than at the start: nothing is started on those that were removed."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Be at work, for as long as the block lasts; everything below is for within."""

    async def address(self) -> str:
        """Return the address at which processes on all of these find what listens on the launcher's host.

        Raises:
            UserError: it cannot be found out.
        """

    async def cannot_run(self, code: str, *words: str) -> Mapping[str, str]:
        """Run a piece of Python on each other host; return those where it fails, each with its last words."""

    async def start(self, spec: ProcessSpec) -> Process:
        """Start one process.

        Raises:
            PipelineError: it cannot be started.
        """
