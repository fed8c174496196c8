"""What each row of an evaluation got is kept, and read as nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from areal_async.config.settings import DatasetSettings, EvalSettings, ModelSettings, Settings, TaskSettings
from areal_async.errors import UserError
from areal_async.protocol.types import Version
from areal_async.versions import evaluations
from areal_async.versions.evaluations import Answer

ANSWERS = [
    Answer(task="b", row=0, reward=0.5, num_tokens=3),
    Answer(task="a", row=1, sample=1, error="too late"),
    Answer(task="a", row=1, reward=1.0),
]


def test_answers_are_kept_in_their_order_by_version(tmp_path: Path) -> None:
    evaluations.write(tmp_path, Version(1, 20), ANSWERS)
    evaluations.write(tmp_path, Version(1, 5), [])
    (tmp_path / "evaluations" / "notes.jsonl").touch()

    assert evaluations.read(tmp_path, Version(1, 20)) == [ANSWERS[2], ANSWERS[1], ANSWERS[0]]
    assert evaluations.read(tmp_path, Version(1, 5)) == []
    assert evaluations.evaluated(tmp_path) == [Version(1, 5), Version(1, 20)]
    with pytest.raises(UserError, match=r"1-7.jsonl: cannot be read: No such file or directory"):
        evaluations.read(tmp_path, Version(1, 7))


@pytest.mark.parametrize("line", ["", '{"task":"a"}', '{"task":"a","row":0,"reward":1e300}', "x" * 100_000])
def test_what_is_no_answer_is_refused(tmp_path: Path, line: str) -> None:
    evaluations.write(tmp_path, Version(1, 20), ANSWERS)
    with (tmp_path / "evaluations" / "1-20.jsonl").open("a") as file:
        file.write(line + "\n")

    with pytest.raises(UserError, match=r"1-20.jsonl: line 4 is no answer"):
        evaluations.read(tmp_path, Version(1, 20))


def test_another_takes_answers_of_one_version_to_the_same_questions_alone(tmp_path: Path) -> None:
    evaluations.write(tmp_path, Version(1, 20), ANSWERS)
    line = {"eval_id": "1-20", "oldest": "1-20", "newest": "1-20", "workflow": "a", "asked": "x"}
    (tmp_path / "eval.jsonl").write_text(json.dumps(line) + "\n")

    assert evaluations.read_asked(tmp_path, Version(1, 20), "a", "x") == [ANSWERS[2], ANSWERS[1]]
    for task, asked, newest in (("b", "x", "1-20"), ("a", "y", "1-20"), ("a", "x", "1-21")):
        (tmp_path / "eval.jsonl").write_text(json.dumps(line | {"newest": newest}) + "\n")
        assert evaluations.read_asked(tmp_path, Version(1, 20), task, asked) == []


def test_what_is_asked_is_rows_code_and_settings_but_not_the_models_place() -> None:
    def asked(rows: str = "r", code: str = "c", samples: int = 1, **model: Any) -> str:
        settings = Settings(
            tasks=(TaskSettings(workflow="w.py", dataset=DatasetSettings(path="x")),),
            model=ModelSettings(**{"path": "m", **model}),
            eval=EvalSettings(samples=samples),
        )
        return evaluations.asked_of(settings, "w", rows=rows, code={"w.py": code})

    assert asked() == asked(path="elsewhere")
    assert len({asked(), asked("s"), asked(code="d"), asked(samples=2), asked(dtype="float32")}) == 5


def test_other_options_of_an_environment_are_another_question() -> None:
    def asked(**env: Any) -> str:
        task = TaskSettings.model_validate({"workflow": "gym:Nim-v0", "env": env})
        return evaluations.asked_of(Settings(tasks=(task,)), task.name, rows="same", code={})

    assert asked(max_turns=3) == asked(max_turns=3) != asked(max_turns=4)
