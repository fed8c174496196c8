"""A critic and a reference that see are shown what the policy was, and compute as transformers does with it alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from areal_async.config.settings import AlgorithmSettings, ModelSettings, Settings, TrainerSettings
from areal_async.errors import UserError
from areal_async.trainer.engine.critic import CriticEngine
from areal_async.trainer.engine.engines import Engines
from areal_async.trainer.engine.pairs import PairEngine
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.packing.rows import RETURNS, VALUES, TrainRow, with_columns
from areal_async.vision.spec import VisionSpec
from tests.unit.trainer.rank_workers import RankWorkers
from tests.unit.trainer.seeing import (
    IMAGE,
    SEEING,
    check_gradients,
    given_images,
    save_seeing_model,
    seeing_rows,
    stored_parameters,
    transformers_logprobs,
)


@pytest.fixture(scope="module", params=SEEING)
def critic(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model that sees with a head of one output beside its own."""
    folder = save_seeing_model(tmp_path_factory.mktemp(request.param), request.param)
    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"] = np.random.default_rng(0).normal(size=(1, 32)).astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def settings_of(model: Path, num_ranks: int = 1, *, reference_path: str | None = None, **trainer: Any) -> Settings:
    given = {"path": str(model), "dtype": "float32", "reference": {"path": reference_path}}
    sizes = {"lr": 1e-2, "token_budget": 32, "max_grad_norm": 1e9, "num_ranks": num_ranks}
    return Settings(
        model=ModelSettings.model_validate(given),
        trainer=TrainerSettings.model_validate(sizes | trainer),
        algorithm=AlgorithmSettings(name="ppo", kl_coef=0.1, num_minibatches=1),
    )


def with_returns(rows: Sequence[TrainRow]) -> list[TrainRow]:
    """Return the rows with what a critic is to learn; what it said before is near enough to clip nothing."""
    random = np.random.default_rng(0)
    returns = [random.normal(size=row.num_tokens).astype(np.float32) for row in rows]
    return with_columns(rows, {VALUES: returns, RETURNS: returns})


def critic_gradients(
    ranks: Ranks, folder: Path, rows_of_ranks: Sequence[Sequence[TrainRow]], trainer: dict[str, Any]
) -> dict[str, Any]:
    """Return the gradients of a critic's update on rank 0, and nothing on the others."""
    engine = CriticEngine(settings_of(folder, ranks.size, **trainer), ranks)
    seen: dict[str, Any] = {}
    engine.watch_gradients(lambda whole: seen.update({name: one.numpy() for name, one in whole.items()}))
    engine.train_step(rows_of_ranks[engine.dims.data.rank], step=1, total_steps=1)
    return seen


def transformers_values(folder: Path, rows: Sequence[TrainRow]) -> tuple[Any, list[torch.Tensor]]:
    """Return transformers' model of a critic's folder, its head among it, and the values of each row alone [L]."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    spec = VisionSpec.read(folder)
    assert spec is not None
    model.score = torch.nn.Linear(32, 1, bias=False)
    model.score.weight.data = torch.from_numpy(load_file(folder / "model.safetensors")["score.weight"])
    values = []
    for row in rows:
        ids = torch.from_numpy(row.token_ids).long()[None]
        hidden = model.base_model(input_ids=ids, **given_images(row, spec)).last_hidden_state[0]
        values.append(torch.nn.functional.pad(model.score(hidden)[:-1, 0], (1, 0)))
    return model, values


def expected_gradients(folder: Path, rows: Sequence[TrainRow]) -> dict[str, Any]:
    """Return the gradient of every parameter of a critic, by its name in the folder, of the rows' loss one by one."""
    model, values = transformers_values(folder, rows)
    num_tokens = sum(int(row.loss_mask.sum()) for row in rows)
    errors = [
        (torch.from_numpy(row.columns[RETURNS]) - one)[torch.from_numpy(row.loss_mask)]
        for row, one in zip(rows, values, strict=True)
    ]
    (0.5 * torch.cat(errors).square().sum() / num_tokens).backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return stored_parameters(model)


@pytest.mark.parametrize("token_budget", [32, 4096])
def test_values_of_packed_rows_are_those_of_each_document_alone(token_budget: int, critic: Path, ranks: Ranks) -> None:
    rows = seeing_rows()

    packed = CriticEngine(settings_of(critic, token_budget=token_budget), ranks).values(rows)

    for row, got, alone in zip(rows, packed, transformers_values(critic, rows)[1], strict=True):
        assert got.any()
        assert torch.allclose(got, alone.detach() * torch.from_numpy(row.loss_mask), atol=1e-5)


