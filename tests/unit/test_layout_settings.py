"""What divides the ranks, for the policy and for the models beside it."""

import pytest
from pydantic import ValidationError

from areal_async.config.settings import TrainerSettings
from areal_async.config.sft import SftTrainerSettings


def test_models_beside_the_policy_have_its_layout_where_they_have_none_of_their_own() -> None:
    trainer = TrainerSettings.model_validate(
        {"num_ranks": 8, "tensor_parallel": 2, "replicas": 2, "critic": {"tensor_parallel": 1, "pipeline_parallel": 4}}
    )

    layouts = [
        (one.pipeline_parallel, one.tensor_parallel, one.replicas)
        for one in (trainer, trainer.for_role("critic"), trainer.for_role("reference"))
    ]

    assert layouts == [(1, 2, 2), (4, 1, 2), (1, 2, 2)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_parallel": 4}, "got 6 with pipeline_parallel=1, tensor_parallel=4, replicas=1, need a multiple of 4"),
        ({"critic": {"replicas": 4}}, "critic.replicas=4, need a multiple of 4"),
        ({"replicas": 2, "reference": {"tensor_parallel": 2}}, "reference.tensor_parallel=2, .* need a multiple of 4"),
    ],
)
def test_a_layout_that_does_not_divide_the_ranks_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerSettings.model_validate({"num_ranks": 6, **given})


@pytest.mark.parametrize("given", [{"tensor_parallel": 2}, {"critic": {"tensor_parallel": 2}}])
def test_parts_that_speak_inside_of_a_layer_are_not_compiled(given: dict[str, object]) -> None:
    with pytest.raises(
        ValidationError, match=r"compile: got true with (critic\.)?tensor_parallel=2, need one of the two"
    ):
        TrainerSettings.model_validate({"num_ranks": 2, "compile": True, **given})


def test_a_fine_tuning_has_layouts_too() -> None:
    engine = SftTrainerSettings(num_ranks=4, tensor_parallel=2, reduce_dtype="bfloat16").engine

    assert (engine.tensor_parallel, engine.reduce_dtype) == (2, "bfloat16")
    with pytest.raises(ValidationError, match="need a multiple of 3"):
        SftTrainerSettings(num_ranks=4, pipeline_parallel=3)


@pytest.mark.parametrize("layout", ["pipeline_parallel", "tensor_parallel"])
def test_a_fine_tuning_of_adapters_refuses_layouts_that_do_not_train_them(layout: str) -> None:
    with pytest.raises(ValidationError, match=f"{layout}=2, need {layout}=1"):
        SftTrainerSettings.model_validate({"num_ranks": 2, layout: 2, "lora": {"rank": 4}})
