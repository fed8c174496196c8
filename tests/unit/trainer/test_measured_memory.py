"""What preflight says that a rank takes is what it takes, by the bytes that torch is asked for."""

from pathlib import Path
from typing import Any

import pytest

from areal_async.doctor.preflight.memory import STATE_BYTES, ModelSize
from areal_async.trainer.engine.parallel.ranks import Ranks
from tests.unit.trainer.rank_workers import RankWorkers
from tools.measure_memory import LOAD, host_parts, make_model, measure, settings_of

SIZES: dict[str, dict[str, int]] = {
    "most of it state": {"hidden": 256, "layers": 6, "vocab": 1000, "tokens": 32},
    "most of it activations": {"hidden": 64, "layers": 4, "vocab": 500, "tokens": 1024},
    "most of it logits": {"hidden": 64, "layers": 1, "vocab": 8000, "tokens": 512},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, size in SIZES.items():
        folders[name] = tmp_path_factory.mktemp("sized")
        make_model(folders[name], **{key: size[key] for key in ("hidden", "layers", "vocab")})
    return folders


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_takes_what_is_estimated(dtype: str, ranks: Ranks, models: dict[str, Path]) -> None:
    for name, phases in _measured(ranks, models, dtype).items():
        assert _most(phases) == pytest.approx(_estimate(models[name], name, 1, dtype), rel=0.1), (name, phases)


def test_each_of_two_ranks_keeps_what_is_estimated(two_ranks: RankWorkers, models: dict[str, Path]) -> None:
    """Between two steps: what is there in one depends on when gloo's threads let go of what they have gathered."""
    name = "most of it state"
    by_rank = two_ranks.run(_measured, {name: models[name]}, "float32")

    parts = host_parts(ModelSize.read(models[name]), _settings(models[name], name, 2, "float32"))
    without_gradients = parts["state"] * (1 - 4 / STATE_BYTES) + parts["copies"]
    for phases in (one[name] for one in by_rank):
        assert phases["checkpoint"] == pytest.approx(without_gradients, rel=0.1)


def _measured(ranks: Ranks, models: dict[str, Path], dtype: str) -> dict[str, dict[str, int]]:
    return {
        name: measure(ranks, _settings(folder, name, ranks.size, dtype), is_resident=False)
        for name, folder in models.items()
    }


def _most(phases: dict[str, int]) -> int:
    return max(num_bytes for phase, num_bytes in phases.items() if phase != LOAD)


def _estimate(folder: Path, name: str, num_ranks: int, dtype: str) -> float:
    return sum(host_parts(ModelSize.read(folder), _settings(folder, name, num_ranks, dtype)).values())


def _settings(folder: Path, name: str, num_ranks: int, dtype: str) -> Any:
    return settings_of(folder, num_ranks=num_ranks, tokens=SIZES[name]["tokens"], dtype=dtype)
