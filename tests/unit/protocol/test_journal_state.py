"""What is read from a state and the log's tail is what is read from the whole log, wherever the state was taken."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_async.controller.accounts import ENDED_EARLY, Accounts, AccountsState
from areal_async.protocol.journal import Journal, JournalState
from areal_async.protocol.types import Cut, CutGroup, CutKind, CutSlot, Outcome, OutcomeKind, Slot, SlotStatus

NAMES = st.builds("0-{}-{}".format, st.integers(0, 6), st.integers(0, 1))
LINEAGES = st.integers(1, 3)
STEPS = st.integers(0, 5)


def _group(name: str) -> CutGroup:
    slot = Slot(sibling=0, sample_uid="uid", status=SlotStatus.SCORED, oldest="1-0", newest="1-0")
    return CutGroup(group_id=name, workflow="w", slots=[CutSlot(slot=slot, sequence=7)])


CUTS = st.builds(
    Cut,
    kind=st.sampled_from([CutKind.CUT] * 4 + list(CutKind)),
    lineage=LINEAGES,
    step=STEPS,
    groups=st.lists(NAMES.map(_group), max_size=3, unique_by=lambda group: group.group_id),
    branches=st.dictionaries(st.sampled_from(["2", "3"]), STEPS, max_size=1),
)
OUTCOMES = st.builds(
    Outcome,
    group_id=NAMES,
    kind=st.sampled_from([OutcomeKind.TRAINED] * 6 + list(OutcomeKind)),
    lineage=LINEAGES,
    step=STEPS,
    reason=st.sampled_from(["", "why", ENDED_EARLY]),
    num_whole_before=st.integers(0, 1),
)
LOGS = st.lists(st.tuples(st.integers(1, 3), CUTS | OUTCOMES), max_size=40)
"""Entries, each with how far it is from the one before: what lies between cannot be read."""


def _numbered(log: list[tuple[int, Cut | Outcome]]) -> list[tuple[int, Cut | Outcome]]:
    sequence, numbered = 0, []
    for gap, entry in log:
        sequence += gap
        numbered.append((sequence, entry))
    return numbered


def _read(books: Journal | Accounts, log: list[tuple[int, Cut | Outcome]]) -> None:
    for sequence, entry in log:
        if isinstance(entry, Cut):
            books.add_cut(entry, sequence=sequence)
        else:
            books.add_outcome(entry)


def _seen(journal: Journal) -> object:
    """What anybody asks of a journal."""
    ends = [journal.end_of(f"0-{index}-{attempt}") for index in range(8) for attempt in range(2)]
    counts = [(journal.is_cut(step), journal.num_cut_groups(through_step=step)) for step in range(7)]
    return (
        journal.state(), journal.cuts, list(journal.cuts), ends, counts, journal.without_end(), journal.last_step,
        journal.steps_to_replay(), journal.branches, journal.is_ended, journal.checkpoints, journal.last_cut_sequence,
    )  # fmt: skip


@given(log=LOGS, split=st.integers(0, 40), own_step=st.integers(0, 6))
@settings(max_examples=300, deadline=None)
def test_a_journal_goes_on_from_its_state(log: list[tuple[int, Cut | Outcome]], split: int, own_step: int) -> None:
    numbered = _numbered(log)
    by_sequence = dict(numbered)
    whole, early = Journal(own_lineage=4, own_step=own_step), Journal()
    _read(whole, numbered)
    _read(early, numbered[:split])

    state = early.state()
    assert state is not None
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=JournalState)
    cuts = [entry for sequence in state.cuts.values() if isinstance(entry := by_sequence[sequence], Cut)]
    if state.checkpointed_step > own_step:
        with pytest.raises(ValueError, match="of a checkpoint at step"):
            Journal.of_state(state, cuts, own_lineage=4, own_step=own_step)
        return
    resumed = Journal.of_state(state, cuts, own_lineage=4, own_step=own_step)
    _read(resumed, numbered[split:])

    assert _seen(resumed) == _seen(whole)


@given(log=LOGS, split=st.integers(0, 40))
@settings(max_examples=300, deadline=None)
def test_the_books_go_on_from_their_state(log: list[tuple[int, Cut | Outcome]], split: int) -> None:
    numbered = _numbered(log)
    whole, early, resumed = (Accounts(max_groups_in_flight=9) for _ in range(3))
    _read(whole, numbered)
    _read(early, numbered[:split])

    state = early.state()
    assert state is not None
    resumed.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=AccountsState))
    _read(resumed, numbered[split:])

    assert resumed.state() == whole.state()
    assert _seen(resumed.journal) == _seen(whole.journal)
    assert (resumed.num_settled, resumed.due_readmissions) == (whole.num_settled, whole.due_readmissions)


def test_a_reader_that_goes_back_before_a_checkpoint_keeps_no_state_for_others() -> None:
    journal = Journal(own_lineage=2, own_step=1)
    journal.add_outcome(Outcome(group_id="0-0-0", kind=OutcomeKind.TRAINED, lineage=1, step=2))

    assert journal.state() is None


def test_a_state_without_its_cuts_is_refused() -> None:
    journal = Journal()
    journal.add_cut(Cut(lineage=1, step=1, groups=[_group("0-0-0")]), sequence=1)
    state = journal.state()
    assert state is not None

    with pytest.raises(ValueError, match=r"need those of \[1\]"):
        Journal.of_state(state, [])


@pytest.mark.parametrize("ends", [[1], [3, 2], [1, 2, 3, 4], [5, 6, 1, 2]])
def test_intervals_that_are_none_are_refused(ends: list[int]) -> None:
    journal = Journal()
    state = journal.state()
    assert state is not None
    state.settled.ends = {"0": ends}

    with pytest.raises(ValueError, match="that do not ascend"):
        Journal.of_state(state, [])
