"""What a run's order of prompts lets change while it goes on."""

import pytest

from areal_async.controller.curriculum import Visits
from areal_async.controller.order import Order
from areal_async.controller.tasks import Tasks
from areal_async.errors import UserError
from areal_async.settings import DatasetSettings, Settings, TaskSettings
from areal_async.types import Admitted

SETTINGS = Settings(
    tasks=tuple(TaskSettings(workflow=f"{name}.py", dataset=DatasetSettings(path="x")) for name in ("a", "b"))
)


def _order(record: Admitted) -> Order:
    return Order(SETTINGS, Tasks([(name, [{}] * 4) for name in ("a", "b")]), Visits(), record=record)


def test_rows_with_one_order_in_common_keep_their_mix_and_may_be_sampled_otherwise() -> None:
    of_before = _order(Admitted(total=3, num_fresh=3))

    with pytest.raises(UserError, match=r"tasks\.1\.ratio: cannot change in this run: .* one order in common"):
        of_before.check_change("tasks.1.ratio")
    of_before.check_change("tasks.1.sampling.temperature")
    _order(Admitted()).check_change("tasks.1.ratio")
