"""A plain model is read from its files alone, as whoever wrote them means it, or left to transformers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from areal_async.errors import UserError
from areal_async.inference.embedded.engine.compute.layers import PlainModel
from areal_async.inference.embedded.engine.options import EngineOptions
from areal_async.inference.embedded.engine.runner import load_runner, read_plain_model
from tests.unit.inference.embedded_engine import prompt_of
from tests.unit.rollout.chat_templates import TINY

CPU = torch.device("cpu")


@pytest.fixture
def folder(models: list[Path], tmp_path: Path) -> Path:
    """A copy of a model, to be changed."""
    for file in models[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def configure(folder: Path, *without: str, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: config[key] for key in config if key not in without}))


def logits(folder: Path) -> torch.Tensor:
    """What follows a prompt."""
    runner = load_runner(EngineOptions(model_path=str(folder), device="cpu", num_threads=1), folder)
    assert isinstance(runner.model, PlainModel)
    with torch.inference_mode():
        runner.reserve(1, 20)
        return runner.prefill([prompt_of(20)], [0])


def test_a_configuration_of_older_libraries_means_the_same(folder: Path) -> None:
    before = logits(folder)
    theta = json.loads((folder / "config.json").read_text())["rope_parameters"]["rope_theta"]
    configure(
        folder, "rope_parameters", "layer_types", "dtype", rope_theta=theta, rope_scaling=None, torch_dtype="float32"
    )

    assert torch.equal(logits(folder), before)


def test_old_and_new_words_for_sliding_layers_mean_the_same(folder: Path) -> None:
    configure(folder, "layer_types", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    model = read_plain_model(folder, dtype="auto", device=CPU)

    assert model is not None
    assert [layer.self_attn.window for layer in model.model.layers][:2] == [None, 4]


@pytest.mark.parametrize("said", ["bfloat16", "float16", None])
def test_numbers_are_of_the_precision_that_is_said_or_else_stored(folder: Path, said: str | None) -> None:
    configure(folder, "dtype", **({} if said is None else {"dtype": said}))
    model, asked = (read_plain_model(folder, dtype=dtype, device=CPU) for dtype in ("auto", "float16"))
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype

    assert model is not None
    assert asked is not None
    assert {parameter.dtype for parameter in model.parameters()} == {expected}
    assert {parameter.dtype for parameter in asked.parameters()} == {torch.float16}


def test_names_and_ends_are_those_of_transformers(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    model, other = read_plain_model(folder, dtype="auto", device=CPU), AutoModelForCausalLM.from_pretrained(folder)

    assert model is not None
    assert model.state_dict().keys() == other.state_dict().keys()
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in other.named_parameters()]
    runner = load_runner(EngineOptions(model_path=str(folder), device="cpu", num_threads=1), folder)
    assert {3, 4} <= runner.eos_token_ids


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        {"hidden_act": "gelu"},
        {"auto_map": {"AutoModelForCausalLM": "own.Model"}},
        {"architectures": ["Qwen3ForSequenceClassification"]},
        {"model_type": "gemma2"},
        {"partial_rotary_factor": 0.5},
        {"hidden_size": 32},
        {"dtype": "float64"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_not_computed_here_is_left_to_transformers(folder: Path, changes: dict[str, Any]) -> None:
    configure(folder, **changes)

    assert read_plain_model(folder, dtype="auto", device=CPU) is None


@pytest.mark.parametrize("harm", ["lost", "more", "none"])
def test_a_folder_whose_tensors_are_not_the_models_is_left_to_transformers(folder: Path, harm: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    if harm == "lost":
        del tensors["model.norm.weight"]
    elif harm == "more":
        tensors["model.extra.weight"] = torch.zeros(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if harm == "none":
        (folder / "model.safetensors").unlink()

    assert read_plain_model(folder, dtype="auto", device=CPU) is None
    if harm != "more":
        with pytest.raises(UserError, match=r"^model at .*(tensors missing|OSError)[^\n]*$"):
            load_runner(EngineOptions(model_path=str(folder), device="cpu"), folder)


def test_a_plain_model_is_served_without_the_models_of_transformers() -> None:
    program = (
        "import sys, pathlib\n"
        "from areal_async.inference.embedded import serving\n"
        "from areal_async.inference.embedded.engine.options import EngineOptions\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "serving.load_runner(EngineOptions(model_path=str(path), device='cpu'), path)\n"
        "assert serving.load_tokenizer(path) is not None\n"
        "heavy = ['transformers.modeling_utils', 'transformers.models.auto']\n"
        "heavy += ['torch._dynamo', 'torch.distributed.tensor']\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, TINY], capture_output=True, text=True, timeout=100)

    assert done.stdout == "[]\n", done.stdout + done.stderr
