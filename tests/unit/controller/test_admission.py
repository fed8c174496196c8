"""What is admitted follows from the books alone, and nothing that was admitted is left without an end."""

from areal_async.controller.accounts import Accounts
from areal_async.controller.admission import has_ended, left_over, missing_for_admission, next_admission
from areal_async.controller.sampler import Sampler
from areal_async.types import (
    Admitted,
    Cut,
    CutGroup,
    CutKind,
    Outcome,
    OutcomeKind,
    ServerState,
    Version,
    WeightsVersion,
)

SAMPLER = Sampler(5, seed=1)
LAST_STEP = 3


def _accounts(*, held: str = "1-0", admitted: int = 0, limit: int = 3) -> Accounts:
    accounts = Accounts(max_groups_in_flight=limit)
    accounts.admitted = Admitted(total=admitted, num_fresh=admitted)
    accounts.add_cut(Cut(kind=CutKind.BEGIN, lineage=1, step=0), sequence=1)
    accounts.hold([ServerState(server_id="s", node_id="n", url="", version=held)])
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

    assert not has_ended(_accounts(held="1-2"), final)
    assert not has_ended(_accounts(held="1-3"), WeightsVersion(version="1-3"))
    assert has_ended(_accounts(held="1-3"), final)


def test_what_is_neither_cut_nor_recorded_is_left_over() -> None:
    accounts = _accounts(admitted=3)
    first, second, third = (str(SAMPLER.group_at(position)) for position in range(3))
    accounts.add_cut(_cut(1, first), sequence=2)
    accounts.add_outcome(Outcome(group_id=second, kind=OutcomeKind.STALE, lineage=1))

    left = left_over(accounts, SAMPLER, last_step=LAST_STEP)

    assert [(one.group_id, one.kind) for one in left] == [(third, OutcomeKind.ABANDONED)]
