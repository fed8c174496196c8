"""What the trainer writes is a plain Hugging Face folder that holds exactly the weights trained."""

import hashlib
import json
import resource
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from areal_async.errors import PipelineError
from areal_async.inference.weight_group import num_bytes
from areal_async.trainer.engine import weights
from areal_async.trainer.engine.model_folder import ModelFolder
from areal_async.trainer.engine.parallel import stages
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.weights import witnesses
from tests.unit.trainer.living_gradients import Living
from tests.unit.trainer.models import engine_of, random_rows, save_model
from tests.unit.trainer.rank_workers import RankWorkers

FILE_BYTES = 12_000
"""Of a file in these tests."""
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"replicas": 2},
    {"tensor_parallel": 2},
    {"pipeline_parallel": 2},
    {"pipeline_parallel": 2, "pipeline_schedule": "interleaved"},
    {"lora": {"rank": 4}},
]


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

    monkeypatch.setattr("areal_async.trainer.engine.model_folder.FILE_BYTES", 20_000)
    engine = engine_of(model, ranks)

    hashes = engine.save_weights(tmp_path / "1-0")

    index = json.loads((tmp_path / "1-0" / "model.safetensors.index.json").read_text())
    assert len(hashes) > 2
    assert set(index["weight_map"].values()) == set(hashes)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "1-0", dtype="auto")
    expected = engine.full_parameters()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.named_parameters())


