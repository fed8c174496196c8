"""A group workflow's siblings end each in its own way, and fit one message, whatever the one call does."""

from collections.abc import Sequence
from typing import Any

import anyio
import pytest
from msgspec import structs

from areal_async import Policy, Prompt, Reject, group_workflow
from areal_async.api import GroupWorkflow
from areal_async.config.settings import RolloutSettings, SamplingSettings, Settings
from areal_async.errors import RolloutError, WorkflowError
from areal_async.protocol.types import ReplyReward, SlotStatus, Trajectory
from areal_async.rollout.endpoint.policy import PolicyMaker, ServedPolicy
from areal_async.rollout.publish import MAX_HEADER_BYTES, fit_one_message, header_bytes
from areal_async.rollout.rewards.reply_rewards import Scores
from areal_async.rollout.slots import failed_trajectory
from tests.unit.rollout.byte_model import ScriptedModel, codec
from tests.unit.rollout.called import PROMPT, call_of, policy_of, slot_of

pytestmark = pytest.mark.anyio

SCORED, FAILED, REJECTED = SlotStatus.SCORED, SlotStatus.FAILED, SlotStatus.REJECTED


def policies_of(count: int) -> list[ServedPolicy]:
    return [policy_of(ScriptedModel([97 + number] * 3), name=str(number)) for number in range(count)]


async def play(
    workflow: GroupWorkflow,
    *,
    count: int = 3,
    policies: list[ServedPolicy] | None = None,
    settings: Settings | None = None,
    deadline_s: float = 60.0,
) -> list[Trajectory]:
    slots = [slot_of(number, sample_uid=str(number), ticket_version="1-0") for number in range(count)]
    call = call_of(workflow, policies or policies_of(count), settings=settings, deadline_s=deadline_s)
    return await call.fill(PROMPT, slots)


def ending(returned: Any, *, speakers: int = 3) -> GroupWorkflow:
    """Every sibling speaks once; then the call returns or raises what it is given."""

    @group_workflow
    async def workflow(prompt: Prompt, siblings: Sequence[Policy]) -> Any:
        for policy in siblings[:speakers]:
            await policy.complete([1, 2])
        if isinstance(returned, BaseException):
            raise returned
        return returned

    return workflow


async def test_every_sibling_gets_its_own_reward_and_its_own_tokens() -> None:
    trajectories = await play(ending([0.0, 0.5, {"2.1": 1.0}]))

    assert [(one.slot.sibling, one.slot.status, one.slot.reward) for one in trajectories] == [
        (0, SCORED, 0.0), (1, SCORED, 0.5), (2, SCORED, 1.0),
    ]  # fmt: skip
    assert [one.sequences[0].token_ids.tolist()[2:] for one in trajectories] == [[97] * 3, [98] * 3, [99] * 3]
    assert [len(one.slot.credits) for one in trajectories] == [0, 0, 1]


@pytest.mark.parametrize(
    ("returned", "status", "reason"),
    [
        (Reject("not now"), REJECTED, "not now"),
        (ValueError("oops"), FAILED, "workflow w: ValueError: oops"),
        ([1.0, 2.0], FAILED, "need a sequence of 3, one for each sibling"),
        (1.0, FAILED, "returned 1.0, need a sequence of 3"),
        ("abc", FAILED, "returned 'abc', need a sequence of 3"),
        ({"0.1": 1.0}, FAILED, "need a sequence of 3"),
    ],
)
async def test_what_ends_the_call_ends_every_sibling(returned: Any, status: SlotStatus, reason: str) -> None:
    trajectories = await play(ending(returned))

    assert [one.slot.status for one in trajectories] == [status] * 3
    assert all(reason in one.slot.reason for one in trajectories)


async def test_what_was_not_awaited_ends_every_sibling_and_is_called_that() -> None:
    async def scores() -> list[float]:
        return [1.0, 1.0, 1.0]

    @group_workflow
    async def workflow(prompt: Prompt, siblings: Sequence[Policy]) -> Any:
        return scores()

    reasons = {one.slot.reason for one in await play(workflow)}

    assert reasons == {"group workflow: returned scores(...), which was not awaited; write await before the call"}


