"""Training resumed on another number of ranks goes on as one rank that never stopped.

Gradients, changes of parameters and AdamW's averages are compared, of a policy alone and of one with a critic beside
it. A layout is a row of ``RESUMED``.
"""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from areal_async.trainer.engine.parallel.ranks import Ranks
from tests.unit.trainer.models import random_rows
from tools.compare_ranks import Arrays, Part, differences, launch, read_output, record, train_part

pytestmark = pytest.mark.timeout(400)
"""Processes that import torch take their time on a busy machine."""

NUM_STEPS = 3
"""Before the checkpoint, and again after it."""
TOLERANCE = 1e-3
COMMON = {"lr": 1e-3, "token_budget": 64, "warmup_steps": 2, "schedule": "cosine"}


class Layout(NamedTuple):
    """A number of ranks, and the settings that divide them."""

    num_ranks: int
    trainer: dict[str, Any] = {}


ONE, TWO = Layout(1), Layout(2)
RESUMED = {"saved on two ranks, resumed on one": (TWO, ONE), "saved on one rank, resumed on two": (ONE, TWO)}
KINDS = {"policy": False, "policy and critic": True}


class Plan(NamedTuple):
    """Training before the checkpoint, and after it."""

    saved: Part
    resumed: Part


@pytest.fixture(scope="module")
def batch(model: Path, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("batch")
    perturbed = directory / "perturbed"
    record(directory / "batch.npz", model, random_rows(12), ranks, perturbed=perturbed, seed=1, trainer=COMMON)
    return directory / "batch.npz"


@pytest.fixture(scope="module")
def plans(model: Path, batch: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Plan]:
    """Return what is to be done, by way and kind."""
    plans = {}
    for way, (saver, resumer) in RESUMED.items():
        for kind, has_critic in KINDS.items():
            folder = tmp_path_factory.mktemp("way")
            checkpoint = str(folder / "1-3")
            whole = Part(model=str(model), batch=str(batch), last=2 * NUM_STEPS, has_critic=has_critic, trainer=COMMON)
            plans[way, kind] = Plan(
                msgspec.structs.replace(
                    whole, last=NUM_STEPS, total=whole.last, save=checkpoint, trainer=COMMON | saver.trainer
                ),
                msgspec.structs.replace(
                    whole,
                    first=NUM_STEPS + 1,
                    load=checkpoint,
                    output=str(folder / "seen"),
                    trainer=COMMON | resumer.trainer,
                ),
            )
    return plans


@pytest.fixture(scope="module")
def seen(plans: dict[tuple[str, str], Plan], ranks: Ranks) -> dict[tuple[str, str], Arrays]:
    """Carry the plans out, in as few processes as can be."""
    waiting = [
        (layout.num_ranks, part)
        for (way, _), plan in plans.items()
        for layout, part in zip(RESUMED[way], plan, strict=True)
    ]
    while waiting:
        for size in sorted({num_ranks for num_ranks, _ in waiting}):
            ready = [part for num_ranks, part in waiting if num_ranks == size and _can_begin(part)]
            waiting = [(num_ranks, part) for num_ranks, part in waiting if part not in ready]
            if size == 1:
                for part in ready:
                    train_part(part, ranks)
            elif ready:
                launch(ready, num_ranks=size, deadline_s=250.0)
    return {key: read_output(plan.resumed, num_ranks=RESUMED[key[0]][1].num_ranks) for key, plan in plans.items()}


def _can_begin(part: Part) -> bool:
    return not part.load or Path(part.load).exists()


@pytest.fixture(scope="module")
def uninterrupted(model: Path, batch: Path, ranks: Ranks) -> dict[str, Arrays]:
    """Return what one rank does that never stops, by kind."""
    return {
        kind: train_part(
            Part(model=str(model), batch=str(batch), last=2 * NUM_STEPS, has_critic=has_critic, trainer=COMMON),
            ranks,
            compared_from=NUM_STEPS + 1,
        )
        for kind, has_critic in KINDS.items()
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", RESUMED)
def test_resumed_training_is_the_uninterrupted_one(
    way: str, kind: str, seen: dict[tuple[str, str], Arrays], uninterrupted: dict[str, Arrays]
) -> None:
    found = differences(uninterrupted[kind], seen[way, kind])

    assert {name: value for name, value in found.items() if not value <= TOLERANCE} == {}
    kinds = {name.split("/")[0] for name in found}
    assert kinds == {"gradient", "change", "exp_avg", "exp_avg_sq", "step"}
    steps = {name.split("/")[1] for name in found if name.startswith("gradient/")}
    assert steps == {str(step) for step in range(NUM_STEPS + 1, 2 * NUM_STEPS + 1)}
    assert any("critic." in name for name in found) == KINDS[kind]
