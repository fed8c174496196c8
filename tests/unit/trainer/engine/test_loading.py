"""A rank's memory has its own part of a model and nothing else, in every layout, with the numbers of the folder."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_async.errors import UserError
from areal_async.trainer.engine.loading import CAUSAL_LM, empty_decoder
from areal_async.trainer.engine.parallel.dims import local_shard
from areal_async.trainer.engine.parallel.ranks import Ranks
from tests.unit.trainer.counted_memory import count
from tests.unit.trainer.models import engine_of, save_model
from tests.unit.trainer.rank_workers import RankWorkers
from tests.unit.trainer.seeing import SEEING, save_seeing_model

LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"replicas": 2},
    {"tensor_parallel": 2},
    {"pipeline_parallel": 2},
    {"pipeline_parallel": 2, "pipeline_schedule": "interleaved"},
)


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random decoder of 62 million parameters, in bfloat16, in several files."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen2", vocab_size=16_000, hidden_size=768, intermediate_size=2048, num_hidden_layers=6,
        num_attention_heads=12, num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("large")
    with torch.device("meta"):
        decoder: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    decoder.to_empty(device="cpu")
    for parameter in decoder.parameters():
        parameter.data.fill_(0.01)
    decoder.save_pretrained(folder, max_shard_size="40MB")
    return folder


def test_one_rank_holds_the_model_once(large_model: Path, ranks: Ranks) -> None:
    check_memory([load_counted(ranks, large_model, [{}])])


def test_two_ranks_hold_the_model_once_between_them(large_model: Path, two_ranks: RankWorkers) -> None:
    check_memory(two_ranks.run(load_counted, large_model, list(LAYOUTS)))


@pytest.mark.parametrize("tied", [True, False])
def test_every_layout_has_the_numbers_of_the_folder(tied: bool, two_ranks: RankWorkers, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path / "model", family="qwen2", num_layers=4, vocab_size=62, tied=tied)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="8KB")
    (folder / "model.safetensors").unlink()
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    first, other = two_ranks.run(parameters_of, folder, list(LAYOUTS))

    assert not any(other)
    assert len(list(folder.glob("*.safetensors"))) > 4
    for layout in first:
        assert layout.keys() == dict(whole.named_parameters()).keys()
        for name, parameter in whole.named_parameters():
            assert (layout[name] == parameter.detach().numpy()).all(), name


def test_what_is_computed_is_as_transformers_computes_it(model: Path, ranks: Ranks) -> None:
    from transformers import AutoModelForCausalLM

    expected = dict(AutoModelForCausalLM.from_pretrained(model).named_buffers())
    buffers = dict(engine_of(model, ranks)._model.decoder.named_buffers())

    assert buffers.keys() == expected.keys()
    assert expected
    for name, buffer in buffers.items():
        assert torch.equal(buffer, expected[name])


def test_a_folder_that_lacks_weights_is_refused_in_one_sentence(ranks: Ranks, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_model(tmp_path / "model", tied=False)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: one for name, one in tensors.items() if name != "lm_head.weight"}, folder / "model.safetensors")

    with pytest.raises(UserError, match=r"no safetensors there hold lm_head\.weight"):
        engine_of(folder, ranks)


def test_a_model_that_stores_more_than_parameters_is_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    """Nothing would read it: it would be whatever lay in memory."""
    folder = save_model(tmp_path / "model", family="apertus")

    with pytest.raises(UserError, match=r"of type apertus, which stores model\.layers\.0\.mlp\.act_fn\.beta"):
        engine_of(folder, ranks)


def parameters_of(ranks: Ranks, folder: Path, layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all parameters in each layout, as arrays, on rank 0."""
    wholes = [engine_of(folder, ranks, **layout).full_parameters() for layout in layouts]
    return [{name: one.numpy() for name, one in whole.items()} for whole in wholes]


def load_counted(ranks: Ranks, folder: Path, layouts: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Load the model in each layout and return what the rank's allocator was asked for, in bytes."""
    return [_load_counted(ranks, folder, layout) for layout in layouts]


def _load_counted(ranks: Ranks, folder: Path, layout: dict[str, Any]) -> dict[str, int]:
    engine, counted = count(lambda: engine_of(folder, ranks, **layout))
    shards = [local_shard(one) for one in engine._model.parameters()]
    whole = engine.plan_buckets(max_bytes=0)
    return {
        "peak": counted.peak,
        "left": counted.left,
        "own": sum(one.nbytes for one in shards),
        "bucket": max(one.nbytes for one in shards),
        "model": 4 * sum(math.prod(spec.shape) for bucket in whole for spec in bucket),
        "num_parts": 1 if "replicas" in layout else ranks.size,
    }


def check_memory(by_rank: list[list[dict[str, int]]]) -> None:
    """Hold each rank's peak against the bytes of its part and two shards."""
    for layouts in by_rank:
        for one in layouts:
            assert one["own"] <= one["peak"] <= 1.15 * (one["own"] + 2 * one["bucket"]), one
            assert one["left"] <= 1.05 * one["own"], one
    for layouts in zip(*by_rank, strict=True):
        num_replicas = len(by_rank) / layouts[0]["num_parts"]
        assert sum(one["own"] for one in layouts) == pytest.approx(num_replicas * layouts[0]["model"], rel=0.01), (
            layouts
        )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", SEEING)
def test_a_model_that_sees_has_the_numbers_and_names_of_the_folder(
    family: str, tied: bool, ranks: Ranks, two_ranks: RankWorkers, tmp_path: Path
) -> None:
    from safetensors.numpy import load_file

    folder = save_seeing_model(tmp_path / "model", family, tied=tied)
    stored = load_file(folder / "model.safetensors")

    for layout in [parameters_of(ranks, folder, [{}])[0], *two_ranks.run(parameters_of, folder, list(LAYOUTS[:3]))[0]]:
        assert layout.keys() == stored.keys()
        assert all((layout[name] == one).all() for name, one in stored.items())


@pytest.mark.parametrize("family", SEEING)
def test_what_a_model_that_sees_computes_is_as_transformers_computes_it(
    family: str, ranks: Ranks, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText

    folder = save_seeing_model(tmp_path, family)
    expected = dict(AutoModelForImageTextToText.from_pretrained(folder).named_buffers())

    buffers = dict(engine_of(folder, ranks)._model.decoder.named_buffers())

    assert buffers.keys() == expected.keys()
    assert all(torch.equal(buffer, expected[name]) for name, buffer in buffers.items())


def test_a_model_whose_images_are_not_understood_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import Qwen2VLConfig

    Qwen2VLConfig().save_pretrained(tmp_path)

    with pytest.raises(UserError, match=r"as a causal language model: Unrecognized .*Qwen2VLConfig"):
        empty_decoder(CAUSAL_LM, tmp_path, stored=torch.float32)


def test_a_model_that_sees_and_is_taken_for_one_of_text_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """transformers has Gemma 3 among the causal language models; its tower is no part of what is trained here."""
    from transformers import AutoModelForCausalLM, Gemma3Config

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 32, "pad_token_id": 0}
    config = Gemma3Config(text_config=text, vision_config={**sizes, "image_size": 28, "patch_size": 14})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    with pytest.raises(UserError, match="of type gemma3, need a decoder with a list of layers"):
        engine_of(tmp_path, ranks)
