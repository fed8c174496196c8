"""Whether the broker lets a controller do its work."""

from areal_async.bus import Bus
from areal_async.errors import ConflictError, DeniedError, UserError
from areal_async.protocol.run_state import ServerState

NOBODY, NO_REVISION = "nobody", 1 << 62
"""A server and a revision of its key that there will never be."""


async def check_permissions(bus: Bus) -> None:
    """Refuse a broker at which the servers of a lost node could not be disowned: all would wait for them for ever.

    The write that tries it is one that cannot succeed where it is allowed.

    Raises:
        UserError: it is such a broker.
    """
    nobody = ServerState(server_id=NOBODY, node_id=NOBODY, url="", version="", fenced=True)
    try:
        await bus.compare_and_set(bus.names.server_key(NOBODY), nobody, NO_REVISION)
    except ConflictError:
        return
    except DeniedError as exc:
        raise UserError(
            f"bus: {exc}, need it to take back the servers of a node that is lost; give the broker's users the "
            "permissions of this version"
        ) from exc
