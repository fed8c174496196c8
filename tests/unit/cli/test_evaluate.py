"""``eval`` says what answers came to, and refuses what cannot be evaluated in one sentence each."""

import json
import tempfile
from pathlib import Path

import pytest

from areal_async.cli.evaluate import held_out_of, result_of, tell
from areal_async.cli.main import main
from areal_async.config.settings import DatasetSettings, EvalSettings, Settings, TaskSettings
from areal_async.config.sources import dump_settings, load_settings
from areal_async.errors import UserError
from areal_async.launch.run_directory import RunDirectory
from areal_async.protocol.types import Slot, SlotStatus


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory laid out like the repository with a run that is over, and no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    for name in ("configs", "workflows", "model", "temporary", "runs/over"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "workflows" / "mine.py").write_text("async def mine(prompt, policy):\n    return 1.0\n")
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    common = "model: {path: ../model}\ntasks: [{workflow: ../workflows/mine.py, dataset: {path: ../rows.jsonl}}]\n"
    (tmp_path / "configs" / "mine_cpu.yaml").write_text(common + "eval: {dataset: {path: ../rows.jsonl}}\n")
    (tmp_path / "configs" / "nothing.yaml").write_text(common)
    settings = load_settings(Path("configs/mine_cpu.yaml"))
    (tmp_path / "runs" / "over" / "config.yaml").write_text(dump_settings(settings))
    return tmp_path


def answers(*ended: tuple[SlotStatus, float, str], num_samples: int = 1) -> list[tuple[int, Slot]]:
    """Answers to rows, so many to each."""
    made = {"sibling": 0, "sample_uid": "", "oldest": "1-0", "newest": "1-0"}
    slots = [Slot(status=status, reward=reward, reason=reason, **made) for status, reward, reason in ended]
    return [(place // num_samples, slot) for place, slot in enumerate(slots)]


RIGHT, WRONG, LATE = (SlotStatus.SCORED, 1.0, ""), (SlotStatus.SCORED, 0.0, ""), (SlotStatus.FAILED, 0.0, "too late")


def test_failures_are_counted_with_their_reasons_and_are_in_no_mean(capsys: pytest.CaptureFixture[str]) -> None:
    result = result_of(
        answers(RIGHT, LATE, WRONG, LATE, (SlotStatus.REJECTED, 0.0, "no row")), workflow="mine", model="m"
    )

    assert (result.accuracy, result.num_scored, result.num_failed) == (0.5, 2, 3)
    assert result.reasons == {"too late": 2, "no row": 1}
    tell(result, as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "mine: accuracy 0.500 (95 % interval 0.095 to 0.905), 2 rows scored, 3 failed",
        "  2 times: too late",
        "  1 time: no row",
    ]
    tell(result, as_json=True)
    assert json.loads(capsys.readouterr().out)["high"] == pytest.approx(0.905, abs=1e-3)


def test_without_a_scored_row_there_is_no_accuracy() -> None:
    result = result_of(answers(LATE), workflow="mine", model="m")

    assert (result.accuracy, result.low) == (None, None)
    assert result.sentence == "mine: no accuracy: 0 rows scored, 1 failed"


def test_a_mean_of_rewards_that_are_not_0_or_1_is_called_no_accuracy() -> None:
    graded = result_of(answers((SlotStatus.SCORED, -1.0, ""), RIGHT), workflow="mine", model="m")

    assert graded.is_graded
    assert graded.sentence.startswith("mine: mean reward 0.000 (95 % interval ")
    assert not result_of(answers(RIGHT, WRONG), workflow="mine", model="m").is_graded


def test_several_answers_to_a_row_are_told_as_avg_and_pass() -> None:
    ended = answers(RIGHT, WRONG, WRONG, WRONG, WRONG, WRONG, LATE, LATE, num_samples=4)

    result = result_of(ended, workflow="mine", model="m", num_samples=4)

    assert result.accuracy == 0.125
    assert result.pass_at == {"1": 0.125, "2": 0.25, "4": 1.0}
    assert result.sentence.startswith("mine: avg@4 0.125 (95 % interval ")
    assert result.sentence.endswith("), pass@1 0.125, pass@2 0.250, pass@4 1.000, 6 answers scored, 2 failed")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "eval: got neither of FILE.py and --run, need one"),
        (["workflows/mine.py", "--run", "over"], "eval: got both of FILE.py and --run, need one"),
        (["workflows/mine.py", "--version", "1-2"], "--version: got it without --run, need a run that has versions"),
        (["--run", "over", "--model", "model"], "--model: got it with --run, which has its own; "),
        (["workflows/mine.py", "--limit", "0"], "--limit: got 0, need at least 1\n"),
        (["workflows/mine.py", "--samples", "0"], "eval.samples: got '0', need at least 1; "),
        (["workflows/mine.py", "--samples", "2", "--rollout.sampling.temperature", "0"], "eval.samples: got 2 with a "),
        (["workflows/mine.py", "--model", "m", "--server", "http://a:1"], "--model: got --server as well, "),
        (["workflows/mine.py", "--model", "./none"], "model.path: no folder ./none; "),
        (["workflows/no.py", "--config", "configs/mine_cpu.yaml"], "workflow: no file workflows/no.py; "),
        (["workflows/mine.py", "--config", "configs/nothing.yaml"], "eval.dataset: got none, need held-out rows; "),
        (["workflows/mine.py", "--eval.dataset.path", "no.jsonl"], "eval.dataset.path: no file no.jsonl; "),
        (["--run", "none"], "--run: got none, need the name of a run in "),
        (["--run", "over"], "--version: "),
        (["--run", "over", "--version", "1-7"], "--version: "),
    ],
)
def test_mistakes_get_one_sentence_and_leave_nothing_behind(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str], place: Path
) -> None:
    assert main(["eval", *words]) == 2

    error = capsys.readouterr().err
    assert error.startswith(sentence)
    assert error.count("\n") == 1
    assert list((place / "temporary").iterdir()) == []


@pytest.mark.parametrize("words", [["--limit", "3"], ["--eval.limit", "3"], ["--samples", "3"]])
def test_a_live_run_takes_no_settings(words: list[str], capsys: pytest.CaptureFixture[str], place: Path) -> None:
    with RunDirectory(place / "runs" / "over").locked("over"):
        assert main(["eval", "--run", "over", *words]) == 2

    assert capsys.readouterr().err.startswith(f"{words[0]}: got it for a live run, which evaluates by its own settings")


def test_every_task_with_held_out_rows_is_evaluated_or_the_one_that_is_asked_for() -> None:
    def task(name: str) -> TaskSettings:
        return TaskSettings(workflow=f"workflows/{name}.py", dataset=DatasetSettings(path="x"))

    rows = DatasetSettings(path="y")
    other = task("b").model_copy(update={"eval": task("b").eval.model_copy(update={"dataset": rows, "limit": 5})})
    settings = Settings(tasks=(task("a"), other, task("c")), eval=EvalSettings(dataset=rows, limit=9))

    assert [(one.name, limit) for one, _, limit in held_out_of(settings)] == [("a", 9), ("b", 5)]
    assert [(one.name, limit) for one, _, limit in held_out_of(settings, task=other, limit=2)] == [("b", 2)]
    with pytest.raises(UserError, match=r"eval.dataset: got none"):
        held_out_of(settings, task=task("c"))
