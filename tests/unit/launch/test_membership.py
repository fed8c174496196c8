"""Whoever starts, dies, falls silent or comes back is told once, with the reason and for how long it was away."""

from areal_async.launch.membership import DEAF_S, SILENT_S, Membership, group_of_metrics
from areal_async.protocol.events import Event, RoleLeft, RoleLost, RoleReturned, RoleStarted
from areal_async.protocol.run_state import CrewState


def _kept(state: str, num_starts: int = 1, reason: str = "") -> CrewState:
    return CrewState(name="node-0", state=state, num_starts=num_starts, reason=reason)


def test_a_death_is_told_with_its_cause_and_the_return_when_its_successor_speaks() -> None:
    membership = Membership()
    assert [type(one) for one in membership.on_change(_kept("running"), now_s=0)] == [RoleStarted]
    assert list(membership.on_report("node-0", now_s=1)) == []

    (lost,) = membership.on_change(_kept("died", reason="node-0 ended by SIGKILL"), now_s=2)
    late_words = list(membership.on_report("node-0", now_s=2.1))
    restarted = list(membership.on_change(_kept("running", 2, "node-0 ended by SIGKILL"), now_s=3))
    (returned,) = membership.on_report("node-0", now_s=9.5)

    assert isinstance(lost, RoleLost)
    assert (lost.crew, lost.reason) == ("node-0", "node-0 ended by SIGKILL")
    assert late_words == [], "what a dead process had sent before is not its return"
    assert restarted == []
    assert isinstance(returned, RoleReturned)
    assert (returned.num_starts, returned.away_s) == (2, 7.5)
    assert list(membership.on_report("node-0", now_s=10.5)) == []


def test_a_node_that_joined_from_elsewhere_is_lost_by_its_silence_and_returns() -> None:
    membership = Membership()
    change, started = membership.on_report("node-far", now_s=0)
    assert isinstance(started, RoleStarted)
    assert (change.name, change.state) == ("node-far", "running")  # type: ignore[union-attr]

    list(membership.on_report("controller", now_s=SILENT_S))
    assert list(membership.check(now_s=SILENT_S)) == [], "it may be only late"
    change, lost = membership.check(now_s=SILENT_S + 0.1)
    again = list(membership.check(now_s=SILENT_S + 0.2))
    back, returned = membership.on_report("node-far", now_s=8)

    assert isinstance(lost, RoleLost)
    assert change.reason == lost.reason == "not heard for 2.6 s"  # type: ignore[union-attr]
    assert again == []
    assert (back.state, back.num_starts) == ("running", 2)  # type: ignore[union-attr]
    assert isinstance(returned, RoleReturned)


def test_silence_of_all_is_the_brokers_and_nobody_is_lost_by_it() -> None:
    membership = Membership()
    list(membership.on_report("node-far", now_s=0))

    assert list(membership.check(now_s=SILENT_S + DEAF_S)) == []


def test_a_node_that_says_farewell_has_left_and_is_not_lost() -> None:
    membership = Membership()
    list(membership.on_report("node-far", now_s=0))
    change, left = membership.on_farewell("node-far")
    list(membership.on_report("controller", now_s=9))

    assert isinstance(left, RoleLeft)
    assert change.state == "stopped"  # type: ignore[union-attr]
    assert list(membership.check(now_s=9)) == []
    assert list(membership.on_farewell("node-far")) == []


def test_what_the_launcher_keeps_is_never_lost_by_silence() -> None:
    membership = Membership()
    list(membership.on_change(_kept("running"), now_s=0))
    list(membership.on_report("controller", now_s=60))

    assert [one for one in membership.check(now_s=60) if isinstance(one, Event) and one.crew == "node-0"] == []  # type: ignore[attr-defined]


def test_a_rank_belongs_to_the_trainer_and_a_node_to_itself() -> None:
    assert group_of_metrics("areal.x.metrics.trainer.3") == "trainer"
    assert group_of_metrics("areal.x.metrics.node.far") == "node-far"
