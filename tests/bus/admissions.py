"""What the tests of the order of admission share: a small run, where it begins, and a controller that dies."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from areal_async.bus import Bus, Role
from areal_async.config.settings import (
    BusSettings,
    CurriculumSettings,
    DatasetSettings,
    EvalSettings,
    RolloutSettings,
    RunSettings,
    Settings,
    TaskSettings,
)
from areal_async.controller import controller as controlled
from areal_async.controller.accounts import Accounts
from areal_async.controller.controller import Controller
from areal_async.controller.tasks import Tasks
from areal_async.errors import PipelineError
from areal_async.process.failpoints import FIRED, SPECIFICATION, FaultPoints
from areal_async.protocol.types import CutKind
from tests.brokers import OpenRole
from tests.bus.test_controller import World


def settings_of(
    directory: Path, *workflows: str, in_flight: int, curriculum: CurriculumSettings | None = None
) -> Settings:
    """Return those of a run with so many groups in flight."""
    return Settings(
        run=RunSettings(name="test", directory=directory, steps=50),
        tasks=tuple(TaskSettings(workflow=f"{name}.py", dataset=DatasetSettings(path="x")) for name in workflows),
        rollout=RolloutSettings(
            group_size=2, min_group_size=1, batch_groups=in_flight // 2, max_staleness=1,
            curriculum=curriculum or CurriculumSettings(),
        ),
        eval=EvalSettings(every_steps=0),
        bus=BusSettings(operation_deadline_s=60.0, max_disk_bytes=8 << 30),
    )  # fmt: skip


async def begin(open_role: OpenRole) -> World:
    """Return the others' side of a run whose first weights are held."""
    world = World(await open_role(Role.NODE), await open_role(Role.TRAINER))
    await world.cut(CutKind.BEGIN, 0)
    await world.hold("1-0")
    return world


def controller_of(bus: Bus, settings: Settings, *, num_rows: int) -> Controller:
    """Return the run's, each task with so many rows."""
    accounts = Accounts(max_groups_in_flight=settings.rollout.max_groups_in_flight)
    tasks = Tasks([(task.name, [{}] * num_rows) for task in settings.tasks])
    return Controller(bus, settings, tasks, None, accounts=accounts)


@contextmanager
def dying(at: str, number: int, folder: Path) -> Iterator[None]:
    """Have a controller that runs in the block die when it comes to a fault point for that time; expect it to."""
    armed = {SPECIFICATION: f"controller.{at}:{number}:raise", FIRED: str(folder / "fired")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controlled, "failpoint", FaultPoints(armed).reach)
        with pytest.RaisesGroup(pytest.RaisesExc(PipelineError, match=at), flatten_subgroups=True):
            yield
