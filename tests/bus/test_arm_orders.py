"""Arms come and go by order, and those of the settings until an operator has decided about them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from areal_async.bus import Bus, Role, ask_service, serving
from areal_async.config.settings import ArmSettings, InferenceSettings, Settings
from areal_async.controller.arm_orders import ADD, REMOVE, ArmOrders
from areal_async.controller.tasks import Tasks
from areal_async.errors import UserError
from areal_async.protocol.arms import Arm, Arms, Pinned
from areal_async.protocol.subjects import ARMS
from areal_async.protocol.types import Admitted
from areal_async.versions.audit import read as read_audit
from tests.brokers import PATIENCE_S, OpenRole

pytestmark = pytest.mark.anyio

ADMITTED = Admitted(total=40, num_fresh=30, num_readmitted=10, num_skipped=0, known={}, mixes=[])


class Orders:
    def __init__(self, operator: Bus) -> None:
        self.operator = operator

    async def give(self, order: str, **body: Any) -> str:
        subject = self.operator.names.control(order)
        try:
            answer = await ask_service(self.operator, subject, {"by": "ann", **body}, deadline_s=PATIENCE_S)
        except UserError as exc:
            return f"no: {exc}"
        return str(answer["sentence"])

    async def arms(self) -> dict[str, Arm]:
        found, _ = await self.operator.get(ARMS, Arms)
        return {} if found is None else dict(found.by_name)


@asynccontextmanager
async def ordering(open_role: OpenRole, settings: Settings, tasks: Tasks | None = None) -> AsyncIterator[Orders]:
    controller = await open_role(Role.CONTROLLER)
    orders = ArmOrders(controller, settings, tasks or Tasks([("w", [{}])]), lambda: ADMITTED)
    await orders.take_up_settings()
    async with serving(controller, description="", report=dict, endpoints=orders.endpoints):
        yield Orders(await open_role(Role.OPERATOR))


async def test_an_arm_begins_with_what_is_admitted_after_it_and_goes_when_it_is_removed(
    open_role: OpenRole, settings: Settings
) -> None:
    async with ordering(open_role, settings) as orders:
        side = Pinned(name="c", arm_id="c-1", path="/arms/c")
        await orders.operator.put(ARMS, Arms(compared={"c": side}))
        said = await orders.give(ADD, name="old", version="1-4", path="/arms/old", share=0.25, reason="is it better?")
        arms = await orders.arms()
        again = await orders.give(ADD, name="old", path="/arms/other")
        removed = await orders.give(REMOVE, name="old")
        missing = await orders.give(REMOVE, name="old")
        anew = await orders.give(ADD, name="old", path="/arms/other")
        later = await orders.arms()
        kept, _ = await orders.operator.get(ARMS, Arms)

    assert said.startswith("arm old: 1-4 answers 0.25 prompts more for each that is admitted from now on")
    arm = arms["old"]
    assert (arm.version, arm.path, arm.share, arm.alpha, arm.reach) == ("1-4", "/arms/old", 0.25, 0.05, 1.0)
    assert (arm.first_admission, arm.first_position, arm.by, arm.reason) == (40, 30, "ann", "is it better?")
    assert again == "no: arm old: the run has one of that name; remove it first, or take another name"
    assert removed == "arm old: is asked nothing more, and its servers end"
    assert missing == "no: arm old: the run has none of that name; it has none"
    assert anew.startswith("arm old: /arms/other answers 0.1 prompts more")
    assert later["old"].arm_id != arm.arm_id
    assert kept is not None
    assert kept.compared == {"c": side}, "a comparison goes on"
    told = [entry.what for entry in read_audit(settings.run_directory)]
    assert any("add-arm old 1-4 share=0.25" in what for what in told), told


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"name": "1-4", "path": "x"}, "name"),
        ({"name": "old", "path": ""}, "path"),
        ({"name": "old"}, "path"),
        ({"name": "old", "path": "x", "share": 0}, "share"),
        ({"name": "old", "path": "x", "share": 1.5}, "share"),
        ({"name": "old", "path": "x", "share": "much"}, "share"),
        ({"name": "old", "path": "x", "alpha": 1}, "alpha"),
        ({"name": "old", "path": "x", "reach": 0}, "reach"),
        ({"name": "old", "path": "x", "version": "newest"}, "version"),
        ({"name": "old", "path": 7}, "path"),
    ],
)
async def test_what_is_no_arm_is_refused(
    open_role: OpenRole, settings: Settings, body: dict[str, Any], why: str
) -> None:
    async with ordering(open_role, settings) as orders:
        said = await orders.give(ADD, **body)

        assert said.startswith("no: arm: ")
        assert why in said
        assert await orders.arms() == {}


async def test_there_are_no_more_than_nodes_can_be_asked_to_serve(open_role: OpenRole, settings: Settings) -> None:
    async with ordering(open_role, settings) as orders:
        for number in range(8):
            await orders.give(ADD, name=f"a{number}", path="x")

        assert await orders.give(ADD, name="a8", path="x") == "no: arm a8: the run has 8 already; remove one first"


async def test_runs_whose_rows_have_images_or_whose_servers_share_gpus_have_none(
    open_role: OpenRole, settings: Settings
) -> None:
    tasks = Tasks([("w", [{}])])
    tasks.names_with_images = {"w"}
    async with ordering(open_role, settings, tasks) as orders:
        seen = await orders.give(ADD, name="old", path="x")
    shared = settings.model_copy(update={"inference": InferenceSettings(colocate="split")})
    async with ordering(open_role, shared) as orders:
        split = await orders.give(ADD, name="old", path="x")

    assert seen.startswith("no: arm: the rows of w have images, and arms are asked rows of text alone")
    assert split.startswith("no: arm: got one with inference.colocate=split, need servers with GPUs of their own")


async def test_arms_of_the_settings_are_there_from_the_start_and_stay_as_they_are_until_an_operator_decides(
    open_role: OpenRole, settings: Settings, tmp_path: Path
) -> None:
    with_arm = settings.model_copy(update={"arms": {"base": ArmSettings(path="m", share=0.5)}})
    async with ordering(open_role, with_arm) as orders:
        first = await orders.arms()
    async with ordering(open_role, with_arm) as orders:
        second = await orders.arms()
    changed = settings.model_copy(update={"arms": {"base": ArmSettings(path="m", share=0.25)}})
    async with ordering(open_role, changed) as orders:
        third = await orders.arms()
        await orders.give(REMOVE, name="base")
    async with ordering(open_role, changed) as orders:
        last = await orders.arms()

    assert (first["base"].share, first["base"].by) == (0.5, "settings")
    assert second == first
    assert (third["base"].share, third["base"].arm_id == first["base"].arm_id) == (0.25, False)
    assert last == {}
