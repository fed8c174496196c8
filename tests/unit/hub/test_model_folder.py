"""A model's folder for the hub is loaded by transformers, and its card tells all but what is private."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from PIL import Image

from areal_async.cli.main import main
from areal_async.errors import UserError
from areal_async.launch.run_directory import RunDirectory
from tests.unit.hub.conftest import FLAG_SECRET, OPTION_SECRET, SAID, URL_SECRET


def _export(run: Path, *words: str) -> int:
    return main(["export", "--run", str(run), *words])


def _card(folder: Path) -> str:
    return (folder / "README.md").read_text()


def test_the_folder_is_a_model_with_a_card(checkpointed: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "out" / "model"

    assert _export(checkpointed, "--to", str(folder)) == 0

    assert _export(checkpointed) == 0
    plain, model = (AutoModelForCausalLM.from_pretrained(one) for one in (checkpointed / "model_1-3", folder))
    others = dict(plain.named_parameters())
    assert all(torch.equal(one, others[name]) for name, one in model.named_parameters())
    assert AutoTokenizer.from_pretrained(folder).decode([40, 41]) == "FG"
    assert "`README.md`" not in _card(folder), "of the model that it began from"
    card = ModelCard.load(folder / "README.md")
    assert card.data.license == "apache-2.0"
    assert card.data.pipeline_tag == "text-generation"
    assert card.data.library_name == "transformers"
    (result,) = card.data.eval_results or []
    assert (result.metric_type, result.metric_value, card.data.model_name) == ("accuracy", 1.0, "made-1-3")
    assert "![Reward, evaluation and staleness per step](reward.png)" in card.text
    with Image.open(folder / "reward.png") as picture:
        assert picture.size[0] > 500


def test_the_card_tells_of_data_reward_evaluation_settings_versions_hashes_and_licence(
    checkpointed: Path, tmp_path: Path
) -> None:
    assert _export(checkpointed, "--to", str(tmp_path / "model")) == 0

    text = _card(tmp_path / "model")
    assert f"| trained | `answer.py` | `rows.jsonl` train | 7 | `{'5' * 64}` |" in text
    assert "Mean reward: 0.200 over the first 3 steps, 0.200 over the last 3, of 12 trajectories." in text
    assert "| 1-3 | 3 | answer | accuracy 1.000 | 0.100 to 0.900, 8 of 9 answers |" in text
    shown = yaml.safe_load(text.partition("\n````yaml\n")[2].partition("\n````\n")[0])
    assert "\n| `rollout.template.arguments.said` | a  b | a\\|b |\n" in text
    assert shown["model"] == {**RunDirectory(checkpointed).read_settings().model_dump()["model"], "path": "base"}
    assert shown["inference"]["flags"] == ["--api-key", "<hidden>", "--tp", "2"]
    assert shown["rollout"]["template"]["arguments"] == {
        "site": "https://<hidden>@host/x", "apiKey": "<hidden>", "said": SAID,
    }, "what ends a block of code is no end of the settings"  # fmt: skip
    assert "| `trainer.lr` | 1e-06 | 2e-06 |" in text
    assert "| areal_async | 0.1.0 |" in text
    weights = hashlib.sha256((tmp_path / "model" / "model.safetensors").read_bytes()).hexdigest()
    assert f"| `{weights}` | `model.safetensors` |" in text
    assert f"| `{'6' * 64}` | `answer.py`, of the run's code |" in text
    assert "- model `base`: its card says apache-2.0" in text
    assert "- data `rows.jsonl`: nothing here tells which" in text


def test_nothing_private_is_in_the_folder(checkpointed: Path, tmp_path: Path) -> None:
    assert _export(checkpointed, "--to", str(tmp_path / "model")) == 0

    for path in (tmp_path / "model").iterdir():
        private = re.search(
            rb"ann\b|/home|" + "|".join((FLAG_SECRET, OPTION_SECRET, URL_SECRET, '@host"')).encode(), path.read_bytes()
        )
        assert path.suffix in (".png", ".safetensors") or private is None, (path, private)


def test_a_version_is_told_of_up_to_its_step_alone(checkpointed: Path, tmp_path: Path) -> None:
    (checkpointed / "checkpoints" / "1-3").rename(checkpointed / "checkpoints" / "1-2")

    assert _export(checkpointed, "--version", "last", "--to", str(tmp_path / "model")) == 0

    card = ModelCard.load(tmp_path / "model" / "README.md")
    assert "of 8 trajectories" in card.text
    assert "| 1-3 |" not in card.text
    assert card.data.eval_results is None
    assert json.loads((tmp_path / "model" / "areal_async.json").read_text()) == {
        "kind": "model", "run": "made", "version": "1-2",
    }  # fmt: skip


def test_a_folder_with_a_secret_is_never_there(
    checkpointed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "accuracy 1.000")

    assert _export(checkpointed, "--to", str(tmp_path / "out" / "model")) == UserError.exit_code

    told = capsys.readouterr().err
    assert told.startswith("export: README.md would have the value of the variable JUDGE_API_KEY, need none of it;")
    assert told.count("\n") == 1
    assert not list((tmp_path / "out").iterdir())


def test_options_that_do_not_go_together_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--to", "y"], ["--push", "y"], ["--trajectories"]):
        assert _export(run, "--output", "x", *words) == UserError.exit_code
        assert capsys.readouterr().err.startswith("--output: got what is for the hub as well")
