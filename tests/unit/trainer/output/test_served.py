"""Memory of a version that nobody reads any more is the next one's; of one that is still read it is not."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from areal_async.inference.weight_group import flatten, num_bytes
from areal_async.protocol.types import Version
from areal_async.trainer.engine import weights
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.output.served import ServedWeights
from areal_async.trainer.output.version_writer import VersionWriter
from tests.unit.trainer.living_gradients import Living
from tests.unit.trainer.models import engine_of, random_rows, save_model


def test_only_a_version_that_is_written_or_let_go_of_is_overwritten(ranks: Ranks, tmp_path: Path) -> None:
    engine = engine_of(save_model(tmp_path / "source"), ranks)
    served = ServedWeights(engine, bucket_bytes=7_000, is_broadcast=True)
    sent: list[list[Tensor]] = [[], [], [], []]
    expected: list[dict[str, Tensor]] = []
    places: list[int] = []

    def gather() -> dict[str, Tensor]:
        step = len(places) + 1
        engine.train_step(random_rows(4, seed=step), step=step, total_steps=4)
        expected.append(engine.full_parameters())
        tensors = served.gather(sent[step - 1].append)
        places.append(_place(tensors))
        return tensors

    first, second = gather(), gather()
    served.write(first, Version(1, 1), tmp_path, ranks)
    third = gather()
    served.take_back(second)
    served.take_back(third)
    fourth = gather()
    served.write(fourth, Version(1, 4), tmp_path, ranks)
    served.close()
    after_closing = served.gather()

    assert [places.index(place) for place in places] == [0, 1, 0, 1]
    for version, tensors in (("1-1", expected[0]), ("1-4", expected[3])):
        written = load_file(tmp_path / version / "model.safetensors")
        assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    for parts, tensors in zip(sent, expected, strict=True):  # as they were sent, whatever came after
        assert torch.equal(torch.cat(parts), flatten(tensors.values()))
    assert all(torch.equal(one, expected[3][name]) for name, one in after_closing.items())
    assert not served._spare


def test_one_bucket_is_whole_at_a_time_beside_the_copies_and_the_parameters(ranks: Ranks, tmp_path: Path) -> None:
    engine = engine_of(save_model(tmp_path / "source"), ranks, dtype="bfloat16")
    buckets = engine.plan_buckets(max_bytes=4_000)
    into = weights.empty_copies(buckets)
    largest = max(num_bytes(bucket) for bucket in buckets)
    seen: list[int] = []

    def watched(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            made = work(*given)
            seen.append(living.num_bytes)
            return made

        return call

    with Living() as living, ExitStack() as stack:
        for name in ("whole_of", "flatten"):
            stack.enter_context(patch.object(weights, name, watched(getattr(weights, name))))
        engine.gather_weights(buckets, send=watched(lambda _: None), into=into)

    assert len(seen) == sum(map(len, buckets)) + 2 * len(buckets)
    assert max(seen) == largest  # the parameters of one rank are whole anyway


@pytest.mark.anyio
async def test_a_version_that_is_never_written_leaves_its_memory_to_the_next(ranks: Ranks, tmp_path: Path) -> None:
    served = ServedWeights(engine_of(save_model(tmp_path / "source"), ranks), bucket_bytes=7_000)
    versions, tensors = VersionWriter(served, tmp_path, ranks), served.gather()
    versions.keep(Version(1, 1), tensors)

    await versions.let_go()

    assert served.gather() is tensors


def _place(tensors: dict[str, Tensor]) -> int:
    return next(iter(tensors.values())).data_ptr()
