"""A lineage inherits its predecessor's cuts, replaces them from its own first one, and fences it."""

from areal_async.journal import Journal
from areal_async.types import Cut, CutGroup, CutKind, CutSlot, Outcome, OutcomeKind, Slot, SlotStatus


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


def test_slots_are_forgotten_only_through_the_step_that_no_replay_asks_for() -> None:
    slot = CutSlot(
        slot=Slot(sibling=0, sample_uid="u", status=SlotStatus.SCORED, oldest="1-0", newest="1-0"), sequence=1
    )
    groups = [CutGroup(group_id="a", workflow="w", slots=[slot])]
    journal = _journal(_begin(1, 0), *(Cut(lineage=1, step=step, groups=groups) for step in (1, 2)))

    journal.forget_slots(through_step=1)

    assert [len(journal.cuts[step].groups[0].slots) for step in (1, 2)] == [0, 1]
    assert journal.trained_groups(through_step=2) == {"a"}


def test_an_end_is_forgotten_by_the_next_lineage() -> None:
    end = Cut(kind=CutKind.END, lineage=1, step=2)
    assert _journal(_begin(1, 0), _cut(1, 1, "a"), end).is_ended

    assert not _journal(_begin(1, 0), _cut(1, 1, "a"), end, _begin(2, 1)).is_ended


def test_the_first_settling_outcome_of_a_group_stands() -> None:
    journal = _journal(_begin(1, 0))

    assert journal.add_outcome(Outcome(group_id="a", kind=OutcomeKind.FAILED, lineage=1))
    assert not journal.add_outcome(Outcome(group_id="a", kind=OutcomeKind.STALE, lineage=1))
    assert journal.outcomes["a"].kind is OutcomeKind.FAILED


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
