"""Every parameter is of one kind, and one of a layer of one third: told by name, for the decoders that we train."""

from pathlib import Path

import pytest

from areal_async.trainer.engine.gradient_groups import GROUPS, KINDS, THIRDS, groups_of, num_layers
from tests.unit.trainer.models import FAMILIES, save_model


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("causal_lm.model.embed_tokens.weight", "embeddings"),
        ("causal_lm.model.layers.0.self_attn.q_proj.weight", "attention"),
        ("causal_lm.model.layers.0.self_attn.q_norm.weight", "norms"),
        ("causal_lm.model.layers.0._checkpoint_wrapped_module.input_layernorm.weight", "norms"),
        ("causal_lm.model.layers.0.mlp.experts.3.down_proj.weight", "mlp"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight", "mlp"),
        ("causal_lm.lm_head.weight", "head"),
        ("classifier.score.weight", "head"),
        ("transformer.wte.weight", "embeddings"),
        ("transformer.h.0.ln_1.bias", "norms"),
        ("transformer.h.0.attn.c_attn.weight", "attention"),
        ("adapter.weight", "other"),
    ],
)
def test_a_parameter_is_of_the_kind_that_its_name_says(name: str, kind: str) -> None:
    assert groups_of(name, num_layers=1)[0] == kind


@pytest.mark.parametrize("family", FAMILIES)
def test_no_parameter_of_a_decoder_is_of_another_kind(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    causal_lm = AutoModelForCausalLM.from_pretrained(save_model(tmp_path, family=family, tied=False))
    names = [name for name, _ in causal_lm.named_parameters()]
    kinds = {groups_of(name, num_layers=num_layers(names))[0] for name in names}

    assert kinds == set(KINDS) - {"other"}


@pytest.mark.parametrize(("layers", "expected"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (7, [0, 0, 0, 1, 1, 2, 2])])
def test_layers_fall_into_thirds_of_the_depth(layers: int, expected: list[int]) -> None:
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(layers)]

    assert num_layers([*names, "model.embed_tokens.weight"]) == layers
    assert [groups_of(name, num_layers=layers) for name in names] == [("mlp", THIRDS[third]) for third in expected]
    assert set(GROUPS) == {*KINDS, *THIRDS}


@pytest.mark.parametrize("name", ["causal_lm.model.visual.blocks.7.attn.qkv.weight", "visual.merger.norm.weight"])
def test_a_tower_is_of_no_layer_and_no_kind_of_the_language_model(name: str) -> None:
    assert groups_of(name, num_layers=2) == ("other",)
    assert num_layers([name, "model.language_model.layers.1.mlp.up_proj.weight"]) == 2
