"""What several ranks cannot try together is tried in a process of its own, and ends nothing else, whatever it does."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from areal_async.config.settings import Settings
from areal_async.config.sources import dump_settings
from areal_async.protocol.types import Cut, CutGroup, CutSlot, Trajectory, Version
from areal_async.trainer.alone import Alone, Material
from areal_async.trainer.batch.culprits import find_culprits
from areal_async.trainer.batch.payloads import RankShard, slots_of
from tests.bus.stored import trajectory

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

GROUPS = [f"0-{number}-0" for number in range(3)]
POISON = [102, 101]
"""Of the first groups: one ends the process, the next raises, the last is sound."""
CALL = """
import os

import torch


def advantages(rows, advantages):
    print("not an answer")
    tokens = {int(one) for row in rows for one in row.token_ids}
    if 101 in tokens:
        raise ValueError("a row that no step can take")
    if 102 in tokens:
        os._exit(3)
    if 103 in tokens:
        raise torch.OutOfMemoryError("of a GPU that another process fills")
    return advantages
"""


@pytest.fixture
def run_directory(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two ranks, as one of which this process may count."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    call = tmp_path / "call.py"
    call.write_text(CALL)
    settings = Settings.model_validate(
        {
            "model": {"path": str(model), "dtype": "float32"},
            "rollout": {"group_size": 1, "min_group_size": 1},
            "trainer": {"num_ranks": 2, "tensor_parallel": 2, "token_budget": 64},
            "algorithm": {"calls": [f"{call}:advantages"], "advantage_std": "none"},
            "tasks": [{"workflow": "w.py", "dataset": {"path": "none"}}],
        }
    )
    (tmp_path / "config.yaml").write_text(dump_settings(settings))
    return tmp_path


def _material(poison: Sequence[int] = POISON) -> Material:
    trajectories: list[Trajectory] = [trajectory(group_id, 0) for group_id in GROUPS]
    for one, token in zip(trajectories, poison, strict=False):
        one.sequences[0].token_ids[1] = token
    groups = [
        CutGroup(group_id=group_id, workflow="w", slots=[CutSlot(slot=one.slot, sequence=1)])
        for group_id, one in zip(GROUPS, trajectories, strict=True)
    ]
    cut = Cut(lineage=1, step=1, groups=groups, max_staleness=1)
    slots = slots_of(cut)
    part = RankShard(cut=cut, slots=slots, mine=slots, trajectories=dict(enumerate(trajectories)), missing={})
    return Material.of(part, [], start=Version(1, 0))


async def test_groups_that_raise_or_end_the_process_are_found_and_the_sound_ones_are_not(run_directory: Path) -> None:
    alone = Alone(run_directory, _material())
    try:
        found = await find_culprits(GROUPS, "it failed", alone.attempt)
    finally:
        await alone.aclose()

    assert found == {
        GROUPS[0]: "a process that trained it ended with status 3",
        GROUPS[1]: "ValueError: a row that no step can take",
    }


async def test_where_there_is_no_room_for_some_groups_nobody_is_blamed(run_directory: Path) -> None:
    """The process has the rank's GPU, beside it: the longest groups fail there, whoever ended the step."""
    alone = Alone(run_directory, _material([103]))
    try:
        assert await find_culprits(GROUPS, "it failed", alone.attempt) == {}
    finally:
        await alone.aclose()


async def test_what_lacks_its_model_blames_nobody(run_directory: Path) -> None:
    config = run_directory / "config.yaml"
    config.write_text(config.read_text().replace("token_budget: 64", "token_budget: none"))
    alone = Alone(run_directory, _material())
    try:
        assert await find_culprits(GROUPS, "it failed", alone.attempt) == {}
    finally:
        await alone.aclose()
