"""A server's failure and its return are told once each; starting, and changing weights, are no news."""

from areal_async.protocol.events import Event
from areal_async.protocol.run_state import ServerState
from areal_async.rollout.server_events import server_event


def _state(*, reason: str = "", failure: str = "", version: str = "") -> ServerState:
    return ServerState(
        server_id="0-1", node_id="0", url="", version=version, fenced=bool(reason), reason=reason, failure=failure
    )


def test_a_life_of_a_server_is_told_by_its_failures_alone() -> None:
    died = "ended by SIGKILL"
    life = [
        _state(reason="starting"),
        _state(version="1-0"),
        _state(version="1-1"),
        _state(reason=died, failure=died),
        _state(reason=died, failure=died),
        _state(reason="starting", failure=died),
        _state(version="1-2", failure=died),
        _state(version="1-3", failure=died),
    ]
    told: list[Event] = []

    for before, now in zip([None, *life], life, strict=False):
        event = server_event(before, now)
        if event is not None:
            told.append(event)

    assert [one.kind for one in told] == ["server.fenced", "server.repaired"]
    assert told[0].reason == told[1].failure == died  # type: ignore[attr-defined]
