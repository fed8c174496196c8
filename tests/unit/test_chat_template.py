"""A chat template of the settings is used wherever a conversation is written, and one that does not do is told of."""

from pathlib import Path
from typing import Any

import pytest

from areal_async.cli.main import main
from areal_async.config.settings import Settings, TemplateSettings
from areal_async.config.sft import SftSettings
from areal_async.config.sources import load_settings
from areal_async.errors import UserError
from areal_async.rollout.policy.text import load_codec
from areal_async.trainer.tuning.loop import Examples, load_tokenizer

TINY = Path("configs/models/tiny")
OWN = "{% for message in messages %}[{{ message.content }}]{% endfor %}{% if enable_thinking %}<think>{% endif %}"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (path := tmp_path / "own.jinja").write_text(OWN)
    return path


def test_template_of_the_settings_writes_instead_of_the_tokenizer_s(own: Path) -> None:
    question = [{"role": "user", "content": "2 and 3?"}]
    template = TemplateSettings(path=own, arguments={"enable_thinking": True})
    codec = load_codec(str(TINY), template)
    assert codec.render(question) == "[2 and 3?]<think>"

    settings = SftSettings.model_validate(
        {"model": {"path": str(TINY)}, "dataset": {"path": "x"}, "template": template.model_dump()}
    )
    tokenizer = load_tokenizer(TINY, settings)
    (ids,) = Examples(settings, None, tokenizer).encode([question], for_reply=True)
    assert tokenizer.decode(ids) == "[2 and 3?]<think>"


def test_template_that_does_not_do_is_told_in_one_sentence(tmp_path: Path, own: Path) -> None:
    (broken := tmp_path / "broken.jinja").write_text("{% for message in messages %}{{ message.content }}")
    (raising := tmp_path / "raising.jinja").write_text("{{ raise_exception('no') }}")
    for template, sentence in (
        (TemplateSettings(path=tmp_path / "none.jinja"), r"rollout.template.path: cannot read .*none.jinja"),
        (TemplateSettings(path=broken), r"rollout.template.path: .*broken.jinja cannot write a question: .*endfor"),
        (TemplateSettings(path=raising), r"cannot write a question: TemplateError: no"),
        (TemplateSettings(path=own, arguments={"enable_thinkin": True}), r"arguments: got 'enable_thinkin', which"),
        (TemplateSettings(arguments={"enable_thinking": True}), r"arguments: got 'enable_thinking', which"),
    ):
        with pytest.raises(UserError, match=sentence):
            load_codec(str(TINY), template)
    with pytest.raises(ValueError, match="got 'tools', which is not the template's own"):
        TemplateSettings(arguments={"tools": []})


def test_template_is_given_on_the_command_line_too(own: Path) -> None:
    words: list[Any] = ["--rollout.template.path", str(own), "--rollout.template.arguments.enable_thinking", "false"]
    template = load_settings(None, words, use_environment=False).rollout.template
    assert template == TemplateSettings(path=own, arguments={"enable_thinking": False})
    assert Settings.model_validate(
        Settings(rollout={"template": template}).model_dump(mode="json")
    ).rollout.template == (template)


def test_bad_template_ends_a_run_before_it_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["workflows/gsm8k.py", "--config", "configs/gsm8k_cpu.yaml", "--run.directory", str(tmp_path)]
    assert main(["run", *words, "--rollout.template.path", str(tmp_path / "none.jinja")]) == 2
    assert "rollout.template.path: cannot read" in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "no run directory"
