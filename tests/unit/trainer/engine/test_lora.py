"""Adapters are trained as PEFT trains them, alone, and what is written and served is what was trained."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from areal_async.algorithms.likelihood import likelihood_loss
from areal_async.config.lora import LoraSettings
from areal_async.config.settings import ModelSettings, Settings, TrainerSettings
from areal_async.errors import PipelineError, UserError
from areal_async.inference.embedded.engine.weights import (
    Merged,
    checksum_weights,
    shown_weights,
    stage_weights,
    swap_weights,
)
from areal_async.inference.http import Checksums
from areal_async.inference.supervision.verify import compare
from areal_async.protocol.types import WeightsVersion
from areal_async.trainer.engine.engines import Engines, EngineThreads
from areal_async.trainer.engine.lora import peft_name
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.policy import FsdpEngine
from areal_async.trainer.engine.threads import EngineThread
from areal_async.trainer.output.export import export_policy
from areal_async.trainer.packing.rows import REFERENCE, TrainRow, with_columns
from tests.unit.trainer.models import engine_of, parameters_differ, random_rows, save_model
from tests.unit.trainer.one_of_two_adapting import LORA, train_adapters
from tests.unit.trainer.rank_workers import RankWorkers

NUM_ADAPTED = 2 * 7
"""Linear modules of two layers: four of attention, three of the rest."""


def adapted(model: Path, ranks: Ranks, *, lora: dict[str, Any] | None = None, **given: Any) -> FsdpEngine:
    """Return an engine with adapters that have learned something."""
    engine = engine_of(model, ranks, lora=lora or LORA, **given)
    engine.train_step(random_rows(6), step=1, total_steps=2)
    engine.train_step(random_rows(6, seed=1), step=2, total_steps=2)
    return engine


def write_adapter(engine: FsdpEngine, directory: Path) -> dict[str, str]:
    return engine.write_adapter(engine.gather_weights(engine.plan_adapter()), directory)


def logprobs_of(causal_lm: Any, row: TrainRow) -> Tensor:
    """Return a plain model's logprobs [L] of one sequence; 0 outside of the loss."""
    ids, mask = torch.from_numpy(row.token_ids).long(), torch.from_numpy(row.loss_mask)
    log_probs = F.log_softmax(causal_lm(ids[None]).logits[0], dim=-1)
    return F.pad(log_probs[:-1].gather(1, ids[1:, None])[:, 0], (1, 0)) * mask


