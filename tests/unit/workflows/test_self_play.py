"""A game of nim ends with one winner, every move is credited to who made it, and each role keeps its conversation."""

from collections.abc import Mapping

import pytest

from areal_async.config.settings import SamplingSettings
from areal_async.protocol.types import Prompt
from areal_async.rollout.endpoint.policy import PolicyMaker, ServedPolicy
from areal_async.rollout.policy.merge import merge_turns
from tests.unit.rollout.byte_model import END, ScriptedModel, codec
from workflows.nim import best_move, question, read_move
from workflows.self_play import self_play

pytestmark = pytest.mark.anyio


async def play(
    stones: int, *moves: str, first: str = "policy", rival_takes: int = 0
) -> tuple[ServedPolicy, Mapping[str, float]]:
    model = ScriptedModel(*([*move.encode(), END] for move in moves))
    policy = PolicyMaker(generator=model, codec=codec()).policy(SamplingSettings(), "uid")
    prompt = Prompt(epoch=0, index=0, row={"stones": stones, "first": first, "rival_takes": rival_takes})
    rewards = await self_play(prompt, policy, policy.in_role("opponent", SamplingSettings()))
    assert isinstance(rewards, Mapping)
    assert not model.answers, "the game was to go on"
    return policy, rewards


def by_role(policy: ServedPolicy, rewards: Mapping[str, float]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for turn, reply_id in zip(policy.turns, policy.reply_ids, strict=True):
        found.setdefault(turn.role, []).append(rewards[reply_id])
    return found


async def test_who_takes_the_last_stone_wins_with_all_of_its_moves() -> None:
    policy, rewards = await play(6, "#### 2", "1", "#### 3")

    assert by_role(policy, rewards) == {"": [1.0, 1.0], "opponent": [-1.0]}
    assert policy.info == {
        "num_moves": 3, "share_legal_moves": 1.0, "policy_wins": True, "share_best_moves": 1.0,
    }  # fmt: skip
    assert len(merge_turns(policy.turns)) == 2, "a conversation for each role"


async def test_the_other_role_may_begin() -> None:
    policy, rewards = await play(3, "3", first="opponent")

    assert by_role(policy, rewards) == {"opponent": [1.0]}
    assert policy.info["policy_wins"] is False


async def test_rival_that_makes_no_mistake_may_sit_in_the_opponents_place() -> None:
    policy, rewards = await play(6, "2", "3", rival_takes=1)

    assert by_role(policy, rewards) == {"": [1.0, 1.0]}, "nobody else said anything"
    policy, rewards = await play(6, "1", "1", rival_takes=1)

    assert by_role(policy, rewards) == {"": [-1.0, -1.0]}, "five stones: it leaves four, and the last is its own"


@pytest.mark.parametrize("move", ["#### 4", "none", "", "0", "-1", "1.5", "#### 17"])
async def test_forbidden_move_loses_at_once_and_costs_more(move: str) -> None:
    policy, rewards = await play(7, "1", move)

    assert by_role(policy, rewards) == {"": [1.0], "opponent": [-2.0]}
    assert policy.info["share_legal_moves"] == 0.5


def test_nobody_takes_more_than_there_is() -> None:
    assert read_move("#### 3", 2) is None
    assert read_move("I take 2 and\n#### 1", 2) == 1
    assert question(1) == "1 stone is left. Take 1, 2 or 3. How many do you take?"


def test_best_move_wins_against_every_answer() -> None:
    def wins(stones: int) -> bool:
        return any(taken <= stones and not wins(stones - taken) for taken in (1, 2, 3))

    for stones in range(1, 16):
        assert bool(best_move(stones)) == wins(stones)
        assert not best_move(stones) or not wins(stones - best_move(stones))
