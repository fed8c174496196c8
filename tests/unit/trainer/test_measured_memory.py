"""What preflight says that a rank takes is what it takes, by the bytes that torch is asked for."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from areal_async.config.settings import Settings
from areal_async.doctor.preflight.memory import STATE_BYTES, ModelSize
from areal_async.trainer.engine.checkpoint import CheckpointWriter, tensors_of
from areal_async.trainer.engine.engines import Engines
from areal_async.trainer.engine.parallel.dims import local_shard
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.output.served import ServedWeights
from tests.unit.trainer.rank_workers import RankWorkers
from tests.unit.trainer.seeing import SEEING, png, save_seeing_model, seeing_row
from tools.measure_memory import LOAD, TorchMeter, host_parts, make_model, measure, settings_of

SIZES: dict[str, dict[str, int]] = {
    "most of it state": {"hidden": 256, "layers": 6, "vocab": 1000, "tokens": 32},
    "most of it activations": {"hidden": 64, "layers": 4, "vocab": 500, "tokens": 1024},
    "most of it logits": {"hidden": 64, "layers": 1, "vocab": 8000, "tokens": 512},
}
DTYPES = ("float32", "bfloat16")
KINDS = (SEEING, (False, True), DTYPES)
SEEING_CASES = [
    pytest.param(*case, marks=[pytest.mark.nightly] * (sum(map(tuple.index, KINDS, case)) % 2))
    for case in itertools.product(*KINDS)
]
"""Any two of these meet in a case of every run; the other four are nightly."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, size in SIZES.items():
        folders[name] = tmp_path_factory.mktemp("sized")
        make_model(folders[name], **{key: size[key] for key in ("hidden", "layers", "vocab")})
    return folders


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rank_takes_what_is_estimated(dtype: str, ranks: Ranks, models: dict[str, Path]) -> None:
    for name, phases in _measured(ranks, models, dtype).items():
        assert _most(phases) == pytest.approx(_estimate(models[name], name, 1, dtype), rel=0.1), (name, phases)


@pytest.mark.parametrize(("family", "recomputes", "dtype"), SEEING_CASES)
def test_a_rank_that_sees_takes_what_is_estimated(
    family: str, dtype: str, ranks: Ranks, tmp_path: Path, *, recomputes: bool
) -> None:
    """Of rows whose tokens show images, each another one, and hardly anything else."""
    tower = {"depth": 6, "hidden_size": 128, "intermediate_size": 320, "num_heads": 4}
    folder = save_seeing_model(tmp_path, family, tower=tower)
    rows = [seeing_row([png(index, width=128, height=32)], index=index, length=4) for index in range(8)]
    settings = settings_of(folder, num_ranks=1, tokens=4 * rows[0].num_tokens, dtype=dtype)
    trainer = settings.trainer.model_copy(update={"activation_checkpointing": recomputes})
    settings = settings.model_copy(update={"trainer": trainer})
    meter = TorchMeter()

    measure(ranks, settings, meter, rows)

    estimate = sum(host_parts(ModelSize.read(folder), settings).values())
    assert _most(meter.most) == pytest.approx(estimate, rel=0.1), (estimate, meter.most)


def test_each_of_two_ranks_keeps_what_is_estimated(two_ranks: RankWorkers, models: dict[str, Path]) -> None:
    """Storages that stay: what else is there in a step depends on when gloo's threads let go of it."""
    name = "most of it state"
    settings = _settings(models[name], name, 2, "float32")

    by_rank = two_ranks.run(_kept, settings)

    parts = host_parts(ModelSize.read(models[name]), settings)
    assert max(trained for trained, _, _ in by_rank) == pytest.approx(parts["state"] * 12 / STATE_BYTES, rel=0.01)
    assert max(copied for _, copied, _ in by_rank) == pytest.approx(parts["copies"], rel=0.01)
    assert max(version for _, _, version in by_rank) == parts["version"]


def _kept(ranks: Ranks, settings: Settings) -> tuple[int, int, int]:
    """Return the bytes of what is trained, of its copies, and of a version's part."""
    engines, writer = Engines.for_run(settings, ranks), CheckpointWriter(ranks)
    writer.stage(engines.trained)
    trained = [local_shard(one) for one in tensors_of(engines.trained).values()]
    version = ServedWeights(engines.actor, bucket_bytes=1 << 20).gather()
    every = (trained, writer._copies.values(), version.values())
    return tuple(sum(one.nbytes for one in tensors) for tensors in every)  # type: ignore[return-value]


def _measured(ranks: Ranks, models: dict[str, Path], dtype: str) -> dict[str, dict[str, int]]:
    phases = {}
    for name, folder in models.items():
        meter = TorchMeter()
        measure(ranks, _settings(folder, name, ranks.size, dtype), meter)
        phases[name] = meter.most
    return phases


def _most(phases: dict[str, int]) -> int:
    return max(num_bytes for phase, num_bytes in phases.items() if phase != LOAD)


def _estimate(folder: Path, name: str, num_ranks: int, dtype: str) -> float:
    return sum(host_parts(ModelSize.read(folder), _settings(folder, name, num_ranks, dtype)).values())


def _settings(folder: Path, name: str, num_ranks: int, dtype: str) -> Any:
    return settings_of(folder, num_ranks=num_ranks, tokens=SIZES[name]["tokens"], dtype=dtype)
