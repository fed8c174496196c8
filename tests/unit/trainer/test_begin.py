"""Ranks wait for rank 0 to choose a checkpoint, however long it reads, and hear of a failure by its own words."""

from dataclasses import dataclass, replace
from typing import Any, cast

import anyio
import pytest

from areal_async.errors import UserError
from areal_async.protocol.types import CheckpointRecord
from areal_async.trainer import begin as module
from areal_async.trainer.begin import Begin
from areal_async.trainer.engine.parallel.ranks import Ranks
from tests.unit.trainer.rank_workers import RankWorkers

DEADLINE_S = 2.0


@dataclass
class NewLineage:
    """A lineage whose log has one entry."""

    number: int = 3
    checkpoint: CheckpointRecord | None = None
    rollback: None = None

    async def read_log(self) -> None:
        pass

    async def write_begin(self) -> int:
        return 7


def begun(ranks: Ranks, reading_s: float) -> Begin:
    """Begin, where reading the checkpoint takes so long."""

    async def read(_: Any) -> None:
        await anyio.sleep(reading_s)

    short = replace(ranks, deadline_s=DEADLINE_S).with_control_group()
    lineage = cast(Any, NewLineage()) if ranks.rank == 0 else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "choose_checkpoint", read)
        return anyio.run(module.begin, short, lineage)


@pytest.fixture(scope="module")
def workers() -> Any:
    with RankWorkers(2) as workers:
        yield workers


@pytest.mark.parametrize("reading_s", [0.0, 2 * DEADLINE_S])
def test_ranks_wait_for_a_checkpoint_that_is_read_for_longer_than_a_collective_may_take(
    workers: RankWorkers, reading_s: float
) -> None:
    assert workers.run(begun, reading_s) == [Begin(lineage=3, sequence=7, checkpoint="")] * 2


@pytest.mark.anyio
async def test_what_is_wrong_with_the_checkpoint_ends_rank_0(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(_: Any) -> None:
        raise UserError("checkpoint 1-1: damaged")

    monkeypatch.setattr(module, "choose_checkpoint", refuse)

    with pytest.raises(ExceptionGroup) as raised:
        await module.begin(ranks, cast(Any, NewLineage()))

    assert raised.group_contains(UserError, match="checkpoint 1-1: damaged")
