"""Operators promote versions of a live run through its controller, which tells of it; the broker is the real one."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from areal_async.bus import Bus, Report, Role, ask_service, serving
from areal_async.config.settings import Settings
from areal_async.controller.tag_orders import TagOrders
from areal_async.errors import UserError
from areal_async.process.atomic_folders import LEDGER
from areal_async.versions import tags
from tests.brokers import PATIENCE_S, OpenRole

pytestmark = pytest.mark.anyio


@pytest.fixture
async def operator(open_role: OpenRole, settings: Settings) -> AsyncIterator[Bus]:
    for version in ("1-10", "1-20"):
        folder = settings.run_directory / "checkpoints" / version
        folder.mkdir(parents=True)
        (folder / LEDGER).touch()
    controller = await open_role(Role.CONTROLLER)
    endpoints = TagOrders(controller, settings).endpoints
    async with serving(controller, description="orders", report=dict, endpoints=endpoints):
        yield await open_role(Role.OPERATOR)


async def _promote(bus: Bus, **body: Any) -> Report:
    return await ask_service(bus, bus.names.control("promote"), body, deadline_s=PATIENCE_S)


async def test_a_promotion_is_written_and_told_with_who_and_why(operator: Bus, settings: Settings) -> None:
    async with operator.subscribe(operator.names.all_events) as events:
        answer = await _promote(operator, version="20", force=True, by="ann", reason="it is good")
        subject, data = await anext(events)
        taken = await _promote(operator, version=None)

    assert answer == {"tag": "champion", "version": "1-20", "was": "", "comparison": ""}
    assert taken == {"tag": "champion", "version": "", "was": "1-20", "comparison": ""}
    assert subject == "areal.test.events.controller.0.version.tagged"
    told = {"event": "version.tagged", "version": "1-20", "was": "", "by": "ann", "reason": "it is good"}
    assert json.loads(data).items() >= told.items()
    assert [line.version for line in tags.history(settings.run_directory)] == ["1-20", ""]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"version": "1-20"}, "no comparison is there of 1-20"),
        ({"version": "1-30", "force": True}, "has no checkpoint 1-30, need one of 1-10, 1-20, best, last"),
        ({"version": "1-20", "force": True, "tag": "last"}, "tag: got last"),
        ({"version": "1-20", "force": "yes"}, "promote: Expected `bool`, got `str`"),
        ({"version": "1-20", "by": "x" * 201}, "promote: Expected `str` of length <= 200"),
        ({"version": "x" * 71}, "promote: Expected `str` of length <= 70"),
        ({"version": 20}, "promote: Expected `str | null`, got `int`"),
        ({}, "tag champion: no version has it"),
    ],
)
async def test_what_is_no_promotion_is_refused(
    operator: Bus, settings: Settings, body: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError) as told:
        await _promote(operator, **body)

    assert sentence in str(told.value)
    assert not (settings.run_directory / "tags.jsonl").exists()
