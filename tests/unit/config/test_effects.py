"""Who sets what nothing looks at is told so; what a preset sets, and what a resolved file has, is taken as it is."""

from pathlib import Path

import pytest

from areal_async.config.algorithm import PRESETS, AlgorithmSettings
from areal_async.config.effects import NEEDS
from areal_async.config.settings import Settings
from areal_async.config.sources import dump_settings, load_settings
from areal_async.errors import UserError

ON_POLICY = "--rollout.max_staleness=0"


def refusal(*words: str, config: Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_settings(config, words)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        ([ON_POLICY, "--algorithm.correction=icepop"], "correction"),
        ([ON_POLICY, "--algorithm.proximal=loglinear"], "proximal"),
        ([ON_POLICY, "--algorithm.behave_weight_cap=2"], "behave_weight_cap"),
        (["--algorithm.decoupled=false", "--algorithm.correction=icepop"], "correction"),
        (["--algorithm.decoupled=false", "--algorithm.proximal=loglinear"], "proximal"),
        (["--algorithm.correction=none", "--algorithm.behave_weight_cap=2"], "behave_weight_cap"),
        (["--algorithm.behave_weight_floor=0.1"], "behave_weight_floor"),
        (["--algorithm.name=rloo", "--algorithm.eps_clip=0.3"], "eps_clip"),
        (["--algorithm.name=rloo", "--algorithm.eps_clip_higher=0.3"], "eps_clip_higher"),
        (["--algorithm.name=sapo", "--algorithm.dual_clip=3"], "dual_clip"),
        (["--algorithm.tau_pos=2"], "tau_pos"),
        (["--algorithm.tau_neg=2"], "tau_neg"),
        (["--algorithm.divergence=0.5"], "divergence"),
        (["--algorithm.m2_threshold=0.5"], "m2_threshold"),
        (["--algorithm.aggregation_constant=100"], "aggregation_constant"),
        (["--algorithm.kl_in=reward"], "kl_in"),
        (["--algorithm.kl_estimator=k1"], "kl_estimator"),
        (["--algorithm.overlong_factor=2"], "overlong_factor"),
        (["--algorithm.overlong_max=2"], "overlong_max"),
        (["--algorithm.gamma=0.5"], "gamma"),
        (["--algorithm.gae_lambda=0.5"], "gae_lambda"),
        (["--algorithm.value_clip=0.5"], "value_clip"),
        ([ON_POLICY, "--algorithm", "{tau_pos: 2}"], "tau_pos"),
    ],
)
def test_what_nothing_looks_at_is_refused_when_it_is_given(words: list[str], setting: str) -> None:
    sentence = refusal(*words, "--run.steps=3")

    assert sentence.startswith(f"algorithm.{setting}: got ")
    assert " with algorithm." in sentence
    assert ", need " in sentence
    assert "; leave it out, or choose that (set on the command line (--algorithm" in sentence


def test_the_sentence_says_what_decides_and_what_is_needed() -> None:
    assert refusal(ON_POLICY, "--algorithm.correction=icepop") == (
        "algorithm.correction: got icepop with algorithm.name=grpo, algorithm.decoupled=null, "
        "rollout.max_staleness=0, need decoupled=true, or null with max_staleness over 0; leave it out, or choose that "
        "(set on the command line (--algorithm.correction))"
    )


@pytest.mark.parametrize("staleness", ["0", "2"])
@pytest.mark.parametrize("name", PRESETS)
def test_what_a_preset_sets_is_not_refused(name: str, staleness: str) -> None:
    load_settings(None, [f"--algorithm.name={name}", f"--rollout.max_staleness={staleness}"])


