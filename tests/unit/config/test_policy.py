"""Policies beside the one under training: what the settings take, refuse, and write down again."""

from pathlib import Path

import pytest

from areal_async.config.settings import Settings
from areal_async.config.sources import dump_settings, load_settings
from areal_async.errors import UserError

FILE = """
rollout: {sampling: {max_new_tokens: 64, temperature: 0.9}}
policies:
  opponent:
  judge: {path: org/judge, sampling: {temperature: 0.0}, num_servers: 2}
"""


def load(tmp_path: Path, text: str, *overrides: str) -> Settings:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_settings(path, overrides, use_environment=False)


def test_policy_without_a_path_is_a_role_and_one_with_a_path_is_frozen(tmp_path: Path) -> None:
    settings = load(tmp_path, FILE)

    assert list(settings.policies) == ["opponent", "judge"]
    assert list(settings.frozen_policies) == ["judge"]


def test_what_a_policy_says_of_sampling_goes_before_what_the_run_says(tmp_path: Path) -> None:
    settings = load(tmp_path, FILE)
    base = settings.rollout.sampling

    assert settings.policies["opponent"].sampling_over(base) == base
    assert settings.policies["judge"].sampling_over(base) == base.model_copy(update={"temperature": 0.0})


def test_resolved_settings_give_the_same_again_and_still_follow_the_run(tmp_path: Path) -> None:
    settings = load(tmp_path, FILE)

    again = load(tmp_path, dump_settings(settings), "--rollout.sampling.max_new_tokens", "7")

    assert again.policies == settings.policies
    assert again.policies["judge"].sampling_over(again.rollout.sampling).max_new_tokens == 7


def test_command_line_reaches_into_a_policy_by_its_name(tmp_path: Path) -> None:

    overrides = ["--policies.judge.sampling.temperature", "0.5", "--policies.rival.path", "org/rival"]

    settings = load(tmp_path, FILE, *overrides)

    assert settings.policies["judge"].sampling.temperature == 0.5
    assert settings.policies["judge"].num_servers == 2, "the file's other words stay"
    assert settings.policies["rival"].path == "org/rival"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policies: {opponent: {num_servers: 2}}", "policies.opponent: got num_servers without path, need the path"),
        ("policies: {opponent: {dtype: float32}}", "got dtype without path"),
        (
            "policies: {taste: {kind: reward}}",
            "policies.taste: got kind=reward without path, need the path of a reward",
        ),
        (
            "policies: {taste: {kind: reward, path: x, sampling: {top_p: 1}}}",
            "got sampling with kind=reward, need none",
        ),
        ("policies: {taste: {kind: judge, path: x}}", "policies.taste.kind: got 'judge', need 'policy' or 'reward'"),
        ("policies: {policy: }", "got the name 'policy', need"),
        ("policies: {prompt: }", "got the name 'prompt', need"),
        ("policies: {an-other: }", "got the name 'an-other', need"),
        ("policies: {judge: {pth: x}}", "unknown setting policies.judge.pth .*did you mean policies.judge.path"),
        ("policies: {judge: {sampling: {temprature: 1}}}", "did you mean policies.judge.sampling.temperature"),
        ("policies: {judge: {path: x, num_servers: 0}}", "policies.judge.num_servers: got 0, need at least 1"),
        ("policies: [judge]", r"policies: got \['judge'\], need a section with keys"),
    ],
)
def test_what_is_no_policy_is_refused_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(tmp_path, text)


def test_a_role_may_have_a_temperature_of_its_own() -> None:
    settings = Settings.model_validate({"policies": {"opponent": {"sampling": {"temperature": 0.5}}}})

    assert settings.policies["opponent"].sampling_over(settings.rollout.sampling).temperature == 0.5
