"""Which arms there are, where their records are, and on which settings they are served."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from areal_async.cli.serve import _place, _settings_of, _shares_of
from areal_async.config.settings import Settings
from areal_async.config.sources import load_settings
from areal_async.launch.run_directory import RunDirectory
from areal_async.serving.split import Share


def arguments(**given: Any) -> Namespace:
    return Namespace(**{"run": None, "model": None, "version": None, "split": None, "config": None} | given)


@pytest.mark.parametrize(
    ("given", "shares"),
    [
        ({}, [Share("champion", 1.0)]),
        ({"version": "1-20"}, [Share("1-20", 1.0)]),
        ({"split": "champion=0.9,candidate=0.1"}, [Share("champion", 0.9), Share("candidate", 0.1)]),
    ],
)
def test_a_run_has_the_arms_that_are_asked_for(given: dict[str, Any], shares: list[Share], tmp_path: Path) -> None:
    assert _shares_of(arguments(run="r", **given), tmp_path) == shares


@pytest.mark.parametrize(
    ("model", "name"), [("a/b/tiny/", "tiny"), ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"), ("mé", "m%C3%A9")]
)
def test_a_model_is_one_arm_with_a_name_that_a_header_can_have(model: str, name: str) -> None:
    assert _shares_of(arguments(model=model), None) == [Share(name, 1.0)]


def test_a_run_is_served_on_its_own_settings_without_those_of_its_training(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "r")
    run.path.mkdir()
    words = ["--inference.colocate", "release", "--rollout.sampling.temperature", "0.5"]
    run.write_settings(load_settings(None, words))

    settings, directory = _settings_of(arguments(run=str(run.path)), ["--serve.port", "1"])

    assert settings.inference.colocate is None
    assert (settings.rollout.sampling.temperature, settings.serve.port) == (0.5, 1)
    assert directory == run.path
    assert _place(settings, directory) == run.path / "served"
    assert _place(Settings(), None) == Path("runs/served/Qwen2.5-1.5B-Instruct")
