"""Every due group is cut, nothing too old is, and long answers are waited for."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from areal_async.config.settings import RolloutSettings
from areal_async.protocol.types import CutSlot, OutcomeKind, Slot, SlotStatus, StoredMessage, Version
from areal_async.trainer.batch.cut import OpenGroup
from areal_async.trainer.batch.planner import CutPlan, plan_cut


def _slot(sibling: int, *, version: int = 0, status: SlotStatus = SlotStatus.SCORED, uid: str = "a") -> Slot:
    return Slot(
        sibling=sibling,
        sample_uid=f"{sibling}.{uid}",
        status=status,
        reason="" if status is SlotStatus.SCORED else "why",
        oldest=f"1-{version}",
        newest=f"1-{version}",
    )


def _group(order: int, *, version: int = 0, size: int = 2, stored: int | None = None) -> OpenGroup:
    group = OpenGroup(
        group_id=f"0-{order}-0",
        workflow="w",
        group_size=size,
        ticket_version=Version(1, version),
        num_failed_attempts=0,
        order=order,
    )
    for sibling in range(size if stored is None else stored):
        group.slots[sibling] = CutSlot(slot=_slot(sibling, version=version), sequence=order)
    return group


def _plan(groups: list[OpenGroup], *, step: int, batch: int = 2, staleness: int = 2, when: str = "wait") -> CutPlan:
    rollout = RolloutSettings.model_validate({"batch_groups": batch, "max_staleness": staleness, "when_stale": when})
    return plan_cut(groups, rollout, age=lambda first, last: step - 1 - min(first, last).step)


def _age(group: OpenGroup, step: int) -> int:
    return max(step - 1 - oldest.step for oldest, _ in group.spans)


def _ids(groups: list[OpenGroup]) -> list[str]:
    return [group.group_id for group in groups]


def test_a_full_batch_of_the_oldest_complete_groups_is_cut() -> None:
    plan = _plan([_group(3, version=1), _group(2, version=0), _group(1, version=1)], step=2)

    assert plan.is_ready
    assert _ids(plan.taken) == ["0-2-0", "0-1-0"]


def test_a_batch_that_is_not_full_waits_for_more() -> None:
    plan = _plan([_group(1)], step=1)

    assert not plan.is_ready
    assert plan.num_missing == 1


def test_every_due_group_is_cut_even_beyond_the_batch() -> None:
    plan = _plan([_group(order) for order in range(5)], step=3)

    assert plan.is_ready
    assert len(plan.taken) == 5


def test_a_due_incomplete_group_is_waited_for() -> None:
    plan = _plan([_group(1), _group(2), _group(3, stored=1)], step=3)

    assert not plan.is_ready
    assert _ids(plan.waits_for) == ["0-3-0"]


def test_a_due_group_without_a_single_slot_is_waited_for_by_its_ticket() -> None:
    plan = _plan([_group(1), _group(2), _group(3, stored=0)], step=3)

    assert _ids(plan.waits_for) == ["0-3-0"]


def test_a_group_that_is_not_due_holds_nothing_up() -> None:
    plan = _plan([_group(1), _group(2), _group(3, version=1, stored=1)], step=3)

    assert plan.is_ready


def test_drop_waits_for_no_straggler_and_drops_it_when_it_comes_too_late() -> None:
    straggler = _group(3, stored=1)
    assert _plan([_group(1), _group(2), straggler], step=3, when="drop").is_ready

    straggler.slots[1] = CutSlot(slot=_slot(1), sequence=3)

    assert _ids(_plan([straggler], step=4, when="drop").stale) == ["0-3-0"]


def test_mask_uses_a_group_that_is_too_old_only_in_part() -> None:
    group = _group(1)
    group.slots[1] = CutSlot(slot=_slot(1, version=3), sequence=1)

    assert _ids(_plan([group], step=4, when="mask").taken) == ["0-1-0"]
    assert _ids(_plan([group], step=4, when="wait").stale) == ["0-1-0"]


def test_a_rerun_group_is_judged_by_its_tokens_and_not_by_its_old_ticket() -> None:
    group = _group(1, version=0, stored=0)
    for sibling in range(2):
        group.slots[sibling] = CutSlot(slot=_slot(sibling, version=5), sequence=1)

    assert _ids(_plan([group], step=6, batch=1).taken) == ["0-1-0"]


def test_staleness_zero_waits_for_everything_that_is_admitted() -> None:
    plan = _plan([_group(1), _group(2), _group(3, stored=0)], step=1, staleness=0)

    assert not plan.is_ready


@given(
    st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=12),
    st.integers(1, 8),
    st.integers(0, 3),
    st.sampled_from(["wait", "drop"]),
)
def test_whatever_is_cut_is_complete_fresh_and_cut_once(
    shapes: list[tuple[int, bool]], step: int, staleness: int, when: str
) -> None:
    groups = [
        _group(order, version=min(version, step - 1), stored=2 if complete else 1)
        for order, (version, complete) in enumerate(shapes)
    ]

    plan = _plan(groups, step=step, staleness=staleness, when=when)

    ids = _ids(plan.taken)
    assert len(set(ids)) == len(ids)
    assert all(group.is_complete and _age(group, step) <= staleness for group in plan.taken)
    due = [group for group in groups if group.is_complete and _age(group, step) == staleness]
    assert set(_ids(due)) <= set(ids)


def _message(*slots: Slot, sequence: int = 1) -> StoredMessage:
    return StoredMessage(
        group_id="0-1-0",
        workflow="w",
        ticket_version="1-0",
        num_failed_attempts=0,
        group_size=4,
        slots=list(slots),
        sequence=sequence,
        num_bytes=10,
    )


def test_a_second_producer_of_a_slot_is_a_duplicate_and_a_repetition_is_not() -> None:
    group = _group(1, size=4, stored=0)
    assert group.add(_message(_slot(0), _slot(1))) == []
    assert group.add(_message(_slot(0), _slot(1))) == []

    duplicates = group.add(_message(_slot(1, uid="b"), _slot(2, uid="b"), sequence=2))

    assert [slot.sample_uid for slot in duplicates] == ["1.b"]
    assert group.slots[1].slot.sample_uid == "1.a"


def test_too_few_scored_siblings_are_failed_if_one_failed_and_rejected_otherwise() -> None:
    group = _group(1, size=4, stored=0)
    group.add(_message(_slot(0), *(_slot(i, status=SlotStatus.REJECTED) for i in (1, 2, 3))))
    assert group.verdict(min_group_size=1) is None
    assert group.verdict(min_group_size=2) == (OutcomeKind.REJECTED, "why")

    group.slots[3] = CutSlot(slot=_slot(3, status=SlotStatus.FAILED), sequence=1)

    assert group.verdict(min_group_size=2) == (OutcomeKind.FAILED, "why")


def test_dynamic_sampling_filters_a_group_whose_rewards_are_all_equal() -> None:
    group = _group(1, size=2, stored=0)
    group.add(_message(_slot(0), _slot(1)))

    assert group.verdict(min_group_size=1) is None
    assert group.verdict(min_group_size=1, filters_equal=True) == (OutcomeKind.FILTERED, "all rewards are 0")

    group.slots[1] = CutSlot(slot=msgspec.structs.replace(_slot(1), reward=1.0), sequence=1)

    assert group.verdict(min_group_size=1, filters_equal=True) is None
