"""A trainer that loads a checkpoint goes on as if it had never stopped."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from areal_async.errors import PipelineError
from areal_async.trainer.engine.checkpoint import ACTOR, CheckpointWriter, TrainState, load
from areal_async.trainer.engine.engines import Engines
from areal_async.trainer.engine.parallel.ranks import Ranks
from tests.unit.trainer.counted_memory import count
from tests.unit.trainer.models import engine_of, parameters_differ, random_rows, save_model

LEDGER = b'{"trained": ["0-1-0"]}\x00\xff'


def test_resumed_training_equals_training_that_never_stopped(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    batches = [random_rows(6, seed=seed) for seed in range(4)]
    through = engine_of(model, ranks, warmup_steps=3)
    for step in (1, 2):
        through.train_step(batches[step - 1], step=step, total_steps=4)
    Engines(actor=through).save_checkpoint(tmp_path / "1-2", LEDGER)
    resumed = engine_of(model, ranks, warmup_steps=3)
    resumed.train_step(batches[3], step=1, total_steps=4)

    assert Engines(actor=resumed).load_checkpoint(tmp_path / "1-2") == LEDGER

    assert parameters_differ(resumed, through) == 0
    for step in (3, 4):
        stats, resumed_stats = (
            one.train_step(batches[step - 1], step=step, total_steps=4) for one in (through, resumed)
        )
        assert resumed_stats == stats
    assert parameters_differ(resumed, through) == 0


def test_a_checkpoint_from_before_the_first_step_loads(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    rows = random_rows(6)
    fresh = engine_of(model, ranks)
    Engines(actor=fresh).save_checkpoint(tmp_path / "1-0", b"")
    trained = engine_of(model, ranks)
    trained.train_step(rows, step=1, total_steps=2)

    assert Engines(actor=trained).load_checkpoint(tmp_path / "1-0") == b""

    assert trained.train_step(rows, step=1, total_steps=2) == fresh.train_step(rows, step=1, total_steps=2)
    assert parameters_differ(trained, fresh) == 0


def test_a_checkpoint_made_or_loaded_after_an_inference_pass_is_whole(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """FSDP leaves what it has gathered for a forward pass in the place of the shards that are trained."""
    rows = random_rows(6)
    trained = engine_of(model, ranks)
    trained.train_step(rows, step=1, total_steps=2)
    trained.logprobs(rows)
    Engines(actor=trained).save_checkpoint(tmp_path / "1-1", LEDGER)
    resumed = engine_of(model, ranks)
    resumed.logprobs(rows)

    Engines(actor=resumed).load_checkpoint(tmp_path / "1-1")

    assert resumed.train_step(rows, step=2, total_steps=2) == trained.train_step(rows, step=2, total_steps=2)
    assert parameters_differ(resumed, trained) == 0


@pytest.mark.parametrize("is_staged", [True, False])
def test_writing_a_checkpoint_copies_no_tensor(is_staged: bool, ranks: Ranks, tmp_path: Path) -> None:
    model = save_model(tmp_path / "source", num_layers=8, vocab_size=4000)
    engines = Engines(actor=engine_of(model, ranks))
    engines.save_checkpoint(tmp_path / "1-0", LEDGER)
    writer = CheckpointWriter(ranks)
    writer.stage(engines.trained)

    def save() -> None:
        writer.write(tmp_path / "1-1", LEDGER) if is_staged else engines.save_checkpoint(tmp_path / "1-1", LEDGER)

    _, counted = count(save)

    assert counted.peak < 4000 * 32 * 4, "the embedding, of which three are written, and all layers"
    assert engines.load_checkpoint(tmp_path / "1-1") == LEDGER


def test_a_checkpoint_is_written_from_its_copies_without_a_look_at_the_gpu(
    model: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits there waits for the steps that are under way meanwhile. Here there is none: a look at it fails."""
    engines, writer = Engines(actor=engine_of(model, ranks)), CheckpointWriter(ranks)
    writer.stage(engines.trained)

    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: True)
        writer.write(tmp_path / "1-1", LEDGER)

    assert engines.load_checkpoint(tmp_path / "1-1") == LEDGER


def test_a_checkpoint_that_was_not_finished_is_not_there(
    model: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model, ranks)

    def fail(partial: Path, directory: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("areal_async.trainer.engine.checkpoint.finish", fail)
    with pytest.raises(PipelineError, match="1-1 could not be written: OSError: disk full"):
        Engines(actor=engine).save_checkpoint(tmp_path / "1-1", LEDGER)

    assert not (tmp_path / "1-1").exists()
    with pytest.raises(PipelineError, match="1-1 is not one"):
        Engines(actor=engine).load_checkpoint(tmp_path / "1-1")


def test_a_checkpoint_of_another_model_is_refused(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    Engines(actor=engine_of(model, ranks)).save_checkpoint(tmp_path / "1-1", LEDGER)
    other = engine_of(save_model(tmp_path / "other", family="qwen2", tied=False), ranks)

    with pytest.raises(PipelineError, match="does not fit this model"):
        Engines(actor=other).load_checkpoint(tmp_path / "1-1")


def test_a_part_of_the_model_loads_its_own_out_of_the_whole_ones_checkpoint(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    whole = engine_of(model, ranks)
    whole.train_step(random_rows(6), step=1, total_steps=2)
    Engines(actor=whole).save_checkpoint(tmp_path / "1-1", LEDGER)
    parameters = whole.full_parameters()
    last_layer = "model.layers.1.mlp."
    shapes = {name: one.shape for name, one in parameters.items() if name.startswith(last_layer)}
    part = nn.Module()
    for name, shape in shapes.items():
        inside = part
        for one in name.split(".")[:-2]:
            if not hasattr(inside, one):
                inside.add_module(one, nn.Module())
            inside = inside.get_submodule(one)
        inside.add_module(name.split(".")[-2], nn.Linear(*reversed(shape), bias=False))
    optimizer = torch.optim.AdamW(part.parameters())

    ledger = load({ACTOR: TrainState(part, optimizer)}, tmp_path / "1-1", ranks=ranks)

    assert ledger == LEDGER
    assert len(list(part.named_parameters())) == 3
    for name, parameter in part.named_parameters():
        assert torch.equal(parameter, parameters[name])
        assert optimizer.state[parameter]["step"] == 1
        assert optimizer.state[parameter]["exp_avg"].any()


def test_training_draws_no_random_numbers_so_that_there_is_no_state_of_them_to_keep(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    def states() -> tuple[object, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    engine = engine_of(model, ranks, activation_checkpointing=True)
    engine.train_step(random_rows(6), step=1, total_steps=2)
    Engines(actor=engine).save_checkpoint(tmp_path / "1-1", LEDGER)
    Engines(actor=engine).load_checkpoint(tmp_path / "1-1")
    engine.logprobs(random_rows(2))

    assert states() == before
