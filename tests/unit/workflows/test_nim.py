"""An environment of one game: the rules, who wins, and what each reply is worth."""

from collections.abc import Mapping

import pytest

from areal_async.config.settings import SamplingSettings
from areal_async.protocol.types import Prompt
from areal_async.rollout.endpoint.policy import PolicyMaker
from tests.unit.rollout.byte_model import END, ScriptedModel, codec
from workflows.nim import FORBIDDEN, Nim, best_move, nim, rows

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("stones", "moves", "rewards"),
    [
        (6, ("#### 2", "3"), [1.0, 1.0]),  # it leaves four, the other takes one
        (6, ("1", "1"), [-1.0, -1.0]),
        (7, ("I take 4",), [FORBIDDEN]),
        (6, ("2", "none"), [FORBIDDEN, FORBIDDEN]),
        (2, ("3",), [FORBIDDEN]),
    ],
)
async def test_each_reply_is_worth_what_is_earned_from_it_on(
    stones: int, moves: tuple[str, ...], rewards: list[float]
) -> None:
    model = ScriptedModel(*([*move.encode(), END] for move in moves))
    policy = PolicyMaker(generator=model, codec=codec()).policy(SamplingSettings(), "uid")

    earned = await nim(Prompt(epoch=0, index=0, row={"stones": stones, "rival_takes": 1}), policy)

    assert isinstance(earned, Mapping)
    assert [earned[reply_id] for reply_id in policy.reply_ids] == rewards
    assert policy.info == {"has_won": rewards[0] == 1.0, "keeps_rules": rewards[0] > FORBIDDEN}


def test_every_game_of_the_rows_can_be_won() -> None:
    for row in rows():
        game = Nim()
        game.reset(row)
        stones = row["stones"]
        while True:
            step = game.step(str(best_move(stones)))
            if step.is_over:
                break
            stones = int(step.told.split()[0])
        assert step.reward == 1.0
