"""The requests of a ticket's siblings are known to be one group's, whoever sends them."""

from collections import Counter
from typing import Any

import pytest

from areal_async.api import Policy
from areal_async.bus import Role
from areal_async.config.settings import Settings
from areal_async.inference.pool import ServerHandle, SiblingGroup
from areal_async.inference.siblings import current_group
from areal_async.protocol.types import Prompt, Ticket, Turn
from areal_async.rollout.group import GroupRun
from areal_async.rollout.node_context import NodeContext
from tests.brokers import OpenRole
from tests.unit.rollout.byte_model import ScriptedModel, codec

pytestmark = pytest.mark.anyio


class Watched(ScriptedModel):
    """Notes whose requests it gets."""

    def __init__(self) -> None:
        super().__init__(*([97] for _ in range(24)))
        self.groups: list[SiblingGroup | None] = []

    async def generate(self, *args: Any, **options: Any) -> tuple[Turn, ServerHandle]:
        self.groups.append(current_group())
        return await super().generate(*args, **options)


async def test_siblings_requests_are_one_groups_and_no_other_groups(
    broker: object, open_role: OpenRole, settings: Settings
) -> None:
    async def workflow(prompt: Prompt, policy: Policy) -> float:
        await policy.chat([{"role": "user", "content": "a"}])
        await policy.chat([{"role": "user", "content": "b"}], n=2)
        return 1.0

    model = Watched()
    node = NodeContext(
        settings=settings, bus=await open_role(Role.NODE), node_id="0", generator=model, codec=codec(),
        workflows={"w": workflow},
    )  # fmt: skip

    for index in range(2):
        ticket = Ticket(group_id=f"0-{index}-0", workflow="w", row={}, group_size=4, version="1-2", number=index + 1)
        await GroupRun(node, ticket, {}, range(4)).run()

    assert current_group() is None
    assert None not in model.groups
    assert sorted(Counter(map(id, model.groups)).values()) == [12, 12]
    assert Counter(group.number for group in model.groups if group is not None) == {1: 12, 2: 12}
