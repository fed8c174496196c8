"""SGLang's classifiers have a bias that transformers' have not: a folder gets one of 0, and loses nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from areal_async.errors import UserError
from areal_async.inference.score_bias import INDEX, needs_bias, write_with_bias


def folder(path: Path, *, architecture: str = "Qwen3ForSequenceClassification", **tensors: int) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": [architecture], "id2label": {"0": "LABEL_0"}}))
    (path / "tokenizer.json").write_text("{}")
    if tensors:
        save_file({name: np.ones(size, np.float32) for name, size in tensors.items()}, path / "model.safetensors")
    return path


def test_heads_without_a_bias_need_one_only_where_sglang_has_it(tmp_path: Path) -> None:
    with_bias = folder(tmp_path / "b", **{"score.weight": 4, "score.bias": 1})

    assert needs_bias(folder(tmp_path / "a", **{"score.weight": 4}))
    assert not needs_bias(with_bias)
    assert not needs_bias(folder(tmp_path / "c", architecture="LlamaForSequenceClassification", **{"score.weight": 4}))


def test_folder_is_the_same_model_with_a_bias_of_zero(tmp_path: Path) -> None:
    model = folder(tmp_path / "model", **{"score.weight": 4})

    write_with_bias(model, tmp_path / "served")

    served = tmp_path / "served"
    found = {name: value for path in served.glob("*.safetensors") for name, value in load_file(path).items()}
    assert set(found) == {"score.weight", "score.bias"}
    assert found["score.weight"].tolist() == [1, 1, 1, 1]
    assert found["score.bias"].tolist() == [0]
    assert {path.name for path in model.iterdir()} < {path.name for path in served.iterdir()}
    assert not needs_bias(served)


def test_index_of_several_files_names_the_bias_too(tmp_path: Path) -> None:
    model = folder(tmp_path / "model", **{"score.weight": 4})
    (model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"score.weight": "model.safetensors"}}))
    assert needs_bias(model)

    write_with_bias(model, tmp_path / "served")

    assert set(json.loads((tmp_path / "served" / INDEX).read_text())["weight_map"]) == {"score.weight", "score.bias"}
    assert json.loads((model / INDEX).read_text())["weight_map"] == {"score.weight": "model.safetensors"}
    assert not needs_bias(tmp_path / "served")


def test_weights_in_another_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="without safetensors, need them to serve a reward model with SGLang"):
        write_with_bias(folder(tmp_path / "model"), tmp_path / "served")