@pytest.mark.parametrize(
    ("returned", "status", "reason"),
    [
        (Reject("too short"), REJECTED, "too short"),
        (float("nan"), FAILED, "need a finite number"),
        (None, FAILED, "returned None"),
        ({"0.1": 1.0}, FAILED, "got rewards for replies ['0.1']"),
    ],
)
async def test_what_is_wrong_with_one_sibling_is_that_siblings_alone(
    returned: Any, status: SlotStatus, reason: str
) -> None:
    trajectories = await play(ending([1.0, returned, 0.0]))

    assert [one.slot.status for one in trajectories] == [SCORED, status, SCORED]
    assert reason in trajectories[1].slot.reason


async def test_a_sibling_that_never_called_the_model_fails_alone() -> None:
    trajectories = await play(ending([1.0, 1.0, 1.0], speakers=2))

    assert [one.slot.status for one in trajectories] == [SCORED, SCORED, FAILED]
    assert "without a call of the model" in trajectories[2].slot.reason


async def test_a_call_past_its_deadline_fails_every_sibling() -> None:
    @group_workflow
    async def workflow(prompt: Prompt, siblings: Sequence[Policy]) -> Any:
        await anyio.sleep_forever()

    trajectories = await play(workflow, deadline_s=0.2)

    assert {one.slot.reason for one in trajectories} == {"workflow w: ran past rollout.episode_deadline_s = 0.2 s"}


async def test_a_denied_request_of_one_siblings_agent_fails_that_sibling() -> None:
    class Denied(ServedPolicy):
        @property
        def failures(self) -> list[RolloutError]:
            return [WorkflowError("denied")] if self.reply_ids[:1] == ["1.1"] else []

    policies: list[ServedPolicy] = [
        Denied(PolicyMaker(generator=ScriptedModel([97]), codec=codec()), SamplingSettings(), name=str(number))
        for number in range(3)
    ]

    trajectories = await play(ending([1.0, 1.0, 1.0]), policies=policies)

    assert [one.slot.reason for one in trajectories] == ["", "denied", ""]


async def test_a_group_that_fits_no_message_becomes_recorded_failures_that_say_so() -> None:
    rollout = RolloutSettings(group_size=1, min_group_size=1, max_trajectory_bytes=1 << 10)
    trajectories = await play(ending([1.0] * 16, speakers=16), count=16, settings=Settings(rollout=rollout))

    assert [one.slot.status for one in trajectories] == [FAILED] * 16
    assert "a group workflow's siblings share one message" in trajectories[0].slot.reason


async def test_long_reasons_are_shortened_until_all_fit_one_message() -> None:
    trajectories = await play(ending(ValueError("é" * 900)), count=64)

    assert all(one.slot.reason.startswith("workflow w: ValueError: ééé") for one in trajectories)
    assert sum(map(header_bytes, trajectories)) <= MAX_HEADER_BYTES
    assert fit_one_message(trajectories, max_bytes=1 << 20) == trajectories


async def test_an_evaluation_is_a_group_of_one() -> None:
    assert await call_of(ending([0.5]), policies_of(1)).endings(PROMPT) == [Scores(0.5)]
    (withdrawn,) = await call_of(ending([Reject("no")], speakers=0), policies_of(1)).endings(PROMPT)
    assert isinstance(withdrawn, Reject)


async def test_reasons_take_only_what_credits_have_left_of_one_message() -> None:
    reason = "\x01" * 1000  # six bytes for each, in JSON
    scored = (await play(ending([0.0] * 8), count=8))[:8]
    credited = [ReplyReward(0.1234567890123 + number, 10, "") for number in range(140)]
    large = [structs.replace(one, slot=structs.replace(one.slot, credits=credited)) for one in scored]
    told = [failed_trajectory(structs.replace(one.slot, sibling=8 + one.slot.sibling), reason) for one in scored]

    fitted = fit_one_message([*large, *told], max_bytes=1 << 20)

    assert sum(map(header_bytes, fitted)) <= MAX_HEADER_BYTES < sum(map(header_bytes, [*large, *told]))
    assert [one.slot.credits for one in fitted[:8]] == [one.slot.credits for one in large]
    assert all(len(one.slot.reason) >= 60 for one in fitted[8:])
