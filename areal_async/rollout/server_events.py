"""What is told of a node's servers: that one is fenced, and that it serves again."""

from areal_async.inference.pool import STARTING
from areal_async.protocol.events import Event, ServerFenced, ServerRepaired
from areal_async.protocol.run_state import ServerState


def server_event(before: ServerState | None, now: ServerState) -> Event | None:
    """Return what there is to tell of a server that is in another state; None where that is no news."""
    was_fenced = before is not None and before.fenced
    if now.fenced and now.reason not in (STARTING, before.reason if before is not None else ""):
        return ServerFenced(server_id=now.server_id, reason=now.reason)
    if was_fenced and not now.fenced and now.failure:
        return ServerRepaired(server_id=now.server_id, version=now.version, failure=now.failure)
    return None