@pytest.mark.parametrize("name", PRESETS)
def test_a_resolved_file_is_taken_whatever_is_idle_in_it(name: str, tmp_path: Path) -> None:
    """It may be of a run that was started when nobody was told; what is changed for a replay of it is held to that."""
    idle = {"correction": "icepop", "tau_pos": 2, "eps_clip": 0.3, "gamma": 0.5, "kl_in": "reward", "dual_clip": 3}
    stored = Settings.model_validate({"algorithm": {"name": name, **idle}, "rollout": {"max_staleness": 0}})
    file = tmp_path / "config.yaml"
    file.write_text(dump_settings(stored))

    assert load_settings(file, use_environment=False) == stored
    assert load_settings(file, ["--run.steps=3"], use_environment=False).algorithm == stored.algorithm
    with pytest.raises(UserError, match=r"algorithm.overlong_factor: got 2.0 with .*overlong_cache=0"):
        load_settings(file, ["--algorithm.overlong_cache=0", "--algorithm.overlong_factor=2"], use_environment=False)


def test_what_a_file_has_does_not_forbid_what_the_command_line_chooses(tmp_path: Path) -> None:
    """As the files in ``configs`` are for grpo, and are run with any preset."""
    file = tmp_path / "x.yaml"
    file.write_text("algorithm: {eps_clip: 0.4, correction: icepop, behave_weight_cap: 2}")

    assert load_settings(file, ["--algorithm.name=rloo", ON_POLICY]).algorithm.loss == "reinforce"
    assert refusal("--algorithm.name=rloo", "--algorithm.eps_clip=0.4", config=file).startswith("algorithm.eps_clip: ")
    file.write_text("algorithm: {name: rloo, eps_clip: 0.4}")
    assert refusal("--run.steps=3", config=file).endswith(f"(set in {file})")


def test_what_is_given_as_it_is_anyway_or_as_none_is_taken() -> None:
    same = ["--algorithm.name=rloo", "--algorithm.eps_clip=0.2", "--algorithm.tau_pos=1", "--algorithm.kl_in=loss"]

    assert load_settings(None, [*same, ON_POLICY, "--algorithm.correction=none"]).algorithm.correction == "none"


@pytest.mark.parametrize("name", ["tis", "icepop"])
@pytest.mark.parametrize("words", [["--algorithm.decoupled=false"], ["--algorithm.decoupled=null", ON_POLICY]])
def test_a_preset_that_corrects_is_refused_a_loss_without_a_correction(name: str, words: list[str]) -> None:
    assert f"with algorithm.name={name}, need true; {name} corrects that loss (set on the command line" in refusal(
        f"--algorithm.name={name}", *words
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--algorithm.correction=icepop", "--algorithm.behave_weight_floor=0.1", "--algorithm.proximal=loglinear"],
        [ON_POLICY, "--algorithm.decoupled=true", "--algorithm.behave_weight_cap=2"],
        ["--algorithm.name=ppo", "--algorithm.gamma=0.9", "--algorithm.gae_lambda=1", "--algorithm.value_clip=null"],
        ["--algorithm.credit=turns", "--algorithm.gamma=0.9"],
        ["--algorithm.kl_coef=0.1", "--algorithm.kl_in=reward", "--algorithm.kl_estimator=k1"],
        ["--algorithm.name=dapo", "--algorithm.overlong_factor=2", "--algorithm.overlong_max=900"],
        ["--algorithm.name=sapo", "--algorithm.tau_pos=2", "--algorithm.tau_neg=2"],
        ["--algorithm.name=dppo", "--algorithm.divergence=0.3"],
        ["--algorithm.name=m2po", "--algorithm.m2_threshold=0.3"],
        ["--algorithm.name=dr_grpo", "--algorithm.aggregation_constant=30"],
        ["--algorithm.name=cispo", "--algorithm.eps_clip=0.3", "--algorithm.eps_clip_higher=0.3"],
    ],
)
def test_what_has_an_effect_is_taken(words: list[str]) -> None:
    load_settings(None, words)


def test_the_settings_of_the_table_exist() -> None:
    for key, need in NEEDS.items():
        assert key.removeprefix("algorithm.") in AlgorithmSettings.model_fields
        for name in need.of:
            section, one = name.split(".")
            assert hasattr(getattr(Settings(), section), one)
