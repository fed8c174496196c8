"""Credit is admitted minus settled, and comes back when the servers hold what a group made."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.controller.accounts import Accounts, Readmission, Readmissions
from areal_async.protocol.run_state import ServerState
from areal_async.protocol.types import Admitted, Cut, CutGroup, CutKind, GroupId, Outcome, OutcomeKind, Version


def _accounts(*, admitted: int = 4, limit: int = 6) -> Accounts:
    accounts = Accounts(max_groups_in_flight=limit)
    accounts.admitted = Admitted(total=admitted, num_fresh=admitted)
    accounts.add_cut(Cut(kind=CutKind.BEGIN, lineage=1, step=0), sequence=1)
    return accounts


def _cut(step: int, *ids: str, lineage: int = 1) -> Cut:
    groups = [CutGroup(group_id=group_id, workflow="w", slots=[]) for group_id in ids]
    return Cut(lineage=lineage, step=step, groups=groups)


def _outcome(group_id: str, kind: OutcomeKind, *, failed: int = 0, lineage: int = 1) -> Outcome:
    return Outcome(group_id=group_id, kind=kind, lineage=lineage, num_failed_attempts=failed, reason="because")


def _server(version: str, *, server_id: str = "s", fenced: bool = False) -> ServerState:
    return ServerState(server_id=server_id, node_id="n", url="", version=version, fenced=fenced)


def test_a_cut_group_settles_only_when_every_server_holds_its_weights() -> None:
    accounts = _accounts()
    accounts.add_cut(_cut(1, "0-0-0", "0-1-0"), sequence=2)
    accounts.hold([_server("1-1"), _server("1-0", server_id="t")], newest=Version(9, 9))
    assert accounts.num_credits == 2

    accounts.hold([_server("1-1"), _server("1-1", server_id="t")], newest=Version(9, 9))

    assert accounts.num_credits == 4


def test_of_many_servers_each_version_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    parse = Version.parse
    monkeypatch.setattr(Version, "parse", lambda text: read.append(text) or parse(text))
    accounts = _accounts()

    accounts.hold([_server(f"1-{number % 2}", server_id=f"s{number}") for number in range(256)], newest=Version(9, 9))

    assert sorted(read) == ["1-0", "1-1"]
    assert accounts.held == Version(1, 0)


def test_a_fenced_server_holds_no_credit_back() -> None:
    accounts = _accounts()
    accounts.add_cut(_cut(1, "0-0-0"), sequence=2)

    accounts.hold([_server("1-1"), _server("1-0", server_id="t", fenced=True)], newest=Version(9, 9))

    assert accounts.num_settled == 1


def test_a_version_that_was_not_announced_is_held_by_nobody_whoever_says_so() -> None:
    """Tickets under it would be refused by the trainer, group after group, until the run ends."""
    accounts = _accounts()
    accounts.add_cut(_cut(1, "0-0-0"), sequence=2)
    lies = [_server(version, server_id=version) for version in ("1-2", "2-0", "999999999-999999999")]

    accounts.hold(lies, newest=Version(1, 1))
    assert accounts.held is None
    accounts.hold([*lies, _server("1-1")], newest=Version(1, 1))

    assert accounts.held == Version(1, 1)
    assert accounts.num_settled == 1
    accounts.hold([_server("1-1")], newest=None)
    assert accounts.held is None


def test_a_trained_outcome_is_not_settled_twice() -> None:
    accounts = _accounts()
    accounts.add_cut(_cut(1, "0-0-0"), sequence=2)
    accounts.hold([_server("1-1")], newest=Version(9, 9))

    accounts.add_outcome(_outcome("0-0-0", OutcomeKind.TRAINED))

    assert accounts.num_settled == 1


def test_any_other_outcome_settles_at_once_and_once() -> None:
    accounts = _accounts()

    accounts.add_outcome(_outcome("0-0-0", OutcomeKind.STALE))
    accounts.add_outcome(_outcome("0-0-0", OutcomeKind.STALE))

    assert accounts.num_settled == 1


def test_a_group_that_fell_out_of_its_cut_settles_once() -> None:
    accounts = _accounts()
    accounts.add_cut(_cut(1, "0-0-0"), sequence=2)
    accounts.add_outcome(_outcome("0-0-0", OutcomeKind.FAILED))
    accounts.hold([_server("1-1")], newest=Version(9, 9))

    assert accounts.num_settled == 1


def test_a_new_lineage_takes_back_what_its_checkpoint_does_not_hold() -> None:
    accounts = _accounts()
    for step in (1, 2):
        accounts.add_cut(_cut(step, f"0-{step}-0"), sequence=step + 1)
    accounts.hold([_server("1-2")], newest=Version(9, 9))
    assert accounts.num_settled == 2

    accounts.add_cut(Cut(kind=CutKind.BEGIN, lineage=2, step=1), sequence=4)

    assert accounts.num_settled == 1
    accounts.hold([_server("2-2")], newest=Version(9, 9))
    assert accounts.num_settled == 2


def test_failed_and_abandoned_are_readmitted_with_the_next_attempt_in_the_order_of_the_log() -> None:
    accounts = _accounts()
    accounts.add_outcome(_outcome("0-3-0", OutcomeKind.FAILED, failed=1))
    accounts.add_outcome(_outcome("0-1-0", OutcomeKind.STALE))
    accounts.add_outcome(_outcome("0-2-1", OutcomeKind.ABANDONED, failed=1))

    due = accounts.due_readmissions

    assert [item.group_id for item in due] == [GroupId(0, 3, 1), GroupId(0, 2, 2)]
    assert [item.num_failed_attempts for item in due] == [1, 1]


def test_a_readmission_is_not_due_twice() -> None:
    accounts = _accounts()
    accounts.add_outcome(_outcome("0-3-0", OutcomeKind.FAILED, failed=1))

    accounts.admitted = Admitted(total=5, num_fresh=4, num_readmitted=1)

    assert accounts.due_readmissions == []


def test_readmissions_are_a_list() -> None:
    items = [Readmission(group_id=GroupId(7, index, 2), num_failed_attempts=index % 3) for index in range(9)]
    made = Readmissions()
    for item in items:
        made.append(item)

    assert (made[:], made[2:5], made[7:], made[9:]) == (items, items[2:5], items[7:], [])


def test_dead_groups_are_not_tried_again_but_count_as_failures() -> None:
    accounts = _accounts()
    accounts.add_outcome(_outcome("0-3-0", OutcomeKind.DEAD, failed=3))

    assert accounts.due_readmissions == []
    assert (accounts.num_consecutive_failed, accounts.last_failure) == (1, "because")


def test_a_cut_ends_a_row_of_failures() -> None:
    accounts = _accounts()
    accounts.add_outcome(_outcome("0-3-0", OutcomeKind.FAILED, failed=1))

    accounts.add_cut(_cut(1, "0-0-0"), sequence=2)

    assert accounts.num_consecutive_failed == 0


def test_failures_with_whole_groups_between_them_are_no_row() -> None:
    accounts = _accounts()
    for index in range(3):
        outcome = _outcome(f"0-{index}-0", OutcomeKind.FAILED, failed=1)
        accounts.add_outcome(msgspec.structs.replace(outcome, num_whole_before=1))

    assert accounts.num_consecutive_failed == 1


def test_a_group_that_ended_before_it_was_cut_is_settled_once() -> None:
    accounts = _accounts()
    accounts.add_outcome(_outcome("0-0-0", OutcomeKind.ABANDONED))
    accounts.add_cut(_cut(1, "0-0-0", "0-1-0"), sequence=2)
    accounts.hold([_server("1-1")], newest=Version(9, 9))

    assert accounts.num_settled == 2


def test_credits_never_go_below_zero() -> None:
    assert _accounts(admitted=9, limit=6).num_credits == 0


def test_a_checkpoints_groups_are_not_settled_while_servers_hold_older_weights() -> None:
    accounts = _accounts()
    for step in (1, 2):
        accounts.add_cut(_cut(step, f"0-{step}-0"), sequence=step + 1)

    accounts.add_cut(Cut(kind=CutKind.BEGIN, lineage=2, step=2), sequence=4)
    accounts.hold([_server("1-1")], newest=Version(9, 9))

    assert accounts.num_settled == 1


def test_a_dead_group_is_tried_again_once_with_a_full_count_of_attempts_when_the_operator_asks() -> None:
    accounts = _accounts()
    accounts.add_outcome(_outcome("0-3-2", OutcomeKind.DEAD, failed=3))

    for _ in range(2):
        accounts.add_outcome(_outcome("0-3-2", OutcomeKind.READMITTED, lineage=0))

    assert [(str(one.group_id), one.num_failed_attempts) for one in accounts.due_readmissions] == [("0-3-3", 0)]
    assert accounts.num_settled == 1


def test_the_operator_can_have_nothing_tried_again_that_is_not_dead() -> None:
    accounts = _accounts()
    accounts.add_outcome(_outcome("0-1-0", OutcomeKind.STALE))

    for group_id in ("0-1-0", "0-2-0"):
        accounts.add_outcome(_outcome(group_id, OutcomeKind.READMITTED, lineage=0))

    assert len(accounts.readmissions) == 0


def test_the_operators_word_counts_under_every_lineage() -> None:
    accounts = _accounts()
    accounts.add_outcome(_outcome("0-3-2", OutcomeKind.DEAD, failed=3))
    accounts.add_cut(Cut(kind=CutKind.BEGIN, lineage=2, step=0), sequence=3)

    accounts.add_outcome(_outcome("0-3-2", OutcomeKind.READMITTED, lineage=0))

    assert len(accounts.due_readmissions) == 1


@given(
    num_groups=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    returns=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=3),
)
def test_going_back_returns_each_credit_once_and_asks_for_each_prompt_again(
    num_groups: list[int], returns: list[tuple[int, int]]
) -> None:
    """From whatever is checkpointed to whatever step, again and again; what was in flight is so again."""
    accounts, lineage, sequence, index = _accounts(admitted=0, limit=1000), 1, 1, 0
    trained: list[list[str]] = []
    for wanted_step, wanted_end in returns:
        for count in num_groups:
            names = [f"0-{index + offset}-0" for offset in range(count)]
            index, sequence = index + count, sequence + 1
            trained.append(names)
            accounts.add_cut(_cut(len(trained), *names, lineage=lineage), sequence=sequence)
        accounts.admitted = Admitted(total=index, num_fresh=index)
        checkpointed = min(wanted_end, len(trained))
        for step, names in enumerate(trained[:checkpointed], start=1):
            for name in names:
                accounts.add_outcome(Outcome(group_id=name, kind=OutcomeKind.TRAINED, lineage=lineage, step=step))
        accounts.hold([_server(f"{lineage}-{len(trained)}")], newest=Version(99, 0))
        assert accounts.num_in_flight == 0

        step = min(wanted_step, len(trained))
        lineage, sequence = lineage + 1, sequence + 2
        branches = {**accounts.journal.branches, str(lineage): step}
        accounts.add_cut(Cut(kind=CutKind.BEGIN, lineage=lineage, step=step), sequence=sequence)
        accounts.add_cut(Cut(kind=CutKind.BRANCH, lineage=lineage, step=step, branches=branches), sequence=sequence)
        given_up = [name for names in trained[step:] for name in names]
        del trained[step:]
        assert accounts.num_in_flight == len(given_up)

        before = len(accounts.due_readmissions)
        for name in [*given_up, *given_up]:
            accounts.add_outcome(_outcome(name, OutcomeKind.ROLLED_BACK, failed=1, lineage=lineage))
        assert accounts.num_in_flight == 0
        again = accounts.due_readmissions[before:]
        assert [(str(item.group_id), item.num_failed_attempts) for item in again] == [
            (str(GroupId.parse(name).next_attempt), 1) for name in given_up
        ]
    assert accounts.num_consecutive_failed == 0


def test_being_given_up_says_nothing_of_a_group() -> None:
    """It is no failure, ends no row of failures, and is no sign that no step comes of what is sampled."""
    accounts = _accounts()
    accounts.add_outcome(_outcome("0-0-0", OutcomeKind.FAILED, failed=1))
    before = accounts.num_consecutive_failed, dict(accounts.untrained)

    for name, kind in (("0-1-0", OutcomeKind.ROLLED_BACK), ("0-2-0", OutcomeKind.ABANDONED)):
        accounts.add_outcome(_outcome(name, kind))

    assert (accounts.num_consecutive_failed, dict(accounts.untrained)) == before == (1, {"failed": 1})


def test_a_server_that_holds_what_was_given_up_has_no_more_than_what_it_shares() -> None:
    accounts = _accounts()
    for step in (1, 2):
        accounts.add_cut(_cut(step, f"0-{step}-0"), sequence=step + 1)
    accounts.add_cut(Cut(kind=CutKind.BEGIN, lineage=2, step=1), sequence=4)
    accounts.add_cut(Cut(kind=CutKind.BRANCH, lineage=2, step=1, branches={"2": 1}), sequence=5)
    accounts.add_cut(msgspec.structs.replace(_cut(2, "0-3-0", lineage=2), branches={"2": 1}), sequence=6)
    accounts.add_cut(Cut(kind=CutKind.BEGIN, lineage=3, step=2), sequence=7)

    accounts.hold([_server("1-2")], newest=Version(9, 9))
    assert accounts.held_step == 1
    accounts.hold([_server("2-2")], newest=Version(9, 9))
    assert accounts.held_step == 2
