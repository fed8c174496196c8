"""Rewards of single replies are read from what a workflow returns, and kept with their tokens."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from areal_async.api import Policy
from areal_async.config.settings import MAX_CREDIT_BYTES, AlgorithmSettings, RolloutSettings
from areal_async.errors import WorkflowError
from areal_async.protocol.fields import MAX_CREDITS
from areal_async.protocol.types import Prompt, ReplyReward, SlotStatus, Trajectory, Turn
from areal_async.rollout.publish import MAX_HEADER_BYTES, header_bytes
from areal_async.rollout.rewards.reply_rewards import Scores, checked_scores, credits_of
from tests.unit.rollout.byte_model import ScriptedModel
from tests.unit.rollout.called import fill_one, policy_of, slot_of

pytestmark = pytest.mark.anyio

FIRST, ASKED, SECOND = [11, 12, 13], [20, 21], [14, 15]


async def play(
    returned: Any,
    *,
    max_credit_bytes: int = MAX_CREDIT_BYTES,
    sibling: int = 0,
    algorithm: Mapping[str, Any] | None = None,
) -> Trajectory:
    """Two turns of one conversation; ``returned`` makes of their ids what the workflow returns."""

    async def workflow(prompt: Prompt, policy: Policy) -> Any:
        first = await policy.complete([1, 2])
        second = await policy.complete([1, 2, *first.token_ids, *ASKED])
        return returned(first.id, second.id)

    slot = slot_of(
        sibling,
        sample_uid=f"uid{sibling}",
        max_credit_bytes=max_credit_bytes,
        one_reward_for=AlgorithmSettings(**(algorithm or {})).one_reward_for,
    )
    return await fill_one(workflow, policy_of(ScriptedModel(FIRST, SECOND)), slot)


async def test_the_reply_that_is_named_is_credited_and_the_other_counted() -> None:
    trajectory = await play(lambda first, second: {second: 0.5})

    assert (trajectory.slot.reward, trajectory.slot.credits) == (0.5, [ReplyReward(0.5, 2)])
    (sequence,) = trajectory.sequences
    assert sequence.turns is not None
    assert sequence.turns.tolist() == [-1] * 7 + [0, 0]
    assert sequence.loss_mask.tolist() == [False, False, True, True, True, False, False, True, True]
    assert (trajectory.info["rollout/num_uncredited"], trajectory.slot.num_output_tokens) == (1.0, 5)


async def test_credits_stand_in_the_order_of_the_replies_however_they_are_named() -> None:
    trajectory = await play(lambda first, second: {second: True, first: 0.5})

    assert (trajectory.slot.reward, trajectory.slot.credits) == (0.75, [ReplyReward(0.5, 3), ReplyReward(1.0, 2)])
    assert trajectory.info["rollout/num_uncredited"] == 0.0


async def test_one_number_leaves_no_trace_of_credits() -> None:
    trajectory = await play(lambda first, second: 0.5)

    assert (trajectory.slot.reward, trajectory.slot.credits, trajectory.sequences[0].turns) == (0.5, [], None)
    assert "rollout/num_uncredited" not in trajectory.info


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (lambda first, second: {}, "got rewards for replies []"),
        (lambda first, second: {first: 1.0, "x": 1.0}, "got rewards for replies ['x'], need ids out of ['uid.1'"),
        (lambda first, second: {first: float("nan")}, "returned nan, need a finite number"),
        (lambda first, second: {first: 1.5e308, second: 1.5e308}, "returned 1.5e+308, need at most 1e+06 either way"),
        (lambda first, second: -1.1e6, "returned -1.1e+06, need at most 1e+06 either way; scale the reward"),
        (lambda first, second: {first: "good"}, "returned 'good', need a float, or {reply.id: reward}"),
    ],
)
async def test_rewards_that_cannot_be_are_a_recorded_failure(returned: Any, reason: str) -> None:
    slot = (await play(returned)).slot

    assert (slot.status, slot.reward, slot.credits) == (SlotStatus.FAILED, 0.0, [])
    assert reason in slot.reason


@pytest.mark.parametrize("algorithm", [{"name": "ppo"}, {"name": "rloo", "kl_coef": 0.1, "kl_in": "reward"}])
async def test_credits_where_a_step_knows_one_reward_are_a_recorded_failure(algorithm: dict[str, Any]) -> None:
    trajectory = await play(lambda first, second: {first: 1.0}, algorithm=algorithm)
    whole = await play(lambda first, second: 1.0, algorithm=algorithm)

    assert trajectory.slot.status is SlotStatus.FAILED
    assert "which takes one for the whole trajectory" in trajectory.slot.reason
    assert whole.slot.status is SlotStatus.SCORED


async def test_credits_that_the_header_of_a_batch_has_no_room_for_are_a_recorded_failure() -> None:
    slot = (await play(lambda first, second: {first: 1 / 3, second: 1 / 7}, max_credit_bytes=40)).slot

    assert slot.status is SlotStatus.FAILED
    assert "got rewards for 2 replies, which take" in slot.reason
    assert "need at most 40" in slot.reason


def test_more_credits_than_a_slot_holds_are_refused() -> None:
    ids = [str(number) for number in range(MAX_CREDITS + 1)]

    with pytest.raises(WorkflowError, match="got rewards for 257 replies, need at most 256"):
        checked_scores(dict.fromkeys(ids, 1.0), ids, "w")


def test_the_most_that_one_slot_may_credit_fits_the_headers_of_a_message() -> None:
    turn = Turn(prompt_ids=[1], output_ids=[2] * 999, logprobs=[], spans=[], oldest="1-0", finish_reason="stop")
    scores = Scores(1 / 3, dict.fromkeys(range(MAX_CREDITS), -1 / 3))

    credits = credits_of(scores, [turn] * MAX_CREDITS, name="w", max_bytes=MAX_CREDIT_BYTES)

    assert len(msgspec.json.encode(credits)) + 1000 < MAX_CREDIT_BYTES
    assert 2 * MAX_CREDIT_BYTES < MAX_HEADER_BYTES


def test_a_role_that_cannot_travel_is_refused() -> None:
    turn = Turn(prompt_ids=[1], output_ids=[2], logprobs=[], spans=[], oldest="1-0", finish_reason="stop", role="a b")

    with pytest.raises(WorkflowError, match="got a policy named 'a b', need at most 64 letters"):
        credits_of(Scores(1.0, {0: 1.0}), [turn], name="w", max_bytes=1000)


def test_a_batch_of_the_largest_credits_fits_one_message() -> None:
    rollout = RolloutSettings(group_size=64, batch_groups=512, max_staleness=4)

    assert rollout.max_credit_bytes * 64 * rollout.max_groups_in_flight <= 6 << 20


async def test_what_is_counted_for_the_headers_covers_the_credits() -> None:
    plain = await play(lambda first, second: 1.0)
    credited = await play(lambda first, second: {first: 1 / 3, second: 1 / 7})

    assert header_bytes(credited) == header_bytes(plain) + len(msgspec.json.encode(credited.slot.credits))