def test_a_critics_gradients_are_those_of_each_document_alone(critic: Path, ranks: Ranks) -> None:
    rows = with_returns(seeing_rows())

    check_gradients(critic_gradients(ranks, critic, [rows], {}), expected_gradients(critic, rows))


@pytest.mark.parametrize("trainer", [{}, {"tensor_parallel": 2}])
def test_two_ranks_of_a_critic_have_the_gradients_of_each_document_alone(
    trainer: dict[str, Any], critic: Path, two_ranks: RankWorkers
) -> None:
    rows = with_returns(seeing_rows())
    shares = [rows, rows] if trainer else [rows[::2], rows[1::2]]

    first, _ = two_ranks.run(critic_gradients, critic, shares, trainer)

    check_gradients(first, expected_gradients(critic, rows))


def test_a_critic_leaves_a_frozen_tower_as_it_is(critic: Path, ranks: Ranks) -> None:
    got = critic_gradients(ranks, critic, [with_returns(seeing_rows())], {"vision": "freeze"})

    assert {name for name, one in got.items() if not one.any()} == {name for name in got if "visual." in name}


def test_a_critic_is_trained_whole_beside_a_policy_with_adapters(critic: Path, ranks: Ranks) -> None:
    rows = with_returns(seeing_rows())

    got = critic_gradients(ranks, critic, [rows], {"vision": "lora", "lora": {"rank": 4}})

    check_gradients(got, expected_gradients(critic, rows))


def test_a_folder_without_a_head_starts_a_critic_that_sees_and_expects_nothing(tmp_path: Path, ranks: Ranks) -> None:
    values = CriticEngine(settings_of(save_seeing_model(tmp_path, "qwen3_vl")), ranks).values(seeing_rows())

    assert not any(one.any() for one in values)


def reference_logprobs(ranks: Ranks, folder: Path, rows: Sequence[TrainRow], trainer: dict[str, Any]) -> list[Any]:
    """Return what the reference says of the rows, of which this rank has every second one where there are two."""
    engines = Engines.for_run(settings_of(folder, ranks.size, **trainer), ranks)
    return [one.numpy() for one in engines.reference_logprobs(rows[ranks.rank :: ranks.size])]


@pytest.mark.parametrize(
    "trainer", [{}, {"token_budget": 4096}, *({"vision": vision, "lora": {"rank": 4}} for vision in ("freeze", "lora"))]
)
def test_a_reference_says_of_packed_rows_what_it_says_of_each_document_alone(
    trainer: dict[str, Any], critic: Path, ranks: Ranks
) -> None:
    check_reference(reference_logprobs(ranks, critic, seeing_rows(), trainer), critic)


@pytest.mark.parametrize("trainer", [{}, {"reference": {"tensor_parallel": 2}}])
def test_two_ranks_of_a_reference_say_what_it_says_of_each_document_alone(
    trainer: dict[str, Any], critic: Path, two_ranks: RankWorkers
) -> None:
    """Where the reference is divided otherwise than the policy, the images travel with their rows."""
    answers = two_ranks.run(reference_logprobs, critic, seeing_rows(), trainer)

    check_reference([one for pair in zip(*answers, strict=True) for one in pair], critic)


def check_reference(answers: Sequence[Any], folder: Path) -> None:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    spec = VisionSpec.read(folder)
    assert spec is not None
    for row, got in zip(seeing_rows(), answers, strict=True):
        with torch.no_grad():
            expected = transformers_logprobs(model, row, spec)
        assert np.allclose(got[row.loss_mask], expected, atol=1e-5)


def test_a_reference_that_cannot_be_shown_the_policys_images_is_refused_before_the_first_step(
    critic: Path, model: Path, tmp_path: Path, ranks: Ranks
) -> None:
    other = save_seeing_model(tmp_path, "qwen3_vl")
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config.replace(f'"image_token_id": {IMAGE}', '"image_token_id": 7'))

    for folder, how in ((model, "does not see"), (other, "has other tokens for an image")):
        with pytest.raises(UserError, match=rf"model\.reference: got {folder}, which {how}, need one that takes"):
            Engines.for_run(settings_of(critic, reference_path=str(folder)), ranks)


def test_a_reward_model_that_sees_is_refused(critic: Path, ranks: Ranks) -> None:
    settings = settings_of(critic)

    with pytest.raises(UserError, match="which sees, need a model of text"):
        PairEngine(model=settings.model, trainer=settings.trainer, ranks=ranks)
