"""What each row of an evaluation got is kept, and read as nothing else."""

from pathlib import Path

import pytest

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
