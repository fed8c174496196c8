"""Adapters of a vision tower are trained as PEFT trains them, with each document alone, and are what is served."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_async.errors import UserError
from areal_async.inference.embedded.engine.weights import (
    Merged,
    checksum_weights,
    shown_weights,
    stage_weights,
    swap_weights,
)
from areal_async.inference.faults import ServerFault
from areal_async.inference.http import Checksums
from areal_async.inference.supervision.verify import compare
from areal_async.protocol.types import WeightsVersion
from areal_async.trainer.engine.engines import Engines
from areal_async.trainer.engine.lora import is_adapter, peft_name
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.policy import FsdpEngine
from areal_async.trainer.packing.rows import TrainRow
from areal_async.vision.spec import VisionSpec
from tests.unit.trainer.models import engine_of, parameters_differ
from tests.unit.trainer.rank_workers import RankWorkers
from tests.unit.trainer.seeing import SEEING, policy_loss, save_seeing_model, seeing_rows, transformers_logprobs

LORA = {"vision": "lora", "lora": {"rank": 4, "alpha": 8.0}, "max_grad_norm": 1e9}
TOWER = {
    "qwen3_vl": ("qkv", "proj", "linear_fc1", "linear_fc2"),
    "qwen2_5_vl": ("qkv", "proj", "gate_proj", "up_proj", "down_proj"),
}
TEXT = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module", params=SEEING)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random model that sees."""
    return save_seeing_model(tmp_path_factory.mktemp(request.param), request.param)


