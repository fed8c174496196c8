"""A preset is its paper's choices, every one of them a setting; combinations that mean nothing are refused by name."""

import typing
from typing import Any

import pytest
import torch

from areal_async.algorithms.advantages import AdvantageRule, advantage_rule
from areal_async.algorithms.aggregation import Aggregation
from areal_async.algorithms.presets import CORRECTIONS, SURROGATES, aggregation, policy_objective
from areal_async.algorithms.ratios import RATIOS
from areal_async.algorithms.shaping import Overlong
from areal_async.config.algorithm import PRESETS
from areal_async.config.settings import AlgorithmSettings, Settings
from tests.unit.algorithms.losses import policy_loss
from tests.unit.algorithms.plain import Choices, loss_of, packed, random_sequences

TRAINABLE = [name for name in PRESETS if name != "ppo"]


def run_of(algorithm: dict[str, Any], *, group_size: int = 8, max_staleness: int = 2) -> Settings:
    return Settings.model_validate({
        "algorithm": algorithm,
        "rollout": {
            "group_size": group_size, "min_group_size": 1, "max_staleness": max_staleness,
            "sampling": {"max_new_tokens": 1000},
        },
    })  # fmt: skip


def choices_of(name: str) -> set[Any]:
    return set(typing.get_args(AlgorithmSettings.model_fields[name].annotation))


