"""What a run's broker knows of trajectories: those that wait, whole, and those that failed, with the reason."""

import pytest

from areal_async.bus import Role
from areal_async.cli.trajectory_list import TRAINED, Filters, find_stored, select, untrained
from areal_async.errors import UserError
from areal_async.run_state import RunState
from areal_async.subjects import RUN_STATE
from areal_async.types import Cut, DeadLetter, Outcome, OutcomeKind
from tests.brokers import OpenRole
from tests.bus.stored import store, trajectory

pytestmark = pytest.mark.anyio


async def test_what_waits_and_what_failed_is_listed_with_its_reason_and_shown_whole(open_role: OpenRole) -> None:
    bus = await open_role(Role.OPERATOR)
    await bus.publish(bus.names.cuts, Cut(lineage=1, step=4))
    for kind, group in ((OutcomeKind.TRAINED, "0-1-0"), (OutcomeKind.DEAD, "0-2-0")):
        outcome = Outcome(group_id=group, kind=kind, lineage=1, reason="RewardError: no JSON", workflow="w")
        await bus.publish(bus.names.outcomes, outcome)
    await store(bus, "0-3-0", [0, 1], group_size=3, version="1-2")
    await store(bus, "0-3-0", [2], group_size=3, version="1-2", failed="KeyError: 'x'")
    letter = DeadLetter(
        stream="s", subject=bus.names.trajectories("w", "0-4-0"), sequence=1, reason="bad crc", reader="trainer"
    )
    await bus.publish(bus.names.undecodable, letter)

    found = {entry.id: entry for entry in await untrained(bus)}

    assert {name: (one.state, one.error) for name, one in found.items()} == {
        "0-2-0": ("dead", "dead: RewardError: no JSON"),
        "0-3-0.0": ("stored", ""),
        "0-3-0.1": ("stored", ""),
        "0-3-0.2": ("failed", "failed: KeyError: 'x'"),
        "0-4-0": ("undecodable", "undecodable: bad crc"),
    }
    assert found["0-3-0.1"].reward == 1.0
    assert [one.near_step for one in found.values()] == [5, 5, 5, 4, 4]
    failed = select([], found.values(), filters=Filters(error=""), sort="newest", is_reversed=False, limit=0)
    assert [one.id for one in failed] == ["0-3-0.2", "0-2-0", "0-4-0"]
    whole = await find_stored(bus, found["0-3-0.1"])
    assert whole.sequences[0].token_ids.tolist() == trajectory("0-3-0", 1).sequences[0].token_ids.tolist()
    with pytest.raises(UserError, match="it is not stored any more"):
        await find_stored(bus, found["0-3-0.1"]._replace(sibling=7))


@pytest.mark.parametrize(
    ("state", "is_over"), [("running", False), ("stopped", False), ("failed", False), ("finished", True)]
)
async def test_what_waits_is_left_over_once_its_run_has_finished(
    open_role: OpenRole, state: str, is_over: bool
) -> None:
    bus = await open_role(Role.OPERATOR)
    await bus.put(RUN_STATE, RunState(state=state))
    await store(bus, "0-3-0", [0], group_size=2, version="1-2")
    await store(bus, "0-3-0", [1], group_size=2, version="1-2", failed="KeyError: 'x'")

    left, failed = await untrained(bus)

    assert failed.error == "failed: KeyError: 'x'"
    assert left.state == ("left" if is_over else "stored")
    assert left.error == ("left: its run finished before it was trained" if is_over else "")
    trained = left._replace(state=TRAINED, error="", step=3)
    assert select([trained], [left], filters=Filters(), sort="newest", is_reversed=False, limit=0) == [trained]
