"""A step that has shown images is archived with them, and trained again from there once the broker has let them go."""

from pathlib import Path

import anyio
import pytest
from msgspec import structs

from areal_async.bus import Role
from areal_async.config.settings import ModelSettings, Settings, TrainerSettings
from areal_async.protocol.types import Cut, CutGroup, CutSlot
from areal_async.trainer.batch.payloads import RankShard, slots_of
from areal_async.trainer.engine.engines import Engines, EngineThreads
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.threads import BackgroundJob
from areal_async.trainer.output.archive_reader import find_archived, read_recorded
from areal_async.trainer.step_runner import StepRunner
from tests.brokers import OpenRole
from tests.unit.trainer.archives import archive_seeing_step
from tests.unit.trainer.seeing import save_seeing_model

pytestmark = pytest.mark.anyio

GROUP = "0-1-0"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_seeing_model(tmp_path_factory.mktemp("seeing"), "qwen3_vl")


@pytest.fixture
def settings(settings: Settings, model: Path) -> Settings:
    return settings.model_copy(
        update={
            "model": ModelSettings.model_validate({"path": str(model), "dtype": "float32"}),
            "trainer": TrainerSettings(lr=1e-2, token_budget=256),
            "rollout": settings.rollout.model_copy(update={"group_size": 4, "min_group_size": 4}),
        }
    )


async def test_what_a_step_has_shown_is_archived_and_the_step_is_trained_again_from_there(
    settings: Settings, ranks: Ranks, open_role: OpenRole, tmp_path: Path
) -> None:
    bus = await open_role(Role.TRAINER)
    archive_seeing_step(tmp_path / "made", 1)
    recorded = read_recorded(list((tmp_path / "made" / "trajectories").iterdir()))
    _, images = find_archived(tmp_path / "made", 1, [one.trajectory.slot.sample_uid for one in recorded])
    cut = Cut(
        lineage=1,
        step=1,
        max_staleness=2,
        groups=[
            CutGroup(
                group_id=GROUP,
                workflow="w",
                slots=[CutSlot(slot=structs.replace(one.trajectory.slot, crc32=1), sequence=1) for one in recorded],
            )
        ],
    )
    trajectories = {one.position: one.trajectory for one in recorded}
    slots = slots_of(cut)
    shard = RankShard(cut=cut, slots=slots, mine=slots, trajectories=trajectories, missing={}, images=images)

    async with anyio.create_task_group() as tasks:

        def runner(lineage: int) -> StepRunner:
            engines = Engines.for_run(settings, ranks)
            return StepRunner(
                settings=settings,
                directory=tmp_path / "run",
                bus=bus,
                engines=engines,
                threads=EngineThreads.for_run(settings, ranks),
                archiving=BackgroundJob(tasks),
                lineage=lineage,
                feed=None,
            )

        first, again = runner(1), runner(2)
        result = await first.run(shard, {}, waited_s=0.0)
        await first.archiving.finish()
        (archived,) = (tmp_path / "run" / "images").iterdir()
        fetched = await again.fetch_again(cut)  # no message is stored
        repeated = await again.run(fetched, fetched.missing, waited_s=0.0)
        await again.archiving.finish()

    assert archived.name == "step-000001-1-0.parquet"
    assert fetched.missing == {}
    assert fetched.images == images
    assert repeated.stats.loss == result.stats.loss
    assert (tmp_path / "run" / "images" / "step-000001-2-0.parquet").read_bytes() == archived.read_bytes()
