"""One version that answers: its servers, what its tokens are read with, and the answers that have begun on it.

The servers are a frozen fleet: they keep the weights that they start with, a crash is repaired with the same, and an
answer that it breaks goes on from the tokens received. Where there is no room for a fleet beside it the servers follow
announcements instead, which are made while there are no answers.
"""

from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread
import structlog

from areal_async.config.settings import Settings
from areal_async.errors import PipelineError, leaves_of
from areal_async.inference.client import InferenceClient
from areal_async.inference.commands import NO_VERSION
from areal_async.inference.pool import ServerHandle
from areal_async.inference.supervision.fleet import Fleet
from areal_async.process.bell import Bell
from areal_async.protocol.fields import is_version
from areal_async.protocol.types import WeightsVersion
from areal_async.rollout.policy.text import TextCodec, load_codec

NODE_ID = "serve"

log = structlog.get_logger()


class ServedVersion:
    """A version with its servers. ``run`` it; it is good for answers from the start of ``run`` to ``end``."""

    client: InferenceClient
    codec: TextCodec

    def __init__(
        self,
        version: str,
        folder: Path,
        settings: Settings,
        *,
        name: str,
        log_directory: Path,
        first_gpu: int,
        max_streams: int,
        is_frozen: bool,
    ) -> None:
        """Take the version's model folder.

        Args:
            name: of its servers, among all that this process starts.
            is_frozen: its servers keep the weights that they start with; else ``change`` gives them others.
        """
        self.version = version
        self.num_requests = 0
        """Requests whose answers have begun on it, or are about to."""
        self._folder = folder
        self._settings = settings.model_copy(update={"model": settings.model.model_copy(update={"path": str(folder)})})
        self._max_streams = max_streams
        self._changed = Bell()
        self._is_ended = False
        self.fleet = Fleet(
            self._settings,
            node_id=NODE_ID if is_frozen else f"{NODE_ID}-{name}",
            log_directory=log_directory,
            publish=self._note,
            frozen=name if is_frozen else "",
            version=self.stamp if is_frozen else NO_VERSION,
            first_gpu=first_gpu,
        )
        if not is_frozen:
            self._announce(version, folder)

    @property
    def stamp(self) -> str:
        """What its servers stamp its tokens with."""
        return _stamp_of(self.version)

    @property
    def num_serviceable(self) -> int:
        """Servers that may be sent something now."""
        return sum(one.is_serviceable for one in self.fleet.pool.servers.values())

    async def run(self, *, task_status: "anyio.abc.TaskStatus[ServedVersion]") -> None:
        """Have the servers run until ``end``; started, with this, once the first of them answers.

        Raises:
            PipelineError: a server cannot start, or fails again and again.
        """
        try:
            async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
                tasks.start_soon(self.fleet.run)
                codec = await anyio.to_thread.run_sync(load_codec, str(self._folder), self._settings.rollout.template)
                self.client = await stack.enter_async_context(
                    InferenceClient(
                        self.fleet.pool,
                        self._settings.inference,
                        max_streams=self._max_streams,
                        vocab_size=codec.vocab_size,
                        model=self._settings.model.path,
                        vision=codec.vision,
                    )
                )
                self.codec = codec
                await self.fleet.pool.wait_serviceable()
                task_status.started(self)
                while not self._is_ended:
                    await self._changed.wait()
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            errors = [leaf for leaf in leaves_of(group) if isinstance(leaf, PipelineError)]
            if not errors:
                raise
            raise errors[0] from group

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request while the block lasts."""
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1
            self._changed.ring()

    async def wait_idle(self) -> None:
        """Wait until no request is left."""
        while self.num_requests:
            await self._changed.wait()

    def end(self) -> None:
        """Have ``run`` end."""
        self._is_ended = True
        self._changed.ring()

    async def change(self, version: str, folder: Path, *, deadline_s: float) -> None:
        """Give its servers other weights. There must be no requests, and none may begin meanwhile.

        Raises:
            TimeoutError: no server has them by the deadline. Those before are announced again then.
        """
        before, folder_before = self.version, self._folder
        self._announce(version, folder)
        try:
            with anyio.fail_after(deadline_s):
                while not self._holds(version):
                    await self._changed.wait()
        except TimeoutError:
            self._announce(before, folder_before)
            raise
        self.version = version

    def _holds(self, version: str) -> bool:
        """Say whether servers may be sent something, and all of these hold a version."""
        ready = [one for one in self.fleet.pool.servers.values() if one.is_serviceable]
        return bool(ready) and all(one.version == _stamp_of(version) for one in ready)

    def _announce(self, version: str, folder: Path) -> None:
        self._folder = folder
        self.fleet.target.announce(WeightsVersion(version=_stamp_of(version), path=str(folder)))

    async def _note(self, server: ServerHandle) -> None:
        log.info("serve.server", server_id=server.id, version=server.version, fence=server.fence)
        self._changed.ring()


def _stamp_of(version: str) -> str:
    """Return what servers stamp tokens of a version with: a model without a run is none."""
    return version if is_version(version) else NO_VERSION
