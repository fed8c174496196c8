"""A model that sees computes as transformers does with each document alone, however rows are packed and shared."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

from areal_async.config.settings import TrainerSettings
from areal_async.trainer.engine import checkpoint
from areal_async.trainer.engine.loading import CAUSAL_LM, empty_decoder
from areal_async.trainer.engine.model import PolicyModel
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.vision import prepare_tower
from areal_async.trainer.engine.weights import witnesses
from areal_async.trainer.packing.images import with_images
from areal_async.trainer.packing.rows import pack_rows
from areal_async.vision.pixels import patches
from areal_async.vision.spec import VisionSpec
from tests.unit.trainer.models import engine_of, parameters_differ
from tests.unit.trainer.rank_workers import RankWorkers
from tests.unit.trainer.seeing import (
    SEEING,
    check_gradients,
    gradients_of,
    png,
    refusal_of,
    save_seeing_model,
    seeing_row,
    seeing_rows,
    stored_parameters,
    transformers_gradients,
    transformers_logprobs,
)


@pytest.fixture(scope="module", params=SEEING)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random model that sees."""
    return save_seeing_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("token_budget", [32, 4096])
def test_logprobs_of_packed_rows_are_those_of_each_document_alone(
    token_budget: int, seeing: Path, ranks: Ranks
) -> None:
    from transformers import AutoModelForImageTextToText

    rows, spec = seeing_rows(), VisionSpec.read(seeing)
    assert spec is not None
    model = AutoModelForImageTextToText.from_pretrained(seeing, dtype=torch.float32, attn_implementation="eager")

    answers = engine_of(seeing, ranks, token_budget=token_budget).logprobs(rows)

    for row, logprobs in zip(rows, answers, strict=True):
        with torch.no_grad():
            expected = transformers_logprobs(model, row, spec)
        assert torch.allclose(logprobs[torch.from_numpy(row.loss_mask)], expected, atol=1e-5)


@pytest.mark.parametrize("trainer", [{"token_budget": 32}, {"token_budget": 4096}, {"activation_checkpointing": True}])
def test_gradients_of_packed_rows_are_those_of_each_document_alone(
    trainer: dict[str, Any], seeing: Path, ranks: Ranks
) -> None:
    rows = seeing_rows()

    check_gradients(gradients_of(ranks, seeing, [rows], trainer), transformers_gradients(seeing, rows))


@pytest.mark.parametrize("trainer", [{}, {"tensor_parallel": 2}, {"replicas": 2}])
def test_two_ranks_have_the_gradients_of_each_document_alone(
    trainer: dict[str, Any], seeing: Path, two_ranks: RankWorkers
) -> None:
    rows = seeing_rows()
    shares = [rows, rows] if "tensor_parallel" in trainer else [rows[::2], rows[1::2]]

    first, other = two_ranks.run(gradients_of, seeing, shares, {"token_budget": 32, **trainer})

    assert not other
    check_gradients(first, transformers_gradients(seeing, rows))


@pytest.mark.parametrize("trainer", [{}, {"replicas": 2}])
def test_a_rank_without_any_image_goes_along_with_one_that_has_some(
    trainer: dict[str, Any], seeing: Path, two_ranks: RankWorkers
) -> None:
    """The tower's collectives come in the same order on both, though one has nothing to show."""
    rows = seeing_rows()
    shares = [[row for row in rows if not row.images], [row for row in rows if row.images]]

    first, _ = two_ranks.run(gradients_of, seeing, shares, {"token_budget": 32, **trainer})

    check_gradients(first, transformers_gradients(seeing, rows))


@pytest.mark.parametrize("trainer", [{}, {"replicas": 2}])
def test_two_ranks_without_any_image_leave_the_tower_out(
    trainer: dict[str, Any], seeing: Path, two_ranks: RankWorkers
) -> None:
    rows = [row for row in seeing_rows() if not row.images]

    first, _ = two_ranks.run(gradients_of, seeing, [rows[:1], rows[1:]], {"token_budget": 32, **trainer})

    check_gradients(first, transformers_gradients(seeing, rows))


def test_an_image_that_siblings_share_is_encoded_once_in_a_row(seeing: Path, ranks: Ranks) -> None:
    engine, made = engine_of(seeing, ranks), list[Any]()
    engine._model.decoder.base_model.visual.register_forward_hook(lambda _, __, output: made.append(output))
    siblings = [seeing_row([png(0)], index=index) for index in range(4)]

    engine.logprobs(siblings)

    assert [len(one.pooler_output) for one in made] == [6]


def test_no_row_waits_for_what_its_device_has_computed(seeing: Path) -> None:
    """Where tensors have no values, as on the meta device, nothing can be asked of them on the way there and back."""
    device, rows = torch.device("meta"), seeing_rows()
    spec = VisionSpec.read(seeing)
    assert spec is not None
    decoder = empty_decoder(CAUSAL_LM, seeing, stored=torch.float32).to(device)
    prepare_tower(decoder, TrainerSettings(), torch.float32)
    (row,) = with_images([pack_rows(rows, device)], [rows], spec)

    logprobs, _ = PolicyModel(decoder)(row)
    logprobs.sum().backward()

    assert all(parameter.grad is not None for parameter in decoder.parameters())


def test_packed_rows_are_divided_by_what_their_images_cost_too(seeing: Path, ranks: Ranks) -> None:
    """Two rows with an image each do not share a packed one where two of text, as long, could."""
    engine = engine_of(seeing, ranks, token_budget=32)
    rows = [seeing_row([png(index)], index=index) for index in (0, 1)]
    text = [replace(seeing_row([], index=index, length=13), loss_mask=rows[0].loss_mask) for index in (2, 3)]

    parts = engine._packer.divide([*rows, *text])

    assert sorted(sum(1 for member in part if member < 2) for part in parts) == [1, 1]


