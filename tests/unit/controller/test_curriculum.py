"""Prompts that teach nothing are passed over, no more than asked for; and the same ones however often it is decided."""

from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from areal_async.config.settings import CurriculumSettings
from areal_async.controller.accounts import Accounts
from areal_async.controller.admission import left_over, next_admission
from areal_async.controller.curriculum import MAX_LOOKED_AT, Curriculum, Visits
from areal_async.controller.sampler import MixedSampler, Sampler, TaskShare
from areal_async.protocol.run_state import ServerState
from areal_async.protocol.types import (
    Admitted,
    Cut,
    CutGroup,
    CutKind,
    CutSlot,
    GroupId,
    Outcome,
    OutcomeKind,
    Slot,
    SlotStatus,
    Version,
)

NUM_ROWS = 200
SETTINGS = CurriculumSettings(name="pass_rate")


def _visit(index: int, reward: float) -> Outcome:
    return Outcome(group_id=f"0-{index}-0", kind=OutcomeKind.FILTERED, lineage=1, mean_reward=reward)


def _visits(*rewards: float, per_row: int = 1) -> Visits:
    """Rows 0, 1, .. come to ``rewards``, so many times each."""
    visits = Visits()
    for index, reward in enumerate(rewards):
        for _ in range(per_row):
            visits.read(_visit(index, reward))
    return visits


def _after_an_epoch(visits: Visits, *, keep: float = 0.25) -> list[int]:
    """Return the rows that epoch 1 admits."""
    settings = SETTINGS.model_copy(update={"keep": keep})
    curriculum = Curriculum(settings, Sampler(NUM_ROWS, seed=1), visits, seed=1)
    groups = curriculum.first_groups(2 * NUM_ROWS, {"0-1": len(visits)})
    return [group.index for group in groups if group.epoch == 1]


def test_prompts_that_are_always_or_never_solved_are_admitted_more_seldom() -> None:
    solved, open_, unsolved = [1.0] * 80, [0.5] * 40, [0.0] * 80

    rows = _after_an_epoch(_visits(*solved, *open_, *unsolved))

    assert set(range(80, 120)) <= set(rows)
    assert 10 <= sum(row < 80 for row in rows) <= 30, "a quarter of eighty"
    assert 10 <= sum(row >= 120 for row in rows) <= 30, "a quarter of eighty"
    assert len(_after_an_epoch(_visits(*solved), keep=1.0)) == NUM_ROWS


def test_prompts_that_were_never_visited_are_admitted() -> None:
    assert sorted(_after_an_epoch(Visits())) == list(range(NUM_ROWS))


def test_another_epoch_keeps_others_of_them() -> None:
    curriculum = Curriculum(SETTINGS, Sampler(NUM_ROWS, seed=1), _visits(*[1.0] * NUM_ROWS), seed=1)

    groups = list(curriculum.first_groups(3 * NUM_ROWS, {"0-1": NUM_ROWS, "0-2": NUM_ROWS}))

    kept = [{group.index for group in groups if group.epoch == epoch} for epoch in (1, 2)]
    assert kept[0] != kept[1]


def test_a_prompt_that_was_solved_at_last_counts_as_solved_after_a_few_visits_more() -> None:
    rows = [0] * 5
    for number, visits in enumerate(range(1, 6)):
        rewards = Visits()
        for reward in [0.0, *[1.0] * visits]:
            for index in range(NUM_ROWS):
                rewards.read(_visit(index, reward))
        rows[number] = len(_after_an_epoch(rewards))

    assert rows[:4] == [NUM_ROWS] * 4
    assert rows[4] < NUM_ROWS / 2


def test_a_visit_is_a_group_that_was_cut_or_that_taught_nothing() -> None:
    def slot(reward: float) -> CutSlot:
        one = Slot(sibling=0, sample_uid="u", status=SlotStatus.SCORED, reward=reward, oldest="1-0", newest="1-0")
        return CutSlot(slot=one, sequence=1)

    visits = Visits()
    for entry in (
        Cut(kind=CutKind.BEGIN, lineage=1, step=0),
        Cut(lineage=1, step=1, groups=[CutGroup(group_id="0-7-0", workflow="w", slots=[slot(1.0), slot(0.0)])]),
        Outcome(group_id="0-7-0", kind=OutcomeKind.TRAINED, lineage=1),
        Outcome(group_id="0-8-0", kind=OutcomeKind.FAILED, lineage=1),
        _visit(9, 1.0),
    ):
        visits.read(entry)

    assert [visits[number] for number in range(len(visits))] == [(7, 0.5), (9, 1.0)]


