"""What a run's order of prompts lets change while it goes on, and that it leaves nothing behind."""

import sys
from types import FrameType
from typing import Any

import pytest

from areal_async.config.settings import DatasetSettings, Settings, TaskSettings
from areal_async.controller.accounts import Accounts
from areal_async.controller.admission import next_admission
from areal_async.controller.curriculum import Visits
from areal_async.controller.order import Order
from areal_async.controller.tasks import Tasks
from areal_async.errors import UserError
from areal_async.protocol.types import Admitted, Version

SETTINGS = Settings(
    tasks=tuple(TaskSettings(workflow=f"{name}.py", dataset=DatasetSettings(path="x")) for name in ("a", "b"))
)
TASKS = Tasks([(name, [{}] * 4) for name in ("a", "b")])


def _order(record: Admitted) -> Order:
    return Order(SETTINGS, TASKS, Visits(), record=record)


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