def largest_gap(left: list[Tensor], right: list[Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(left, right, strict=True))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
def test_gradients_are_those_of_peft_in_float64(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    given = TrainerSettings(token_budget=64, max_grad_norm=1e6, lora=LoraSettings.model_validate(LORA))
    engine = FsdpEngine(
        model=ModelSettings(path=str(model), dtype="float32"), trainer=given, ranks=ranks, objective=likelihood_loss
    )
    rows = random_rows(5)
    engine.train_step(rows, step=1, total_steps=2)  # else one half of each adapter is still zero
    write_adapter(engine, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    peft = PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True).double().eval()
    logprobs = [logprobs_of(peft, row) for row in rows]
    (-sum(one.sum() for one in logprobs) / sum(int(row.loss_mask.sum()) for row in rows)).backward()
    expected = {name: one.grad for name, one in peft.named_parameters() if one.requires_grad}
    found: dict[str, Tensor] = {}

    def record(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for name, parameter in engine.trained.model.named_parameters():
            if parameter.requires_grad:
                found[peft_name(name).replace(".weight", ".default.weight")] = parameter.grad.full_tensor()

    engine.trained.optimizer.register_step_pre_hook(record)
    assert largest_gap(engine.logprobs(rows), [one.detach() for one in logprobs]) < 1e-5
    engine.train_step(rows, step=2, total_steps=2)

    assert len(found) == 2 * NUM_ADAPTED
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.allclose(gradient.double(), expected[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_only_adapters_change_and_the_base_stays_bit_for_bit(
    activation_checkpointing: bool, model: Path, ranks: Ranks
) -> None:
    engine = adapted(model, ranks, activation_checkpointing=activation_checkpointing)

    stored = load_file(model / "model.safetensors")
    frozen = {name: one for name, one in engine._model.decoder.named_parameters() if not one.requires_grad}
    assert frozen.keys() == stored.keys()
    assert all(torch.equal(one.full_tensor(), stored[name]) for name, one in frozen.items())
    trained = [one for group in engine.trained.optimizer.param_groups for one in group["params"]]
    assert len(trained) == 2 * NUM_ADAPTED
    assert all(bool(one.full_tensor().any()) for one in trained)


def test_without_learning_nothing_changes(model: Path, ranks: Ranks) -> None:
    rows = random_rows(5)
    engine = engine_of(model, ranks, lora=LORA)

    assert largest_gap(engine.logprobs(rows), engine_of(model, ranks).logprobs(rows)) == 0
    assert parameters_differ(engine, engine_of(model, ranks)) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_weights_say_to_the_last_bit_what_the_adapters_say(dtype: str, ranks: Ranks, tmp_path: Path) -> None:
    model = save_model(tmp_path / "source", family="qwen2")
    weights = load_file(model / "model.safetensors")
    biases = {name: torch.randn(one.shape) for name, one in weights.items() if name.endswith(".bias")}
    assert biases
    save_file(weights | biases, model / "model.safetensors", metadata={"format": "pt"})
    engine, rows = adapted(model, ranks, dtype=dtype), random_rows(8, seed=2)

    engine.export(tmp_path)

    merged = engine_of(tmp_path / "model", ranks, dtype=dtype)
    assert largest_gap(engine.logprobs(rows), merged.logprobs(rows)) == 0
    assert largest_gap(engine.logprobs(rows), engine_of(model, ranks, dtype=dtype).logprobs(rows)) > 1e-2
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_server_that_merges_the_announced_adapter_serves_what_was_trained(
    dtype: str, model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    engine, rows = adapted(model, ranks, dtype=dtype), random_rows(8, seed=2)
    tensors = engine.gather_weights(engine.plan_adapter())
    hashes = engine.write_adapter(tensors, tmp_path / "1-2")
    announced = WeightsVersion(version="1-2", sha256=hashes, tensors_sha256=engine.adapter_witnesses(tensors))
    served = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).requires_grad_(False)

    merged = swap_weights(served, stage_weights(served, str(tmp_path / "1-2")), Merged())

    compare(Checksums([checksum_weights(shown_weights(served, merged))], ""), announced)
    whole = engine.gather_weights(engine.plan_buckets(max_bytes=0))
    found = dict(served.named_parameters())
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    if dtype == "float32":
        assert largest_gap(engine.logprobs(rows), [logprobs_of(served, row) for row in rows]) < 1e-4


def test_what_proves_a_version_tells_adapters_and_bases_apart(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    engine = engine_of(model, ranks, lora=LORA)
    of_other_base = engine_of(save_model(tmp_path / "other", seed=1), ranks, lora=LORA)
    before, after = (one.gather_weights(one.plan_adapter()) for one in (engine, adapted(model, ranks)))

    first = engine.adapter_witnesses(before)

    differing = {name for name, value in engine.adapter_witnesses(after).items() if first[name] != value}
    assert len(differing) == 2 * NUM_ADAPTED
    assert {"lora_A", "lora_B"} == {name.split(".")[-2] for name in differing}
    others = {name for name, value in of_other_base.adapter_witnesses(before).items() if first[name] != value}
    assert others == {f"model.layers.{layer}.mlp.down_proj.base_layer.weight" for layer in (0, 1)}


def test_two_ranks_train_the_adapters_that_one_does(
    model: Path, ranks: Ranks, two_ranks: RankWorkers, tmp_path: Path
) -> None:
    seen = two_ranks.run(train_adapters, model, tmp_path)
    rows, alone = random_rows(7), engine_of(model, ranks, lora=LORA)
    expected = [asdict(alone.train_step(rows, step=step, total_steps=2)) for step in (1, 2)]

    for stats in seen:
        for found, one in zip(stats, expected, strict=True):
            assert found == pytest.approx(one, rel=1e-4, abs=1e-6)
    together = engine_of(model, ranks, lora=LORA)
    assert Engines(actor=together).load_checkpoint(tmp_path / "checkpoint") == b"ledger"
    assert largest_gap(together.logprobs(rows), alone.logprobs(rows)) < 1e-4
    assert largest_gap(engine_of(tmp_path / "model", ranks).logprobs(rows), together.logprobs(rows)) < 1e-5


def test_resumed_adapters_go_on_as_if_they_had_never_stopped(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    rows, through = random_rows(6), adapted(model, ranks)
    Engines(actor=through).save_checkpoint(tmp_path / "1-2", b"ledger")
    resumed = engine_of(model, ranks, lora=LORA)

    assert Engines(actor=resumed).load_checkpoint(tmp_path / "1-2") == b"ledger"

    assert parameters_differ(resumed, through) == 0
    assert resumed.train_step(rows, step=3, total_steps=4) == through.train_step(rows, step=3, total_steps=4)
    assert parameters_differ(resumed, through) == 0


def test_a_checkpoint_holds_adapters_and_their_moments_alone(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    Engines(actor=adapted(model, ranks)).save_checkpoint(tmp_path / "1-2", b"")

    saved = FileSystemReader(tmp_path / "1-2" / "state").read_metadata().state_dict_metadata
    assert {name for name in saved if "lora_" not in name} == {"parameters.base_sha256"}
    assert len(saved) == 1 + 4 * 2 * NUM_ADAPTED


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_exported_merged(dtype: Literal["float32", "bfloat16"], ranks: Ranks, tmp_path: Path) -> None:
    model = save_model(tmp_path / "source")
    engine = adapted(model, ranks, dtype=dtype)
    Engines(actor=engine).save_checkpoint(tmp_path / "1-2", b"")

    settings = ModelSettings(path=str(model), dtype=dtype)
    hashes = export_policy(tmp_path / "1-2", tmp_path / "out", model=settings, lora=LoraSettings.model_validate(LORA))

    assert hashes == engine.save_weights(tmp_path / "model")


def test_a_checkpoint_over_another_base_or_without_adapters_is_refused(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    Engines(actor=adapted(model, ranks)).save_checkpoint(tmp_path / "1-2", b"")
    other = save_model(tmp_path / "other", seed=1)

    with pytest.raises(UserError, match="trained over another model than model.path names"):
        Engines(actor=engine_of(other, ranks, lora=LORA)).load_checkpoint(tmp_path / "1-2")
    with pytest.raises(PipelineError, match="does not fit this model"):
        Engines(actor=engine_of(model, ranks)).load_checkpoint(tmp_path / "1-2")


def test_adapters_of_another_model_are_not_exported(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    Engines(actor=adapted(model, ranks)).save_checkpoint(tmp_path / "1-2", b"")
    Engines(actor=engine_of(model, ranks)).save_checkpoint(tmp_path / "1-3", b"")
    lora = LoraSettings.model_validate(LORA)
    shorter = ModelSettings(path=str(save_model(tmp_path / "shorter", num_layers=1)))

    with pytest.raises(UserError, match=r"another model.*got an adapter of .* for model.layers.1.*, need none; name"):
        export_policy(tmp_path / "1-2", tmp_path / "out", model=shorter, lora=lora)
    with pytest.raises(UserError, match="another model.*got no adapters"):
        export_policy(tmp_path / "1-3", tmp_path / "out", model=ModelSettings(path=str(model)), lora=lora)

    assert not list(tmp_path.glob("*out*"))


def test_only_the_named_modules_are_adapted(model: Path, ranks: Ranks) -> None:
    engine = adapted(model, ranks, lora={"rank": 2, "target_modules": ["q_proj", "down_proj"]})

    names = {name.split(".")[-2] for name in engine.gather_weights(engine.plan_adapter())}
    assert names == {"q_proj", "down_proj"}
    with pytest.raises(UserError, match="got qkv, need some of the linear modules of this model's layers: down_proj, "):
        engine_of(model, ranks, lora={"rank": 2, "target_modules": ["qkv"]})


def test_the_reference_is_the_policy_without_its_adapters(model: Path, ranks: Ranks) -> None:
    settings = Settings.model_validate(
        {
            "model": {"path": str(model), "dtype": "float32"},
            "algorithm": {"kl_coef": 0.1},
            "trainer": {"lr": 1e-2, "token_budget": 64, "lora": LORA},
        }
    )
    rows, engines = random_rows(6), Engines.for_run(settings, ranks)
    start = engines.actor.logprobs(rows)

    engines.actor.train_step(with_columns(rows, {REFERENCE: start}), step=1, total_steps=2, columns=(REFERENCE,))

    assert engines.reference is engines.actor
    trained = engines.actor.logprobs(rows)
    assert largest_gap(engines.reference_logprobs(rows), start) == 0
    assert largest_gap(engines.actor.logprobs(rows), trained) == 0
    assert largest_gap(trained, start) > 1e-3


def test_a_reference_inside_the_policy_is_asked_in_the_policys_thread(model: Path, ranks: Ranks) -> None:
    values = {"model": {"path": str(model)}, "algorithm": {"kl_coef": 0.1}, "trainer": {"lora": LORA}}
    own = {**values, "model": {"path": str(model), "reference": {"path": "other"}}}

    def thread_of(given: dict[str, Any]) -> str:
        return EngineThreads.for_run(Settings.model_validate(given), ranks).name("reference")

    assert (thread_of(values), thread_of(own)) == ("actor", "reference")
    assert anyio.run(EngineThreads(engine=EngineThread(torch.device("cpu"))).run, "", lambda: 1) == 1
