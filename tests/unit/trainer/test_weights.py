"""What the trainer writes is a plain Hugging Face folder that holds exactly the weights trained."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal_async.trainer.distributed import Ranks
from tests.unit.trainer.models import engine_of, random_rows, save_model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_weights_load_in_transformers_and_are_equal(dtype: str, tied: bool, ranks: Ranks, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    engine = engine_of(save_model(tmp_path / "source", tied=tied), ranks, dtype=dtype)
    engine.train_step(random_rows(4), step=1, total_steps=1)

    engine.save_weights(tmp_path / "1-1")

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "1-1", dtype="auto")
    expected = {name: value.to(getattr(torch, dtype)) for name, value in engine.full_parameters().items()}
    found = dict(loaded.named_parameters())
    assert found.keys() == expected.keys()
    stored = load_file(tmp_path / "1-1" / "model.safetensors")
    assert stored.keys() == expected.keys()
    assert {tensor.dtype for tensor in stored.values()} == {getattr(torch, dtype)}
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


def test_hashes_are_those_of_the_files_and_companions_come_along(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    hashes = engine_of(model, ranks).save_weights(tmp_path / "1-0")

    names = {path.name for path in (tmp_path / "1-0").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert hashes == {
        "model.safetensors": hashlib.sha256((tmp_path / "1-0" / "model.safetensors").read_bytes()).hexdigest()
    }


def test_a_large_model_is_split_over_files_with_an_index(
    model: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("areal_async.trainer.weights.MAX_FILE_BYTES", 20_000)
    engine = engine_of(model, ranks)

    hashes = engine.save_weights(tmp_path / "1-0")

    index = json.loads((tmp_path / "1-0" / "model.safetensors.index.json").read_text())
    assert len(hashes) > 2
    assert set(index["weight_map"].values()) == set(hashes)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "1-0", dtype="auto")
    expected = engine.full_parameters()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.named_parameters())


def test_saving_again_under_the_same_name_replaces_the_folder(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    engine = engine_of(model, ranks)
    first = engine.save_weights(tmp_path / "model")
    engine.train_step(random_rows(4), step=1, total_steps=1)

    second = engine.save_weights(tmp_path / "model")

    assert first != second
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
