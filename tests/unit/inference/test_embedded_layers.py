"""A plain model is read from its files alone, as whoever wrote them means it, or left to transformers."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from areal_async.errors import UserError
from areal_async.inference.embedded.engine.compute.layers import PlainModel
from areal_async.inference.embedded.engine.compute.through_transformers import load_model
from areal_async.inference.embedded.engine.options import EngineOptions
from areal_async.inference.embedded.engine.runner import ModelRunner, load_runner, read_plain_model
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


def served(folder: Path, *, through: bool = False) -> tuple[torch.Tensor, frozenset[int]]:
    """What follows a prompt, and the ends of a turn, of a model as it is served or as transformers computes it."""
    if through:
        model = load_model(folder, sees=False, dtype="auto").eval().requires_grad_(False)
        runner = ModelRunner(model, context_length=32, max_total_tokens=64)
    else:
        runner = load_runner(EngineOptions(model_path=str(folder), device="cpu", num_threads=1), folder)
    with torch.inference_mode():
        runner.reserve(1, 20)
        return runner.prefill([prompt_of(20)], [0]), runner.eos_token_ids


def random_model(folder: Path, kind: str, **changes: Any) -> None:
    size = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    config = AutoConfig.for_model(kind, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, **size)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    configure(folder, *(key for key, value in changes.items() if value is ...))
    configure(folder, **{key: value for key, value in changes.items() if value is not ...})


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "changes",
    [
        {"eos_token_id": ...},
        {"eos_token_id": None},
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "use_sliding_window": False},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4, "use_sliding_window": True},
        {"layer_types": ..., "sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": 5e5, "rope_parameters": {}},
        {"rope_parameters": {"rope_theta": 1e4, "type": "linear", "factor": 2.0}},
    ],
    ids=str,
)
def test_a_configuration_means_what_transformers_makes_of_it(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    random_model(tmp_path, kind, **changes)
    (answer, ends), (expected, expected_ends) = served(tmp_path), served(tmp_path, through=True)

    torch.testing.assert_close(answer, expected, atol=1e-4, rtol=1e-4)
    assert ends == expected_ends


def _untie(folder: Path) -> None:
    configure(folder, tie_word_embeddings=True)


def _mix(folder: Path) -> None:
    configure(folder, "dtype")
    tensors = {name: tensor.half() if tensor.dim() > 1 else tensor for name, tensor in _stored(folder).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _put_index_beside(folder: Path) -> None:
    tensors = {name: 2 * tensor for name, tensor in _stored(folder).items()}
    save_file(tensors, folder / "other.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "other.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize("change", [_untie, _mix, _put_index_beside], ids=lambda one: one.__name__)
def test_tensors_mean_what_transformers_makes_of_them(tmp_path: Path, change: Callable[[Path], None]) -> None:
    random_model(tmp_path, "qwen3")
    change(tmp_path)
    (answer, _), (expected, _) = served(tmp_path), served(tmp_path, through=True)

    assert answer.dtype == expected.dtype
    torch.testing.assert_close(answer, expected, atol=1e-4, rtol=1e-4)


def test_a_folder_of_a_model_and_an_adapter_is_left_to_transformers(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")

    assert read_plain_model(folder, dtype="auto", device=CPU) is None


@pytest.mark.parametrize("changes", [{"layer_types": ["full_attention"]}, {"max_position_embeddings": None}], ids=str)
def test_a_configuration_that_cannot_be_gets_one_sentence(folder: Path, changes: dict[str, Any]) -> None:
    configure(folder, **changes)

    with pytest.raises(UserError, match=r"^model at [^\n]*$"):
        load_runner(EngineOptions(model_path=str(folder), device="cpu"), folder)


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
