"""Adapters of a model that sees are trained as PEFT trains them, with each document alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_async.trainer.engine.lora import peft_name
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.policy import FsdpEngine
from areal_async.trainer.packing.rows import TrainRow
from areal_async.vision.spec import VisionSpec
from tests.unit.trainer.models import engine_of
from tests.unit.trainer.seeing import SEEING, policy_loss, save_seeing_model, seeing_rows

LORA = {"vision": "freeze", "lora": {"rank": 4, "alpha": 8.0}, "max_grad_norm": 1e9}


@pytest.fixture(scope="module", params=SEEING)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random model that sees."""
    return save_seeing_model(tmp_path_factory.mktemp(request.param), request.param)


def adapted(folder: Path, ranks: Ranks, **given: Any) -> FsdpEngine:
    """Return an engine whose adapters have learned something; else one half of each is zero."""
    engine = engine_of(folder, ranks, **{**LORA, **given})
    engine.train_step(seeing_rows()[ranks.rank :: ranks.size], step=1, total_steps=4)
    return engine


def adapter_gradients(
    ranks: Ranks, folder: Path, rows_of_ranks: Sequence[Sequence[TrainRow]], trainer: dict[str, Any], written: Path
) -> dict[str, Any]:
    """Return the gradients of an update by PEFT's names, as rank 0 has them; ``written`` is the adapter before it."""
    engine = adapted(folder, ranks, **trainer)
    engine.export(written)
    found: dict[str, Any] = {}

    def record(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for name, parameter in engine.trained.model.named_parameters():
            if parameter.requires_grad:
                found[peft_name(name)] = parameter.grad.full_tensor().numpy()  # type: ignore[union-attr]

    engine.trained.optimizer.register_step_pre_hook(record)
    engine.train_step(rows_of_ranks[ranks.rank], step=2, total_steps=4)
    return found


def peft_gradients(folder: Path, adapter: Path, rows: Sequence[TrainRow]) -> dict[str, Tensor]:
    """Return what PEFT makes of the loss of these rows one by one."""
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    base = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = PeftModel.from_pretrained(base, adapter, is_trainable=True).eval()
    spec = VisionSpec.read(folder)
    assert spec is not None
    policy_loss(model, rows, spec).backward()
    return {
        name.replace(".default", ""): torch.zeros_like(one) if one.grad is None else one.grad
        for name, one in model.named_parameters()
        if one.requires_grad
    }


def check_gradients(found: dict[str, Any], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        largest = float(gradient.abs().max())
        assert largest > 0, name
        assert float((torch.from_numpy(found[name]) - gradient).abs().max()) < 1e-5 * max(1.0, largest), name


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize(
    "trainer",
    [{"token_budget": 32}, {"token_budget": 4096}, {"activation_checkpointing": True}],
)
def test_gradients_of_packed_rows_are_those_of_peft_with_each_document_alone(
    trainer: dict[str, Any], seeing: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """PEFT adapts the modules that we do, and no others: of a frozen tower whose modules are named alike, none."""
    rows = seeing_rows()

    found = adapter_gradients(ranks, seeing, [rows], trainer, tmp_path)

    check_gradients(found, peft_gradients(seeing, tmp_path / "adapter", rows))
    assert not [name for name in found if ".visual." in name]
