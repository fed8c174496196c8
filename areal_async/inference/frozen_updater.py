"""A server whose weights stay as they are: admitted as soon as it is healthy, and told of no other version.

Invariant: it is sent requests only while it says that it runs what it was started with.
"""

import anyio

from areal_async.inference.commands import NO_VERSION
from areal_async.inference.faults import ServerFault
from areal_async.inference.http import ServerApi
from areal_async.inference.pool import ServerHandle
from areal_async.inference.swap import check_version
from areal_async.inference.updates import FleetContext
from areal_async.protocol.types import WeightsVersion

AS_STARTED = WeightsVersion(version=NO_VERSION)


class FrozenUpdater:
    """One process of such a server, from its start to its end; in the place of an ``Updater``."""

    is_updating = False

    def __init__(self, server: ServerHandle, api: ServerApi, around: FleetContext) -> None:
        self._server = server
        self._api = api
        self._around = around

    async def run(self) -> str:
        """Admit the server and leave it alone; return only why it has to be restarted.

        consumes:     nothing
        waits for:    the server to say what it runs
        produces:     a serviceable server
        unblocked by: cancellation
        """
        try:
            await check_version(self._api, AS_STARTED)
        except ServerFault as exc:
            return f"frozen weights: {exc}"
        self._around.pool.admit(self._server, url=self._api.url, version=AS_STARTED.version)
        await self._around.publish(self._server)
        while True:
            await anyio.sleep_forever()
