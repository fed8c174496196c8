"""A lineage inherits its predecessor's cuts, replaces them from its own first one, and fences it."""

import pickle

from areal_async.protocol.journal import Journal
from areal_async.protocol.types import Cut, CutGroup, CutKind, Outcome, OutcomeKind, Version


def _cut(lineage: int, step: int, *ids: str) -> Cut:
    groups = [CutGroup(group_id=group_id, workflow="w", slots=[]) for group_id in ids]
    return Cut(lineage=lineage, step=step, groups=groups)


def _journal(*entries: Cut) -> Journal:
    journal = Journal()
    for sequence, entry in enumerate(entries, start=1):
        journal.add_cut(entry, sequence=sequence)
    return journal


def _begin(lineage: int, step: int) -> Cut:
    return Cut(kind=CutKind.BEGIN, lineage=lineage, step=step)


def test_a_new_lineage_replays_what_was_cut_after_its_checkpoint() -> None:
    journal = _journal(_begin(1, 0), *(_cut(1, step, f"0-{step}-0") for step in (1, 2, 3)), _begin(2, 1))

    assert journal.steps_to_replay() == [2, 3]


def test_replay_ends_at_a_gap() -> None:
    journal = _journal(_begin(1, 0), _cut(1, 1, "a"), _cut(1, 3, "b"), _begin(2, 0))

    assert journal.steps_to_replay() == [1]


def test_a_zombies_cut_does_not_count() -> None:
    journal = _journal(_begin(1, 0), _cut(1, 1, "a"), _begin(2, 0), _cut(1, 2, "b"))

    assert sorted(journal.cuts) == [1]


def test_a_cut_made_anew_replaces_the_old_one_and_all_after_it() -> None:
    journal = _journal(_begin(1, 0), _cut(1, 1, "a"), _cut(1, 2, "b"), _cut(1, 3, "c"), _begin(2, 1), _cut(2, 2, "d"))

    assert {step: cut.groups[0].group_id for step, cut in journal.cuts.items()} == {1: "a", 2: "d"}


def test_what_cannot_be_replayed_is_given_up_for_every_later_reader() -> None:
    branch = Cut(kind=CutKind.BRANCH, lineage=2, step=1, branches={"2": 1})
    journal = _journal(_begin(1, 0), *(_cut(1, step, f"0-{step}-0") for step in (1, 2, 3)), _begin(2, 0), branch)

    assert sorted(journal.cuts) == [1]
    assert journal.branches == {"2": 1}
    journal.add_cut(_begin(3, 0), sequence=9)
    assert journal.steps_to_replay() == [1]


def test_a_branch_is_inherited_by_the_cuts_that_name_it() -> None:
    cut = Cut(lineage=2, step=2, branches={"2": 1})

    assert _journal(_begin(2, 1), cut).branches == {"2": 1}


def _trained(step: int, *ids: str, lineage: int = 1) -> list[Outcome]:
    return [Outcome(group_id=one, kind=OutcomeKind.TRAINED, lineage=lineage, step=step) for one in ids]