def test_every_name_of_the_settings_has_its_function() -> None:
    assert choices_of("name") == set(PRESETS)
    assert choices_of("loss") == set(SURROGATES)
    assert choices_of("correction") == set(CORRECTIONS)
    assert choices_of("ratio_level") == set(RATIOS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_record_of_what_differs_from_the_defaults(name: str) -> None:
    plain, preset = AlgorithmSettings().model_dump(), AlgorithmSettings(name=name).model_dump()  # type: ignore[arg-type]

    assert {key: value for key, value in preset.items() if value != plain[key] and key != "name"} == PRESETS[name]
    assert AlgorithmSettings.model_validate(preset).model_dump() == preset


EXPECTED = {
    "grpo": (AdvantageRule(), Aggregation("token_mean", 1000), Choices(correction="truncate", high=5.0)),
    "dr_grpo": (AdvantageRule(std="none"), Aggregation("constant", 1000), Choices(correction="truncate", high=5.0)),
    "dapo": (
        AdvantageRule(overlong=Overlong(max_tokens=1000, cache_tokens=200)),
        Aggregation("token_mean", 1000),
        Choices(eps_high=0.28, correction="truncate", high=5.0),
    ),
    "rloo": (
        AdvantageRule(baseline="leave_one_out", std="none"),
        Aggregation("sequence_sum", 1000),
        Choices(surrogate="reinforce", correction="truncate", high=5.0),
    ),
    "reinforce_pp": (
        AdvantageRule(baseline="none", std="batch"),
        Aggregation("token_mean", 1000),
        Choices(correction="truncate", high=5.0),
    ),
    "reinforce_pp_baseline": (
        AdvantageRule(std="batch"),
        Aggregation("token_mean", 1000),
        Choices(correction="truncate", high=5.0),
    ),
    "lite_ppo": (
        AdvantageRule(std="batch_reward"),
        Aggregation("token_mean", 1000),
        Choices(correction="truncate", high=5.0),
    ),
    "gspo": (
        AdvantageRule(),
        Aggregation("sequence_mean", 1000),
        Choices(ratio="sequence", eps_low=3e-4, eps_high=4e-4, correction="truncate", high=5.0),
    ),
    "cispo": (
        AdvantageRule(),
        Aggregation("token_mean", 1000),
        Choices(surrogate="cispo", eps_low=1.0, eps_high=4.0, decoupled=False),
    ),
    "sapo": (
        AdvantageRule(),
        Aggregation("sequence_mean", 1000),
        Choices(surrogate="sapo", correction="truncate", high=5.0),
    ),
    "m2po": (
        AdvantageRule(),
        Aggregation("token_mean", 1000),
        Choices(surrogate="importance", decoupled=False, masks_moment=True),
    ),
    "dppo": (
        AdvantageRule(),
        Aggregation("token_mean", 1000),
        Choices(surrogate="dppo_tv", divergence=0.2, decoupled=False),
    ),
    "tis": (AdvantageRule(), Aggregation("token_mean", 1000), Choices(correction="truncate", high=2.0)),
    "icepop": (
        AdvantageRule(),
        Aggregation("sequence_mean", 1000),
        Choices(correction="icepop", low=0.5, high=5.0),
    ),
}


@pytest.mark.parametrize("name", TRAINABLE)
def test_a_preset_resolves_to_its_papers_loss(name: str) -> None:
    rule, expected, choices = EXPECTED[name]
    settings = run_of({"name": name})
    sequences = random_sequences(1, num=6)

    loss = policy_objective(settings)(packed(sequences)).loss.item()

    assert advantage_rule(settings) == rule
    assert aggregation(settings) == expected
    assert loss == pytest.approx(loss_of(sequences, choices), rel=1e-6)


def test_todays_grpo_gives_the_same_bits_as_the_function_it_was() -> None:
    tokens = packed(random_sequences(2, num=9), dtype=torch.float32)
    ones = torch.ones_like(tokens.start_T)
    for algorithm, max_staleness, cap in (
        ({"eps_clip": 0.4, "entropy_coef": 0.01}, 2, 5.0),
        ({"eps_clip": 0.4, "entropy_coef": 0.01}, 0, None),
        ({"eps_clip": 0.4, "entropy_coef": 0.01, "decoupled": False}, 2, None),
    ):
        settings = run_of(algorithm, max_staleness=max_staleness)
        terms = policy_objective(settings)(_with(tokens, weight_T=ones))
        before = policy_loss(_with(tokens, weight_T=None), eps_clip=0.4, behave_weight_cap=cap, entropy_coef=0.01)

        assert terms.loss.item() == before.loss.item()
        assert advantage_rule(settings) == AdvantageRule(baseline="group", std="group")
        assert aggregation(settings).share(7) == (1.0, 1.0)


def _with(tokens: Any, **given: Any) -> Any:
    from dataclasses import replace

    return replace(tokens, **given)


def test_what_is_set_beside_a_preset_wins_over_it() -> None:
    algorithm = AlgorithmSettings.model_validate({"name": "dapo", "eps_clip_higher": 0.3, "overlong_cache": 0})

    assert (algorithm.eps_clip_higher, algorithm.overlong_cache, algorithm.filter_equal_groups) == (0.3, 0, True)


def test_the_yes_and_no_of_older_files_are_still_read() -> None:
    assert AlgorithmSettings.model_validate({"advantage_std": True}).advantage_std == "group"
    assert AlgorithmSettings.model_validate({"advantage_std": False}).advantage_std == "none"


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        ({"ratio_level": "sequence", "loss": "cispo"}, "ratio_level: got sequence with loss=cispo, need token"),
        ({"name": "m2po", "decoupled": True}, "decoupled: got true with loss=m2po, need false"),
        ({"behave_weight_floor": 6.0}, "behave_weight_floor: got 6.0, need at most behave_weight_cap=5.0"),
        ({"advantage_baseline": "critic"}, "advantage_std: got group with advantage_baseline=critic, need batch"),
        ({"name": "dapo", "overlong_cache": 2000}, "overlong_cache: got 2000, need at most 1000 tokens"),
        (
            {"credit": "process", "advantage_std": "batch"},
            "credit: got process with advantage_baseline=group, advantage_std=batch, need group and group",
        ),
        ({"name": "rloo", "credit": "turns"}, "credit: got turns with advantage_baseline=leave_one_out"),
        ({"dual_clip": 1.0}, "greater than 1"),
        ({"name": "drpo"}, "Input should be 'grpo'"),
    ],
)
def test_a_bad_combination_is_one_sentence(algorithm: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        run_of(algorithm)


def test_with_a_critic_rewards_are_shaped_and_nothing_more() -> None:
    settings = run_of({"name": "ppo", "overlong_cache": 100})

    assert settings.algorithm.needs_models == ("critic",)
    overlong = Overlong(max_tokens=1000, cache_tokens=100)
    assert advantage_rule(settings) == AdvantageRule(baseline="none", std="none", overlong=overlong)
