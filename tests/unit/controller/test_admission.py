"""What is admitted follows from the books alone, and nothing that was admitted is left without an end."""

import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_async.config.settings import DatasetSettings, Settings, TaskSettings
from areal_async.controller.accounts import Accounts
from areal_async.controller.admission import (
    ADMISSION_BATCH,
    AdmissionOrder,
    Mixing,
    first_free,
    first_groups,
    has_ended,
    left_over,
    missing_for_admission,
    next_admission,
)
from areal_async.controller.curriculum import Visits
from areal_async.controller.sampler import MixedSampler, Sampler, TaskShare
from areal_async.controller.tasks import Tasks
from areal_async.errors import UserError
from areal_async.protocol.run_state import ServerState
from areal_async.protocol.types import (
    Admitted,
    Cut,
    CutGroup,
    CutKind,
    GroupId,
    Outcome,
    OutcomeKind,
    Version,
    WeightsVersion,
)

SAMPLER = Sampler(5, seed=1)
LAST_STEP = 3


def _accounts(*, held: str = "1-0", admitted: int = 0, limit: int = 3) -> Accounts:
    accounts = Accounts(max_groups_in_flight=limit)
    accounts.admitted = Admitted(total=admitted, num_fresh=admitted)
    accounts.add_cut(Cut(kind=CutKind.BEGIN, lineage=1, step=0), sequence=1)
    accounts.hold([ServerState(server_id="s", node_id="n", url="", version=held)], newest=Version(9, 9))
    return accounts


def _cut(step: int, *ids: str) -> Cut:
    return Cut(lineage=1, step=step, groups=[CutGroup(group_id=name, workflow="w", slots=[]) for name in ids])


def test_as_much_is_admitted_as_there_is_credit_failed_groups_first() -> None:
    accounts = _accounts(admitted=2)
    accounts.add_outcome(Outcome(group_id="0-4-0", kind=OutcomeKind.FAILED, lineage=1, num_failed_attempts=1))

    admission = next_admission(accounts, SAMPLER, last_step=LAST_STEP)

    assert admission is not None
    assert [str(item.group_id) for item in admission.items] == ["0-4-1", str(SAMPLER.group_at(2))]
    assert admission.record == Admitted(total=4, num_fresh=3, num_readmitted=1)
    assert (admission.first_number, admission.version) == (3, Version(1, 0))


def test_nothing_is_admitted_without_credit_without_servers_or_after_the_last_cut() -> None:
    ended = _accounts()
    ended.add_cut(_cut(LAST_STEP), sequence=2)

    for accounts, missing in (
        (_accounts(admitted=3), "a credit"),
        (_accounts(held=""), "a server"),
        (ended, "the last"),
    ):
        assert missing_for_admission(accounts, last_step=LAST_STEP).startswith(missing)
        assert next_admission(accounts, SAMPLER, last_step=LAST_STEP) is None


def test_the_run_ends_when_the_last_version_is_held() -> None:
    final = WeightsVersion(version="1-3", final=True)

    assert not has_ended(_accounts(held="1-2"), final, last_step=3)
    assert not has_ended(_accounts(held="1-3"), WeightsVersion(version="1-3"), last_step=3)
    assert has_ended(_accounts(held="1-3"), final, last_step=3)
    assert not has_ended(_accounts(held="1-3"), final, last_step=5), "the run goes on from an end that it came to"


def test_what_is_neither_cut_nor_recorded_is_left_over() -> None:
    accounts = _accounts(admitted=3)
    first, second, third = (str(SAMPLER.group_at(position)) for position in range(3))
    accounts.add_cut(_cut(1, first), sequence=2)
    accounts.add_outcome(Outcome(group_id=second, kind=OutcomeKind.STALE, lineage=1))

    left = left_over(accounts, SAMPLER)

    assert [(one.group_id, one.kind) for one in left] == [(third, OutcomeKind.ABANDONED)]


WEIGHTS = st.sampled_from(([1, 1], [1, 0], [0, 1], [3, 1], [1, 7]))
BEGUN = ("recorded", "killed before the record", "killed before the tickets")


@given(st.lists(st.tuples(WEIGHTS, st.integers(1, 100), st.sampled_from(BEGUN)), max_size=30))
def test_whatever_mix_is_wanted_and_whenever_the_controller_is_killed_all_that_has_a_ticket_is_soon_counted(
    admissions: list[tuple[list[int], int, str]],
) -> None:
    """Each admission has so many credits; who follows a controller that is killed knows the record alone."""
    sampler, accounts = MixedSampler([TaskShare(30), TaskShare(7)], seed=1), _accounts()
    free, published = first_free(accounts.admitted, has_curriculum=False), set[GroupId]()
    for weights, num_credits, fate in admissions:
        before = accounts.admitted
        accounts.max_groups_in_flight = before.total + num_credits
        mixing = Mixing(weights=weights, earliest=free)
        admission = next_admission(accounts, sampler, last_step=LAST_STEP, mixing=mixing)
        assert admission is not None
        assert before.mixes or not admission.items, "a mix is on record before anything is chosen by it"
        if fate != "killed before the tickets":
            published |= {item.group_id for item in admission.items}
        if fate == "recorded":
            accounts.admitted = admission.record
        else:
            free = first_free(accounts.admitted, has_curriculum=False)

        record = accounts.admitted
        counted = set(first_groups(record, sampler, None))
        soon = {sampler.group_at(record.num_fresh + one, record.mixes) for one in range(ADMISSION_BATCH)}
        assert len(counted) == record.num_fresh == record.total
        assert counted <= published <= counted | soon
    for first, num_rows in sampler.pools:
        epochs = [group.epoch for group in counted if first <= group.index < first + num_rows] if admissions else []
        assert all(epochs.count(epoch) == num_rows for epoch in range(max(epochs, default=0)))


SETTINGS = Settings(
    tasks=tuple(TaskSettings(workflow=f"{name}.py", dataset=DatasetSettings(path="x")) for name in ("a", "b"))
)
TASKS = Tasks([(name, [{}] * 4) for name in ("a", "b")])


def _order(record: Admitted) -> AdmissionOrder:
    return AdmissionOrder(SETTINGS, TASKS, Visits(), record=record)


def test_rows_with_one_order_in_common_keep_their_mix_and_may_be_sampled_otherwise() -> None:
    of_before = _order(Admitted(total=3, num_fresh=3))

    with pytest.raises(UserError, match=r"tasks\.1\.ratio: cannot change in this run: .* one order in common"):
        of_before.check_change("tasks.1.ratio")
    of_before.check_change("tasks.1.sampling.temperature")
    _order(Admitted()).check_change("tasks.1.ratio")


def test_an_admission_interns_no_string() -> None:
    order = _order(Admitted())
    accounts = Accounts(max_groups_in_flight=1 << 10, held=Version(1, 0))
    num_interned = 0

    def count(_: FrameType, event: str, called: Any) -> None:
        nonlocal num_interned
        num_interned += event == "c_call" and called is sys.intern

    def admit() -> None:
        admission = next_admission(accounts, order.sampler, last_step=9, mixing=order.mixing(SETTINGS), batch=1)
        assert admission is not None
        for item in admission.items:
            SETTINGS.rollout_of(TASKS.name_at(item.group_id.index))
        accounts.admitted = admission.record
        order.shares(accounts.admitted)

    for _ in range(4):  # what is imported or kept at the first of them
        admit()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for _ in range(8):
            admit()
    finally:
        sys.setprofile(before)

    assert accounts.admitted.total == 11
    assert num_interned == 0
