"""``try`` refuses what cannot be tried in one sentence each, before anything is started."""

import argparse
import logging
import signal
import tempfile
from pathlib import Path

import pytest
import structlog

from areal_async.cli.main import VERBS, main, split_overrides
from areal_async.cli.run import load_run_settings
from areal_async.cli.starting.trials import TemporaryFolder
from areal_async.cli.try_ import choose_trial_config, read_prompts, read_row, task_of
from areal_async.config.settings import DatasetSettings
from areal_async.errors import UserError
from areal_async.telemetry import log

WORKFLOW = "async def mine(prompt, policy):\n    return 1.0\n"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory laid out like the repository, and no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    for name in ("configs", "workflows", "model", "temporary"):
        (tmp_path / name).mkdir()
    (tmp_path / "workflows" / "mine.py").write_text(WORKFLOW)
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n{"question": "1+2?", "answer": "3"}\n')
    (tmp_path / "configs" / "gsm8k_cpu.yaml").write_text(
        "model: {path: ../model}\ntasks: [{workflow: ../workflows/gsm8k.py, dataset: {path: ../rows.jsonl}}]\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "try: got no workflow; name FILE.py, with :name when "),
        (["workflows/no.py"], "workflow: no file workflows/no.py; "),
        (["workflows/mine.py:other"], "workflow: no coroutine other in workflows/mine.py, got mine; "),
        (["workflows/mine.py", "--n", "0"], "--n: got 0, need at least 1\n"),
        (["workflows/mine.py", "--n", "many"], "argument --n: invalid int value: 'many'; see "),
        (["workflows/mine.py", "--index", "-1"], "--index: got -1, need at least 0\n"),
        (["workflows/mine.py", "--n", "64", "--prompts", "65"], "--n times --prompts: got 4160, need at most 4096\n"),
        (["workflows/mine.py", "--row", "{}", "--index", "3"], "--row: got --index or --prompts as well; "),
        (["workflows/mine.py", "--row", "[1]"], "--row: got [1], need a JSON object "),
        (["workflows/mine.py", "--row", "{a: 1}"], "--row: got {a: 1}, need a JSON object "),
        (["workflows/mine.py", "--index", "2"], "--index 2 --prompts 1: rows.jsonl has 2 rows, need some of these\n"),
        (["workflows/mine.py", "--tokns"], "unknown option --tokns; did you mean --tokens\n"),
        (["workflows/mine.py", "--rollout.group_sise", "2"], "unknown setting rollout.group_sise"),
        (["workflows/mine.py", "--config", "no.yaml"], "configuration: no file no.yaml; "),
        (["workflows/mine.py", "--model.path", "./none"], "model.path: no folder ./none; "),
        (["workflows/mine.py", "--tasks.0.dataset.path", "no.jsonl"], "dataset.path: no file no.jsonl; "),
        (["workflows/mine.py", "--server", "localhost:3"], "server localhost:3: is no address, need one like http://"),
        (["workflows/mine.py", "--server", "http://127.0.0.1:9"], "server http://127.0.0.1:9: cannot be reached: "),
    ],
)
def test_mistakes_get_one_sentence_and_leave_nothing_behind(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str], place: Path
) -> None:
    assert main(["try", *words]) == 2

    error = capsys.readouterr().err
    assert error.startswith(sentence)
    assert error.count("\n") == 1
    assert list((place / "temporary").iterdir()) == []
    assert not (place / "runs").exists()


def test_options_stand_anywhere_and_settings_are_left_to_the_settings() -> None:
    words = ["--n", "4", "w.py", "--server", "http://a:1", "--rollout.max_attempts", "2", "--server", "http://b:2"]
    parser = argparse.ArgumentParser()
    for name, keywords in VERBS["try"].arguments:
        parser.add_argument(name, **keywords)

    own, overrides = split_overrides(words, VERBS["try"])
    parsed = parser.parse_args(own)

    assert overrides == ["--rollout.max_attempts", "2"]
    assert (parsed.file, parsed.n, parsed.server) == ("w.py", 4, ["http://a:1", "http://b:2"])
    assert (parsed.index, parsed.prompts, parsed.row, parsed.json, parsed.tokens) == (0, 1, None, False, False)


def test_a_workflow_without_settings_of_its_own_takes_those_of_gsm8k(place: Path) -> None:
    assert choose_trial_config("workflows/mine.py", None, has_gpu=False) == Path("configs/gsm8k_cpu.yaml")
    assert choose_trial_config("workflows/mine.py", "other.yaml", has_gpu=False) == Path("other.yaml")
    (place / "configs" / "mine_cpu.yaml").write_text("")
    assert choose_trial_config("workflows/mine.py", None, has_gpu=False) == Path("configs/mine_cpu.yaml")
    with pytest.raises(UserError, match="no file configs/mine.yaml, the settings of mine where a GPU is found"):
        choose_trial_config("workflows/mine.py", None, has_gpu=True)


def test_the_task_is_the_one_of_the_workflow_whatever_it_is_called_there() -> None:
    settings = load_run_settings(
        Path("configs/gsm8k_cpu.yaml"),
        "./workflows/mine.py",
        ["--tasks", "[{workflow: a.py, dataset: {path: x}}, {workflow: workflows/mine.py, dataset: {path: y}}]"],
    )

    assert task_of(settings, "./workflows/mine.py").dataset.path == "y"
    assert task_of(settings, "a.py:a").dataset.path == "x"


def test_rows_are_those_asked_for() -> None:
    prompts = read_prompts(DatasetSettings(path="rows.jsonl"), index=1, num_prompts=1)

    assert [(prompt.index, prompt["answer"]) for prompt in prompts] == [(1, "3")]
    assert read_row('{"question": "é", "n": [1]}') == {"question": "é", "n": [1]}


def test_what_is_logged_after_the_folder_of_logs_is_gone_goes_to_stderr_alone(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with TemporaryFolder("try") as logs:
        log.configure("try", logs)

    assert not [one for one in logging.getLogger().handlers if isinstance(one, logging.FileHandler)]
    structlog.get_logger().warning("late")
    assert capsys.readouterr().err.endswith(" warning try: late\n")
    assert list((place / "temporary").iterdir()) == []


def test_a_signal_to_end_leaves_no_folder_and_is_then_what_it_was(place: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    ctrl_c = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background

    try:
        with pytest.raises(KeyboardInterrupt), TemporaryFolder("try"):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, ctrl_c)

    assert list((place / "temporary").iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_folder_of_logs_that_an_error_names_is_kept_and_written_to(place: Path) -> None:
    folder = TemporaryFolder("try")
    logs = folder.__enter__()
    log.configure("try", logs)
    folder.__exit__(UserError, UserError(f"server: ended, see {logs}/server.log"), None)

    structlog.get_logger().warning("late")
    assert "late" in (logs / "try.jsonl").read_text()