def family_of(folder: Path) -> str:
    spec = VisionSpec.read(folder)
    assert spec is not None
    return spec.family


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
    [{"token_budget": 32}, {"token_budget": 4096}, {"activation_checkpointing": True}, {"vision": "freeze"}],
)
def test_gradients_of_packed_rows_are_those_of_peft_with_each_document_alone(
    trainer: dict[str, Any], seeing: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """PEFT adapts the modules that we do, and no others: of a frozen tower whose modules are named alike, none."""
    rows = seeing_rows()

    found = adapter_gradients(ranks, seeing, [rows], trainer, tmp_path)

    check_gradients(found, peft_gradients(seeing, tmp_path / "adapter", rows))
    modules = {tuple(name.split(".")[-3:-2]) for name in found if ".visual." in name}
    assert modules == (set() if "vision" in trainer else {(name,) for name in TOWER[family_of(seeing)]})


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("trainer", [{}, {"replicas": 2}])
def test_two_ranks_of_which_one_has_no_image_have_the_gradients_of_each_document_alone(
    trainer: dict[str, Any], seeing: Path, two_ranks: RankWorkers, tmp_path: Path
) -> None:
    rows = seeing_rows()
    shares = [[row for row in rows if not row.images], [row for row in rows if row.images]]

    first, other = two_ranks.run(adapter_gradients, seeing, shares, {"token_budget": 32, **trainer}, tmp_path)

    assert all((other[name] == one).all() for name, one in first.items())
    check_gradients(first, peft_gradients(seeing, tmp_path / "adapter", rows))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_all_that_is_trained_and_their_base_stays_as_it_is(dtype: str, seeing: Path, ranks: Ranks) -> None:
    rows, engine = seeing_rows(), engine_of(seeing, ranks, dtype=dtype, **LORA)
    before, answers = engine.full_parameters(), engine.logprobs(rows)

    engine.train_step(rows, step=1, total_steps=1)
    engine.train_step(rows, step=1, total_steps=1)

    changed = {name for name, one in engine.full_parameters().items() if not torch.equal(one, before[name])}
    of_text = {name for name in before if ".layers." in name and name.endswith(tuple(f"{one}.weight" for one in TEXT))}
    linears = tuple(f".{one}.weight" for one in TOWER[family_of(seeing)])
    of_tower = {name for name in before if ".blocks." in name or name.startswith("visual.blocks.")}
    assert changed == of_text | {name for name in of_tower if name.endswith(linears)}
    assert all(torch.equal(*pair) for pair in zip(engine.base_logprobs(rows), answers, strict=True))
    model, optimizer = engine.trained
    assert all(is_adapter(name) for name, one in model.named_parameters() if one in optimizer.state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_server_that_merges_the_announced_adapter_sees_as_the_trainer_does(
    dtype: str, seeing: Path, ranks: Ranks, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText

    engine, rows = adapted(seeing, ranks, dtype=dtype), seeing_rows()
    tensors = engine.gather_weights(engine.plan_adapter())
    hashes = engine.write_adapter(tensors, tmp_path / "1-1")
    announced = WeightsVersion(version="1-1", sha256=hashes, tensors_sha256=engine.adapter_witnesses(tensors))
    served = AutoModelForImageTextToText.from_pretrained(
        seeing, dtype=getattr(torch, dtype), attn_implementation="eager"
    ).requires_grad_(False)

    merged = swap_weights(served, stage_weights(served, str(tmp_path / "1-1")), Merged())

    compare(Checksums([checksum_weights(shown_weights(served, merged))], ""), announced)
    engine.export(tmp_path)
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=getattr(torch, dtype))
    assert served.state_dict().keys() == exported.state_dict().keys()
    assert all(torch.equal(one, exported.state_dict()[name]) for name, one in served.state_dict().items())
    if dtype == "float32":
        spec = VisionSpec.read(seeing)
        assert spec is not None
        for row, logprobs in zip(rows, engine.logprobs(rows), strict=True):
            expected = transformers_logprobs(served, row, spec)
            assert torch.allclose(logprobs[torch.from_numpy(row.loss_mask)], expected, atol=1e-5)


def test_a_server_with_other_adapters_in_its_tower_is_found_out(seeing: Path, ranks: Ranks) -> None:
    engine = adapted(seeing, ranks)
    tensors = engine.gather_weights(engine.plan_adapter())
    announced = WeightsVersion(version="1-1", sha256={}, tensors_sha256=engine.adapter_witnesses(tensors))
    name = next(name for name in tensors if "visual." in name)

    served = engine.adapter_witnesses({**tensors, name: tensors[name] + 1})

    with pytest.raises(ServerFault, match=f"tensor {re.escape(peft_name(name))} has"):
        compare(Checksums([served], ""), announced)


def test_resumed_adapters_of_a_tower_go_on_as_if_they_had_never_stopped(
    seeing: Path, ranks: Ranks, tmp_path: Path
) -> None:
    rows, through, resumed = seeing_rows(), adapted(seeing, ranks), engine_of(seeing, ranks, **LORA)
    Engines(actor=through).save_checkpoint(tmp_path / "1-1", b"ledger")

    assert Engines(actor=resumed).load_checkpoint(tmp_path / "1-1") == b"ledger"

    assert parameters_differ(resumed, through) == 0
    assert resumed.train_step(rows, step=2, total_steps=4) == through.train_step(rows, step=2, total_steps=4)
    assert parameters_differ(resumed, through) == 0


def test_named_modules_are_adapted_in_both_parts_and_each_has_to_have_one(seeing: Path, ranks: Ranks) -> None:
    def adapted_modules(*names: str) -> set[tuple[bool, str]]:
        engine = engine_of(seeing, ranks, **LORA | {"lora": {"rank": 2, "target_modules": names}})
        return {("visual." in name, name.split(".")[-2]) for name in engine.gather_weights(engine.plan_adapter())}

    assert adapted_modules("q_proj", "proj") == {(False, "q_proj"), (True, "proj")}
    if family_of(seeing) == "qwen2_5_vl":
        assert adapted_modules("down_proj") == {(False, "down_proj"), (True, "down_proj")}
    for names in (("q_proj",), ("proj",)):
        need = (
            rf"got {names[0]}, need some of the linear modules of this model's layers: .* and of its tower's blocks: "
        )
        with pytest.raises(UserError, match=f"trainer.lora.target_modules: {need}"):
            adapted_modules(*names)


def test_adapters_beside_a_tower_that_would_be_trained_are_refused(seeing: Path, ranks: Ranks) -> None:
    with pytest.raises(UserError, match=r"trainer\.vision: got train with trainer\.lora\.rank=4, need freeze or lora"):
        engine_of(seeing, ranks, lora={"rank": 4})