def test_two_ranks_write_a_file_at_a_time_and_none_has_the_whole_model(two_ranks: RankWorkers, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = save_model(tmp_path / "source", family="qwen2", num_layers=4, vocab_size=62)

    by_rank = two_ranks.run(save_counted, model, tmp_path, LAYOUTS, num_steps=1)

    for number, (first, second) in enumerate(zip(*by_rank, strict=True)):
        folder = tmp_path / str(number)
        files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}
        assert files == first.hashes == second.hashes
        assert len(files) > 4
        assert abs(first.part_bytes - second.part_bytes) <= 2 * first.file_bytes, "both write their share"
        for one in (first, second):
            assert one.part_bytes <= one.peak_bytes <= one.part_bytes + 2 * one.file_bytes, LAYOUTS[number]
        loaded = dict(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").named_parameters())
        expected = np.load(tmp_path / f"{number}.npz")
        assert loaded.keys() == set(expected)
        assert all((loaded[name].detach().numpy() == expected[name]).all() for name in expected)


def test_the_files_do_not_depend_on_the_number_of_ranks(
    model: Path, ranks: Ranks, two_ranks: RankWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.trainer.engine.model_folder.FILE_BYTES", FILE_BYTES)

    first, _ = two_ranks.run(save_counted, model, tmp_path, [{}], num_steps=0)

    assert engine_of(model, ranks).save_weights(tmp_path / "alone") == first[0].hashes


def test_every_rank_learns_that_a_folder_could_not_be_written(two_ranks: RankWorkers, model: Path) -> None:
    first, second = two_ranks.run(refusal, model, model / "config.json" / "1-0")

    assert "config.json/1-0 could not be written: NotADirectoryError" in first
    assert "config.json/1-0 could not be written: another rank says why" in second


def test_what_could_not_be_written_leaves_nothing_behind(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    engine = engine_of(model, ranks)
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, most))
    try:
        with pytest.raises(PipelineError, match="1-0 could not be written: OSError: .*File too large"):
            engine.save_weights(tmp_path / "weights" / "1-0")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert not list((tmp_path / "weights").iterdir())


class Saved(NamedTuple):
    """What a rank saw of writing a folder."""

    hashes: dict[str, str]
    part_bytes: int
    """Of the tensors in the files that it wrote."""
    file_bytes: int
    """Of the tensors in the largest file."""
    peak_bytes: int
    """Alive at most, of what was made for it."""


def save_counted(
    ranks: Ranks, model: Path, directory: Path, layouts: list[dict[str, Any]], *, num_steps: int
) -> list[Saved]:
    """Save trained weights in each layout, and beside them, as arrays, what transformers is to find."""
    with patch("areal_async.trainer.engine.model_folder.FILE_BYTES", FILE_BYTES):
        return [
            _save_counted(ranks, model, directory / str(number), one, num_steps) for number, one in enumerate(layouts)
        ]


def _save_counted(ranks: Ranks, model: Path, directory: Path, layout: dict[str, Any], num_steps: int) -> Saved:
    engine = engine_of(model, ranks, **layout)
    for step in range(num_steps):
        engine.train_step(random_rows(4), step=step + 1, total_steps=num_steps)
    largest = max(num_bytes(bucket) for bucket in engine.folder.files)
    own = sum(tensor.nbytes for tensor in engine.gather_files().values())
    hashes, peak = _peak_of(lambda: engine.save_weights(directory), bound=own + 2 * largest)
    tensors = engine.gather_weights(engine.plan_buckets(max_bytes=0))
    if ranks.rank == 0:
        np.savez(directory.with_suffix(".npz"), **{name: one.numpy() for name, one in tensors.items()})  # type: ignore[arg-type]
    return Saved(hashes, own, largest, peak)


def _peak_of(save: Callable[[], dict[str, str]], *, bound: int) -> tuple[dict[str, str], int]:
    """Return what ``save`` returns, and the bytes alive at most when a tensor is whole, is copied, and when files are
    written."""
    seen: list[int] = []

    def watched(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            made = work(*given, **named)
            is_over = max(seen, default=0) > bound
            seen.append(living.num_bytes if is_over else living.settled_bytes(bound))
            return made

        return call

    places = [(weights, "whole_of"), (stages, "whole_of"), (weights, "flatten"), (ModelFolder, "_write_file")]
    with Living() as living, ExitStack() as stack:
        for owner, name in places:
            stack.enter_context(patch.object(owner, name, watched(getattr(owner, name))))
        saved = save()
    return saved, max(seen)


def refusal(ranks: Ranks, model: Path, directory: Path) -> str:
    """Say why no folder can be written where only the first rank tries to make it."""
    try:
        engine_of(model, ranks).save_weights(directory)
    except PipelineError as exc:
        return str(exc)
    return ""


def test_saving_again_under_the_same_name_replaces_the_folder(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    engine = engine_of(model, ranks)
    first = engine.save_weights(tmp_path / "model")
    engine.train_step(random_rows(4), step=1, total_steps=1)

    second = engine.save_weights(tmp_path / "model")

    assert first != second
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("tied", [True, False])
def test_buckets_hold_every_stored_tensor_once_in_order_and_stay_within_their_size(
    tied: bool, ranks: Ranks, tmp_path: Path
) -> None:
    engine = engine_of(save_model(tmp_path / "source", tied=tied), ranks, dtype="bfloat16")
    stored = engine.gather_weights(engine.plan_buckets(max_bytes=1 << 30))
    largest = max(tensor.nbytes for tensor in stored.values())

    buckets = engine.plan_buckets(max_bytes=largest - 2)

    assert [spec.name for bucket in buckets for spec in bucket] == list(stored)
    assert ("lm_head.weight" in stored) != tied
    assert {spec.dtype for bucket in buckets for spec in bucket} == {"bfloat16"}
    sizes = [sum(2 * torch.Size(spec.shape).numel() for spec in bucket) for bucket in buckets]
    assert sum(sizes) == sum(tensor.nbytes for tensor in stored.values())
    assert all(size < largest - 1 or len(bucket) == 1 for size, bucket in zip(sizes, buckets, strict=True))
    assert [len(bucket) for bucket, size in zip(buckets, sizes, strict=True) if size == largest] == [1] * (2 - tied)


def test_what_proves_the_weights_is_hashed_as_served(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    engine = engine_of(model, ranks, dtype="bfloat16")
    tensors = engine.gather_weights(engine.plan_buckets(max_bytes=10_000))

    hashes = witnesses(tensors)

    engine.save_weights(tmp_path / "1-0")
    stored = load_file(tmp_path / "1-0" / "model.safetensors")
    assert hashes == {name: hashlib.sha256(stored[name].view(torch.uint8).numpy()).hexdigest() for name in hashes}
    norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm", "mlp.down_proj")
    assert hashes.keys() == {"model.norm.weight"} | {
        f"model.layers.{layer}.{norm}.weight" for layer in (0, 1) for norm in norms
    }


def test_only_the_ends_and_the_middle_of_a_deep_model_are_hashed() -> None:
    kinds = {"mlp.down_proj.weight": (2, 2), "norm.weight": (2,), "self_attn.q_proj.bias": (2,)}
    names = {f"model.layers.{layer}.{kind}": shape for layer in range(12) for kind, shape in kinds.items()}
    tensors = {name: torch.zeros(shape) for name, shape in names.items()} | {"model.embed.weight": torch.zeros(2, 2)}

    assert witnesses(tensors).keys() == {
        *(f"model.layers.{layer}.norm.weight" for layer in (0, 6, 11)),
        *(f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 11)),
    }
    assert witnesses({"embed.weight": torch.zeros(2, 2)}) == {}
