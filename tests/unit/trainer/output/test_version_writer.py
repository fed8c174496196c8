"""Ranks keep their parts of versions, and write or drop them as rank 0 says, which sends all and keeps its own."""

import hashlib
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import anyio
import anyio.lowlevel
import torch
from safetensors.torch import load_file
from torch import Tensor

from areal_async.errors import PipelineError
from areal_async.protocol.types import Version, WeightsVersion
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.output.served import ServedWeights
from areal_async.trainer.output.version_writer import WAITS_PER_DEADLINE, VersionWriter
from tests.unit.trainer.models import engine_of, random_rows, save_model
from tests.unit.trainer.rank_workers import RankWorkers

FILE_BYTES, BUCKET_BYTES = 12_000, 7_000
LAYOUTS: list[dict[str, Any]] = [{}, {"pipeline_parallel": 2}]


class Told(NamedTuple):
    """What a rank says of its versions."""

    saved: dict[str, str]
    """Digests of the files of the newest weights, as they are saved after a run."""
    part_bytes: int
    whole_bytes: int
    sent_bytes: int
    is_sent_whole: bool
    """What was sent at last is what was sent again from the files."""
    num_left: int
    """Versions that are still kept."""
    announced: list[WeightsVersion]
    refused: str


def test_versions_are_written_by_all_ranks_or_dropped_and_sent_whole(two_ranks: RankWorkers, tmp_path: Path) -> None:
    model = save_model(tmp_path / "source", family="qwen2", num_layers=4, vocab_size=62)

    by_rank = two_ranks.run(publish_versions, model, tmp_path, LAYOUTS)

    for number, (first, second) in enumerate(zip(*by_rank, strict=True)):
        folder = tmp_path / str(number)
        assert sorted(path.name for path in folder.iterdir()) == ["1-1", "1-3"]
        written = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("1-3/*.safetensors")
        }
        newest = first.announced[-1]
        assert newest.version == "1-3"
        assert newest.sha256 == written == first.saved
        stored = {name: one for path in folder.glob("1-3/*.safetensors") for name, one in load_file(path).items()}
        assert newest.tensors_sha256 == {name: _sha256(stored[name]) for name in newest.tensors_sha256}
        assert {"model.norm.weight", "model.layers.0.mlp.down_proj.weight"} <= newest.tensors_sha256.keys()
        assert (first.sent_bytes, second.sent_bytes, second.announced) == (first.whole_bytes, 0, [])
        assert first.is_sent_whole
        assert first.part_bytes + second.part_bytes == first.whole_bytes
        assert min(first.part_bytes, second.part_bytes) > first.whole_bytes / 3, "each keeps its share"
        assert first.num_left == second.num_left == 0
        assert "1-4 could not be written: another rank says why" in first.refused
        assert "1-4 could not be written: OSError" in second.refused


def test_a_rank_waits_for_the_end_as_long_as_rank_0_has_it_wait(two_ranks: RankWorkers, tmp_path: Path) -> None:
    """Longer than any one order may take: the last version may be written for long."""
    assert two_ranks.run(end_late, tmp_path) == [True, True]


def end_late(ranks: Ranks, directory: Path) -> bool:
    """Have rank 1 wait for more orders than come within one's deadline; return whether it has ended."""
    return anyio.run(_end_late, ranks, directory)


async def _end_late(ranks: Ranks, directory: Path) -> bool:
    weights: Any = None  # none is written
    versions = VersionWriter(weights, directory, ranks)
    versions._orders = replace(versions._orders, deadline_s=0.1)  # torch's own stays
    num_orders = 0
    order = versions._order

    async def counted(given: bytes | None = None) -> bytes:
        nonlocal num_orders
        num_orders += 1
        return await order(given)

    with patch.object(versions, "_order", counted):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(versions.run)
            while ranks.rank == 0 and num_orders < 3 * WAITS_PER_DEADLINE:
                await anyio.lowlevel.checkpoint()
            await versions.close()
    return ranks.rank == 0 or versions._has_ended


def publish_versions(ranks: Ranks, model: Path, directory: Path, layouts: list[dict[str, Any]]) -> list[Told]:
    """Train, and keep a version in each of four steps: written, dropped, written, and not to be written on rank 1."""
    with patch("areal_async.trainer.engine.model_folder.FILE_BYTES", FILE_BYTES):
        return [anyio.run(_publish, ranks, model, directory / str(number), one) for number, one in enumerate(layouts)]


async def _publish(ranks: Ranks, model: Path, directory: Path, layout: dict[str, Any]) -> Told:
    engine = engine_of(model, ranks, **layout)
    weights = ServedWeights(engine, bucket_bytes=BUCKET_BYTES, is_broadcast=True)
    versions, announced, refused = VersionWriter(weights, directory, ranks), [], ""
    sent: list[Tensor] = []
    again: list[Tensor] = []
    for step in (1, 2, 3):
        engine.train_step(random_rows(4, seed=step), step=step, total_steps=4)
        sent.clear()
        tensors = weights.gather(sent.append)
        versions.keep(Version(1, step), tensors)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(versions.run)
        if ranks.rank == 0:
            announced.append(await versions.write())
            await versions.let_go()
            announced.append(await versions.write())
            weights.send(directory / "1-3", again.append)
        await versions.close()
    saved = engine.save_weights(directory.parent / f"{directory.name}-saved")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, limits[1]))
    try:
        weights.write(tensors, Version(1, 4), directory, ranks)
    except PipelineError as exc:
        refused = str(exc)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return Told(
        saved=saved,
        part_bytes=sum(one.nbytes for one in tensors.values()),
        whole_bytes=weights.num_bytes,
        sent_bytes=sum(one.nbytes for one in sent),
        is_sent_whole=all(torch.equal(one, other) for one, other in zip(sent, again, strict=ranks.rank == 0)),
        num_left=len(versions._kept),
        announced=announced,
        refused=refused,
    )


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