def test_rows_of_text_alone_leave_the_tower_as_it_is(seeing: Path, ranks: Ranks) -> None:
    rows = [row for row in seeing_rows() if not row.images]
    engine = engine_of(seeing, ranks, weight_decay=0.1)
    before = engine.full_parameters()

    engine.train_step(rows, step=1, total_steps=1)

    changed = {name for name, one in engine.full_parameters().items() if not torch.equal(one, before[name])}
    assert changed == {name for name in before if "visual." not in name}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_tower_has_no_gradients_and_leaves_the_others_theirs(dtype: str, seeing: Path, ranks: Ranks) -> None:
    rows = seeing_rows()
    expected = gradients_of(ranks, seeing, [rows], {"vision": "train"}, dtype=dtype)

    got = gradients_of(ranks, seeing, [rows], {"vision": "freeze"}, dtype=dtype)

    for name, gradient in expected.items():
        assert gradient.any()
        assert (got[name] == (0 * gradient if "visual." in name else gradient)).all(), name


def test_a_frozen_tower_has_no_moments_and_takes_what_it_is_computed_in(seeing: Path, ranks: Ranks) -> None:
    engine = engine_of(seeing, ranks, dtype="bfloat16", vision="freeze")
    engine.train_step(seeing_rows(), step=1, total_steps=1)

    model, optimizer = engine.trained
    for name, parameter in model.named_parameters():
        is_frozen = ".visual." in name
        assert parameter.dtype == (torch.bfloat16 if is_frozen else torch.float32)
        assert (parameter not in optimizer.state) == is_frozen


def test_in_bfloat16_a_tower_makes_what_transformers_makes(seeing: Path, ranks: Ranks) -> None:
    """Bit for bit: the angles of its positions are not rounded on the way into its blocks."""
    from transformers import AutoModelForImageTextToText

    row = seeing_rows()[1]
    spec = VisionSpec.read(seeing)
    assert spec is not None
    model = AutoModelForImageTextToText.from_pretrained(seeing, dtype=torch.bfloat16, attn_implementation="sdpa")
    with torch.no_grad():
        expected = model.model.visual(torch.from_numpy(patches(row.images[0], spec)), torch.tensor([[1, 6, 4]]))
    engine = engine_of(seeing, ranks, dtype="bfloat16")
    made: list[Any] = []
    engine._model.decoder.base_model.visual.register_forward_hook(lambda _, __, output: made.append(output))

    engine.logprobs([row])

    assert torch.equal(made[0].pooler_output, expected.pooler_output)


def test_what_is_exported_loads_in_transformers_and_sees_the_same(seeing: Path, ranks: Ranks, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    rows, spec = seeing_rows(), VisionSpec.read(seeing)
    assert spec is not None
    engine = engine_of(seeing, ranks)
    engine.train_step(rows, step=1, total_steps=1)

    engine.export(tmp_path)

    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", attn_implementation="eager")
    trained, exported = engine.full_parameters(), stored_parameters(model)
    assert trained.keys() == exported.keys() == load_file(seeing / "model.safetensors").keys()
    assert all((exported[name] == one.numpy()).all() for name, one in trained.items())
    assert VisionSpec.read(tmp_path / "model") == spec
    assert not [name for name in witnesses(trained) if "visual" in name]
    for row, logprobs in zip(rows, engine.logprobs(rows), strict=True):
        with torch.no_grad():
            expected = transformers_logprobs(model, row, spec)
        assert torch.allclose(logprobs[torch.from_numpy(row.loss_mask)], expected, atol=1e-5)


def test_a_checkpoint_goes_on_where_it_was(seeing: Path, ranks: Ranks, tmp_path: Path) -> None:
    rows = seeing_rows()
    engine, resumed = engine_of(seeing, ranks), engine_of(seeing, ranks)
    engine.train_step(rows, step=1, total_steps=2)
    checkpoint.save({"actor": engine.trained}, tmp_path / "1", ledger=b"", ranks=ranks)

    checkpoint.load({"actor": resumed.trained}, tmp_path / "1", ranks=ranks)

    for one in (engine, resumed):
        one.train_step(rows, step=2, total_steps=2)
    assert parameters_differ(engine, resumed) == 0


def test_adapters_of_the_language_model_are_trained_beside_a_frozen_tower(seeing: Path, ranks: Ranks) -> None:
    rows = seeing_rows()
    engine = engine_of(seeing, ranks, vision="freeze", lora={"rank": 4})
    before, answers = engine.full_parameters(), engine.logprobs(rows)

    engine.train_step(rows, step=1, total_steps=1)

    changed = {name for name, one in engine.full_parameters().items() if not torch.equal(one, before[name])}
    assert changed == {name for name in before if ".layers." in name and "_proj.weight" in name}
    assert all(torch.equal(*pair) for pair in zip(engine.base_logprobs(rows), answers, strict=True))


def test_a_pipeline_of_a_model_that_sees_is_refused(seeing: Path, two_ranks: RankWorkers) -> None:
    assert (
        two_ranks.run(refusal_of, seeing, {"pipeline_parallel": 2})
        == [
            f"trainer.pipeline_parallel: got 2 for a {VisionSpec.read(seeing).family}, need 1 for a model that sees; "  # type: ignore[union-attr]
            "shard it (num_ranks), or use tensor_parallel"
        ]
        * 2
    )


def test_images_for_a_model_that_does_not_see_are_refused(model: Path, ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="got rows with images for a model that does not see"):
        engine_of(model, ranks).logprobs(seeing_rows())