def _note(journal: Journal, outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        journal.add_outcome(outcome)


def test_a_cut_is_let_go_of_once_a_checkpoint_holds_it_and_each_of_its_groups_has_ended() -> None:
    journal = _journal(_begin(1, 0), _cut(1, 1, "a", "b"), _cut(1, 2, "c"), _cut(1, 3, "d"))
    _note(journal, _trained(2, "a", "c"))
    journal.close_cuts()
    assert sorted(journal.cuts) == [1, 2, 3], "the end of b is not recorded"

    journal.add_outcome(Outcome(group_id="b", kind=OutcomeKind.FAILED, lineage=1))
    journal.add_outcome(Outcome(group_id="d", kind=OutcomeKind.FAILED, lineage=1))
    journal.close_cuts()

    assert sorted(journal.cuts) == [3], "no checkpoint holds step 3, which is trained without a group"
    assert [journal.is_cut(step) for step in range(5)] == [False, True, True, True, False]
    assert (journal.last_step, journal.open_groups()) == (3, {"d"})
    journal.add_cut(_begin(2, 2), sequence=9)
    assert journal.steps_to_replay() == [3]


def test_a_trainer_keeps_what_was_cut_after_its_own_checkpoint_though_a_newer_one_was_told_of() -> None:
    """The newer one is damaged."""
    journal = Journal(own_lineage=2, own_step=1)
    for sequence, entry in enumerate([_begin(1, 0), *(_cut(1, step, f"0-{step}-0") for step in (1, 2, 3))], start=1):
        journal.add_cut(entry, sequence=sequence)
    _note(journal, _trained(3, "0-1-0", "0-2-0", "0-3-0"))
    journal.add_cut(_begin(2, 1), sequence=9)
    assert journal.steps_to_replay() == [2, 3]
    assert sorted(journal.cuts) == [2, 3]

    journal.add_cut(_cut(2, 4, "0-4-0"), sequence=10)
    _note(journal, [Outcome(group_id="0-4-0", kind=OutcomeKind.TRAINED, lineage=2, step=4)])
    journal.close_cuts()

    assert not journal.cuts


def test_cuts_that_are_closed_go_on_to_count() -> None:
    journal = _journal(_begin(1, 0), _cut(1, 1, "a", "b"), _cut(1, 2, "c"), _cut(1, 3, "d", "e"))
    before = [journal.num_cut_groups(through_step=step) for step in range(5)]
    _note(journal, _trained(2, "a", "b", "c"))

    journal.close_cuts()

    assert sorted(journal.cuts) == [3]
    assert [journal.num_cut_groups(through_step=step) for step in range(5)] == before == [0, 2, 3, 5, 5]
    journal.add_cut(_cut(1, 2, "f"), sequence=9)
    assert [journal.num_cut_groups(through_step=step) for step in range(5)] == [0, 2, 3, 3, 3]


def test_a_checkpoint_may_name_of_closed_cuts_only_what_was_trained() -> None:
    journal = _journal(_begin(1, 0), _cut(1, 1, "a", "b"), _cut(1, 2, "c"))
    _note(journal, [*_trained(1, "a"), Outcome(group_id="b", kind=OutcomeKind.FAILED, lineage=1)])
    journal.close_cuts()

    assert journal.unknown_to(1, ["a"]) == []
    assert journal.unknown_to(1, ["a", "b", "x"]) == ["b", "x"]
    assert journal.unknown_to(7, ["a"]) == ["a"]


def test_a_checkpoint_that_is_made_is_not_asked_for_any_more() -> None:
    asked = [Cut(kind=CutKind.CHECKPOINT, lineage=1, step=step) for step in (1, 2)]
    journal = _journal(_begin(1, 0), _cut(1, 1, "a"), asked[0], _cut(1, 2, "b"), asked[1])
    _note(journal, _trained(2, "a", "b"))

    journal.close_cuts()

    assert journal.checkpoints == {2}


def test_of_ten_thousand_groups_that_have_ended_next_to_nothing_is_kept() -> None:
    journal, step = _journal(_begin(1, 0)), 0
    for epoch in range(20):
        for index in range(0, 500, 2):
            step += 1
            ids = [f"{epoch}-{index}-0", f"{epoch}-{index + 1}-0"]
            journal.add_cut(_cut(1, step, *ids), sequence=step)
            if step % 10 == 0:
                before = [group for one in range(step - 9, step + 1) for group in journal.cuts[one].groups]
                _note(journal, _trained(step, *(group.group_id for group in before)))
                journal.add_outcome(Outcome(group_id=f"{epoch}-{500 + index}-0", kind=OutcomeKind.STALE, lineage=1))

    assert len(journal.cuts) <= 10
    assert journal.num_cut_groups(through_step=step) == 10_000
    assert (journal.end_of("7-8-0"), journal.end_of("7-518-0")) == (OutcomeKind.TRAINED, OutcomeKind.STALE)
    assert journal.end_of("7-519-0") is None
    num_bytes_per_step = len(pickle.dumps(journal)) / step
    assert num_bytes_per_step < 24


def test_an_end_is_forgotten_by_the_next_lineage() -> None:
    end = Cut(kind=CutKind.END, lineage=1, step=2)
    assert _journal(_begin(1, 0), _cut(1, 1, "a"), end).is_ended

    assert not _journal(_begin(1, 0), _cut(1, 1, "a"), end, _begin(2, 1)).is_ended


def test_the_first_settling_outcome_of_a_group_stands() -> None:
    journal = _journal(_begin(1, 0))

    assert journal.add_outcome(Outcome(group_id="a", kind=OutcomeKind.FAILED, lineage=1))
    assert not journal.add_outcome(Outcome(group_id="a", kind=OutcomeKind.STALE, lineage=1))
    assert journal.end_of("a") is OutcomeKind.FAILED


def test_late_and_duplicate_slots_settle_no_group() -> None:
    journal = _journal(_begin(1, 0))

    assert not journal.add_outcome(Outcome(group_id="a", kind=OutcomeKind.LATE, lineage=1, sample_uid="a.0"))


def test_a_zombies_outcome_does_not_count() -> None:
    journal = _journal(_begin(1, 0), _begin(2, 0))

    assert not journal.add_outcome(Outcome(group_id="a", kind=OutcomeKind.STALE, lineage=1))


def test_what_fell_out_of_a_cut_is_not_replayed() -> None:
    journal = _journal(_begin(1, 0), _cut(1, 1, "a", "b", "c"))
    journal.add_outcome(Outcome(group_id="b", kind=OutcomeKind.FAILED, lineage=1))
    journal.add_outcome(Outcome(group_id="c", kind=OutcomeKind.TRAINED, lineage=1))

    assert [group.group_id for group in journal.cut_to_replay(1).groups] == ["a", "c"]


def test_a_checkpoint_may_name_only_what_the_surviving_cuts_hold() -> None:
    journal = _journal(_begin(1, 0), _cut(1, 1, "a", "b"))

    assert journal.unknown_to(1, ["a"]) == []
    assert journal.unknown_to(1, ["a", "x"]) == ["x"]
    assert journal.unknown_to(2, ["a"]) == ["a"]


def test_groups_that_a_branch_gave_up_are_kept_until_they_are_recorded_or_cut_again() -> None:
    branch = Cut(kind=CutKind.BRANCH, lineage=2, step=0, branches={"2": 0})
    journal = _journal(_begin(1, 0), _cut(1, 1, "a", "b"), _cut(1, 2, "c"), _begin(2, 0), branch, _cut(2, 1, "b"))
    journal.add_outcome(Outcome(group_id="c", kind=OutcomeKind.ABANDONED, lineage=2))

    assert [group.group_id for group in journal.without_end()] == ["a"]


def _rolled_back(group_id: str, *, lineage: int = 2) -> Outcome:
    return Outcome(group_id=group_id, kind=OutcomeKind.ROLLED_BACK, lineage=lineage)


def test_rolling_back_takes_a_training_back_once_and_no_other_end() -> None:
    journal = _journal(_begin(1, 0), _cut(1, 1, "a", "b", "c"))
    _note(journal, [*_trained(1, "a"), Outcome(group_id="b", kind=OutcomeKind.STALE, lineage=1)])
    journal.add_cut(_begin(2, 0), sequence=9)

    assert [journal.add_outcome(_rolled_back(one)) for one in ("a", "a", "b", "c")] == [True, False, False, True]
    assert not journal.add_outcome(_rolled_back("d", lineage=1)), "a zombie's"
    assert [journal.end_of(one) for one in "abc"] == [
        OutcomeKind.ROLLED_BACK, OutcomeKind.STALE, OutcomeKind.ROLLED_BACK,
    ]  # fmt: skip
    assert not journal.add_outcome(Outcome(group_id="a", kind=OutcomeKind.TRAINED, lineage=2, step=1))


def test_a_lineage_that_goes_back_knows_every_group_that_was_trained_since() -> None:
    """Also where its cut was closed for everybody else, and though a lineage before it was killed in doing so."""
    journal = Journal(own_lineage=3, own_step=1)
    cuts = [_cut(1, step, f"0-{step}-0") for step in (1, 2, 3, 4)]
    branches = [
        Cut(kind=CutKind.BRANCH, lineage=lineage, step=1, branches={str(lineage): 1, "2": 1}) for lineage in (2, 3)
    ]
    for entry in (_begin(1, 0), *cuts):
        journal.add_cut(entry, sequence=1)
    _note(journal, _trained(3, "0-1-0", "0-2-0", "0-3-0"))
    for entry in (_begin(2, 1), branches[0]):
        journal.add_cut(entry, sequence=1)
    journal.add_outcome(_rolled_back("0-2-0"))

    for entry in (_begin(3, 1), branches[1]):
        journal.add_cut(entry, sequence=1)

    assert [group.group_id for group in journal.without_end()] == ["0-3-0", "0-4-0"]
    assert journal.steps_to_replay() == []
    journal.add_outcome(_rolled_back("0-3-0", lineage=3))
    journal.add_outcome(Outcome(group_id="0-4-0", kind=OutcomeKind.ABANDONED, lineage=3))
    assert journal.without_end() == []


def test_a_checkpoint_fits_while_its_steps_survive_and_none_of_its_groups_ended_otherwise() -> None:
    journal = _journal(_begin(1, 0), _cut(1, 1, "a"), _cut(1, 2, "b", "c"), _cut(1, 3, "d"))
    _note(journal, _trained(3, "a", "b", "c"))
    journal.add_outcome(Outcome(group_id="d", kind=OutcomeKind.FAILED, lineage=1))
    assert journal.fits(Version(1, 2), [(1, ["a"]), (2, ["b", "c"])])
    assert not journal.fits(Version(1, 3), [(1, ["a"]), (2, ["b", "c"]), (3, ["d"])])
    assert journal.fits(Version(1, 3), [(1, ["a"]), (2, ["b", "c"]), (3, [])])

    journal.add_cut(_begin(2, 1), sequence=8)
    journal.add_cut(Cut(kind=CutKind.BRANCH, lineage=2, step=1, branches={"2": 1}), sequence=9)
    journal.add_cut(Cut(lineage=2, step=2, branches={"2": 1}), sequence=10)

    assert journal.fits(Version(1, 1), [(1, ["a"])])
    assert journal.fits(Version(2, 2), [(1, ["a"]), (2, [])])
    assert not journal.fits(Version(1, 2), [(1, ["a"]), (2, [])]), "step 2 was trained otherwise since"