def test_one_admission_looks_at_no_more_than_its_share_of_positions() -> None:
    hopeless = CurriculumSettings(name="pass_rate", keep=1e-9)
    sampler = Sampler(5000, seed=1)
    curriculum = Curriculum(hopeless, sampler, _visits(*[0.0] * 5000), seed=1)

    choice = curriculum.choose(Admitted(total=5000, num_fresh=5000, known={"0-1": 5000}), 4)

    assert (choice.groups, choice.num_looked_at) == ([], MAX_LOOKED_AT)


def test_what_is_known_is_on_record_before_it_decides() -> None:
    visits = _visits(*[1.0] * NUM_ROWS)
    curriculum = Curriculum(SETTINGS, Sampler(NUM_ROWS, seed=1), visits, seed=1)
    accounts = Accounts(max_groups_in_flight=300)
    accounts.admitted = Admitted(total=198, num_fresh=198)
    accounts.hold([ServerState(server_id="s", node_id="n", url="", version="1-0")], newest=Version(9, 9))

    first = next_admission(accounts, Sampler(NUM_ROWS, seed=1), last_step=9, curriculum=curriculum)

    assert first is not None
    assert [item.group_id.epoch for item in first.items] == [0, 0]
    assert first.record == Admitted(total=200, num_fresh=200, known={"0-1": NUM_ROWS})
    accounts.admitted = first.record
    second = next_admission(accounts, Sampler(NUM_ROWS, seed=1), last_step=9, curriculum=curriculum)
    assert second is not None
    assert second.record.num_skipped > 50
    assert second.record.total == second.record.num_fresh - second.record.num_skipped


def test_what_was_passed_over_is_not_left_over() -> None:
    sampler = Sampler(NUM_ROWS, seed=1)
    curriculum = Curriculum(SETTINGS, sampler, _visits(*[1.0] * NUM_ROWS), seed=1)
    accounts = Accounts(max_groups_in_flight=300)
    accounts.admitted = Admitted(total=1, num_fresh=2 * NUM_ROWS, known={"0-1": NUM_ROWS})

    left = left_over(accounts, sampler, curriculum=curriculum)

    expected = list(curriculum.first_groups(2 * NUM_ROWS, {"0-1": NUM_ROWS}))
    assert NUM_ROWS < len(expected) < 2 * NUM_ROWS
    assert [one.group_id for one in left] == [str(group) for group in expected]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30), st.booleans()), min_size=1, max_size=40),
    st.booleans(),
)
def test_whoever_decides_again_from_the_record_decides_the_same(
    admissions: list[tuple[int, int, bool]], is_mixed: bool
) -> None:
    """Each admission asks for so many, after so many more visits; some are made again after a crash, knowing more."""
    sampler = MixedSampler([TaskShare(30, 2.0), TaskShare(40)], seed=1) if is_mixed else Sampler(70, seed=1)
    visits, record, made = Visits(), Admitted(), list[GroupId]()
    curriculum = Curriculum(SETTINGS, sampler, visits, seed=1)
    for count, num_visits, has_crashed in admissions:
        groups = curriculum.choose(record, count).groups
        for number in range(num_visits):
            visits.read(_visit((7 * number + count) % 70, float(number % 2)))
        if has_crashed:
            curriculum = Curriculum(SETTINGS, sampler, visits, seed=1)
        choice = curriculum.choose(record, count)
        assert choice.groups == groups
        made += choice.groups
        record = msgspec.structs.replace(
            record, num_fresh=record.num_fresh + choice.num_looked_at, known=dict(choice.known)
        )

    again = Curriculum(SETTINGS, sampler, visits, seed=1)
    assert list(again.first_groups(record.num_fresh, record.known)) == made
    assert not [group for group, count in Counter(made).items() if count > 1]
